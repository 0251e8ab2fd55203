"""Find where config.json keeps numbers of KV heads: nearly always one key, at the place that the config class reads."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from ...errors import CheckpointError, UnsupportedError, UsageError
from .model_type import KV_KEY, ModelType

DECODER, ENCODER = KV_KEY, "encoder_num_key_value_heads"
"""Keys for the KV heads of the two sides of headfold's own encoder-decoders."""
_KEYS = (KV_KEY, "num_kv_heads")
_SWITCH = "multi_query"
_FURTHER = ("swa_num_key_value_heads",)
"""Settings of another kind of layer, beside the usual one."""
_PLACES: dict[str, tuple[tuple[str, ...], ...]] = {
    "dbrx": (("attn_config", "kv_n_heads"),),
    "blt": tuple((f"{stack}_config", "num_key_value_heads") for stack in ("global", "encoder", "decoder", "patcher")),
}
"""Types that keep them elsewhere."""


@dataclass(frozen=True)
class KvSetting:
    """One number of KV heads.

    Attributes:
        path: keys of config.json, from the top.
        heads: the number, as the config class resolves it.
        mirrors: other places that must say the same where config.json has them.
        switch: config.json has no number there, but says whether there is one KV head or as many as query heads.
    """

    path: tuple[str, ...]
    heads: int
    mirrors: tuple[tuple[str, ...], ...] = ()
    switch: bool = False

    def value(self, kv_heads: int) -> int | bool:
        """Return what config.json says for ``kv_heads``."""
        return kv_heads == 1 if self.switch else kv_heads

    def shown(self, kv_heads: int) -> str:
        """Return the same as text."""
        return json.dumps(self.value(kv_heads))


def kv_settings(model_type: ModelType, *, encoder: bool = False) -> tuple[int, tuple[KvSetting, ...]]:
    """Find the query heads and the text decoder's numbers of KV heads, none when its class has no such setting.

    Args:
        encoder: find those of the encoder, too.

    Raises:
        UnsupportedError: config.json does not show where the decoder's settings are, or encoder and decoder have
            different numbers of query heads.
        UsageError: there is no encoder whose number can be set.
    """
    config, resolved = model_type.config, model_type.resolved
    if model_type.is_encoder_decoder:
        return _of_encoder_decoder(resolved, encoder)
    if encoder:
        raise UsageError(f"Models of type {model_type.name} have no encoder to convert.", "Leave --encoder out.")
    # This comes first: these types resolve a number of KV heads too, but it follows from the switch or is ignored.
    if _is_switch(resolved):
        all_heads = int(resolved.num_attention_heads)
        return all_heads, (KvSetting((_SWITCH,), 1 if resolved.multi_query else all_heads, switch=True),)
    places = _PLACES.get(model_type.name)
    if places is not None:
        return _elsewhere(resolved, places)
    text = model_type.text
    heads = getattr(text, "num_attention_heads", None)
    key = next((key for key in _KEYS if hasattr(text, key)), None)
    if not isinstance(heads, int) or key is None:
        return 0, ()
    place = _place(config, resolved, text)
    names = [key, *(name for name in _FURTHER if getattr(text, name, None) is not None)]
    return heads, tuple(_setting(config, text, place, name, heads) for name in names)


def query_heads(resolved: Any) -> tuple[int, int]:
    """Return the query heads of the decoder and of the encoder.

    Raises:
        CheckpointError: there are none.
    """
    both = tuple(
        int(getattr(resolved, f"{side}_attention_heads", None) or resolved.num_attention_heads)
        for side in ("decoder", "encoder")
    )
    if min(both) < 1:
        raise CheckpointError("config.json asks for a model without heads.", "Repair config.json.")
    return both[0], both[1]


def with_kv_heads(config: dict[str, Any], settings: Iterable[KvSetting], kv_heads: int | None = None) -> dict[str, Any]:
    """Copy config.json with these settings spelled out, at their own numbers or at ``kv_heads``."""
    # A shallow copy would share the sub-configs with the source.
    edited = copy.deepcopy(config)
    for setting in settings:
        number = setting.heads if kv_heads is None else kv_heads
        for path in (setting.path, *present(config, setting.mirrors)):
            place = edited
            for key in path[:-1]:
                place = place.setdefault(key, {})
            place[path[-1]] = setting.value(number)
    return edited


def present(config: dict[str, Any], paths: Iterable[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """Yield the paths that config.json has."""
    for path in paths:
        found: Any = config
        for key in path[:-1]:
            found = found.get(key, {}) if isinstance(found, dict) else {}
        if isinstance(found, dict) and path[-1] in found:
            yield path


def _of_encoder_decoder(resolved: Any, encoder: bool) -> tuple[int, tuple[KvSetting, ...]]:
    """Find the settings of an encoder-decoder of headfold's own."""
    # One --groups sets both sides, so it must divide the same number of heads.
    heads, encoder_heads = query_heads(resolved)
    found = [KvSetting((DECODER,), int(getattr(resolved, DECODER)))]
    if encoder and heads != encoder_heads:
        raise UnsupportedError(
            f"The encoder has {encoder_heads} query heads and the decoder {heads}, so they are not converted together.",
            "Leave --encoder out.",
        )
    if encoder:
        found.append(KvSetting((ENCODER,), int(getattr(resolved, ENCODER))))
    return heads, tuple(found)


def _is_switch(resolved: PretrainedConfig) -> bool:
    """Return True if the type knows one KV head or all: GPTBigCode, and Falcon in its old layout."""
    old_falcon = resolved.model_type == "falcon" and not resolved.new_decoder_architecture
    return old_falcon or resolved.model_type == "gpt_bigcode"


def _setting(
    config: dict[str, Any], text: PretrainedConfig, place: tuple[str, ...], name: str, query_heads: int
) -> KvSetting:
    path = (*place, (getattr(type(text), "attribute_map", None) or {}).get(name, name))
    heads = getattr(text, name)
    absent = heads is None or _is_null(config, path)
    return KvSetting(path, query_heads if absent else int(heads))


def _elsewhere(resolved: PretrainedConfig, places: tuple[tuple[str, ...], ...]) -> tuple[int, tuple[KvSetting, ...]]:
    settings = []
    for path in places:
        part: Any = resolved
        for key in path[:-1]:
            part = getattr(part, key)
        settings.append(KvSetting(path, int(getattr(part, path[-1])), ((KV_KEY,),)))
    holder = resolved if hasattr(resolved, "num_attention_heads") else getattr(resolved, places[0][0])
    return int(holder.num_attention_heads), tuple(settings)


def _place(config: dict[str, Any], resolved: PretrainedConfig, text: PretrainedConfig) -> tuple[str, ...]:
    """Find the sub-config of config.json that describes the text decoder, or () when it is the top level."""
    if text is resolved:
        return ()
    for name in type(resolved).sub_configs:
        if getattr(resolved, name, None) is text and isinstance(config.get(name), dict):
            return (name,)
    raise UnsupportedError("config.json does not show where the settings of the text decoder are.")


def _is_null(config: dict[str, Any], path: tuple[str, ...]) -> bool:
    """Return True if config.json says null, which means "as many as query heads"; some classes read it otherwise."""
    return any(_value(config, found) is None for found in present(config, [path]))


def _value(config: dict[str, Any], path: tuple[str, ...]) -> Any:
    found: Any = config
    for key in path:
        found = found[key]
    return found
