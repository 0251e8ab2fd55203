"""Recognise the attention of a checkpoint: a rule that needs no row, and rows for the types that depart from it.

The rule: build the type's class on the meta device with the source's KV heads and with fewer. The parameters whose
shape differs are the tensors of the KV heads. A new Llama-like type needs no line here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...checkpoint.source import Checkpoint
from ...console import counted
from ...errors import CheckpointError, UsageError
from .attention_layer import AttentionLayer
from .finder import find_layers, in_order, refuse_left_behind
from .kv_config import KvSetting, kv_settings, with_kv_heads
from .kv_parameters import HeadNumbers
from .model_type import ModelType
from .refusals import no_setting, refuse_unconvertible

FUSED_LAYOUTS = {
    "phi3": "q|k|v",
    "phi4_multimodal": "q|k|v",
    "dbrx": "q|k|v",
    "falcon": "grouped",
    "gpt_bigcode": "grouped",
}
"""Type → order of the heads in its fused tensors. Shapes do not tell it, so a fused type without a row is refused."""


@dataclass(frozen=True)
class HeadCounts:
    """Heads as the config class resolves them (a missing key means another number in nearly every class).

    Attributes:
        settings: where config.json keeps numbers of KV heads, and what they are; nearly always one.
        caches_all_heads: the class repeats the KV heads before it caches them, so fewer save weights, not cache.
    """

    query_heads: int
    settings: tuple[KvSetting, ...]
    caches_all_heads: bool = False

    @property
    def kv_heads(self) -> int:
        return self.settings[0].heads

    def cached_heads(self, kv_heads: int) -> int:
        """Return the heads that the cache holds for a layer with ``kv_heads`` KV heads."""
        return self.query_heads if self.caches_all_heads else kv_heads


@dataclass(frozen=True)
class Family:
    """The attention of one checkpoint.

    Attributes:
        counts: its query heads, and the numbers of KV heads in config.json.
        layers: every attention layer whose tensors depend on those numbers, in the order of the class.
        initializer_range: standard deviation of fresh weights.
        notes: what is not exact about merging this type's heads, or gains less than one expects; one sentence each.
    """

    model_type: str
    counts: HeadCounts
    initializer_range: float
    layers: tuple[AttentionLayer, ...]
    notes: tuple[str, ...] = ()

    @property
    def settings(self) -> tuple[KvSetting, ...]:
        return self.counts.settings

    @property
    def query_heads(self) -> int:
        return self.counts.query_heads

    @property
    def kv_heads(self) -> int:
        return self.counts.kv_heads


def head_counts(model_type: ModelType, *, encoder: bool = False) -> HeadCounts:
    """Count query and KV heads from config.json alone.

    Args:
        encoder: count those of an encoder-decoder's encoder, too.

    Raises:
        UnsupportedError: the type has no such setting, or sets it per layer.
        CheckpointError: the config class refuses the values.
    """
    refuse_unconvertible(model_type)
    query_heads, settings = kv_settings(model_type, encoder=encoder)
    if not settings:
        raise no_setting(model_type.name)
    if query_heads < 1 or (getattr(model_type.text, "num_hidden_layers", None) or 1) < 1:
        raise CheckpointError("config.json asks for a model without heads or without layers.", "Repair config.json.")
    caches_all_heads = model_type.name == "falcon" and bool(model_type.resolved.new_decoder_architecture)
    return HeadCounts(query_heads, settings, caches_all_heads)


def group_counts(kv_heads: int) -> list[int]:
    """List the numbers of groups that ``kv_heads`` can be merged into: its divisors."""
    return [groups for groups in range(1, kv_heads + 1) if kv_heads % groups == 0]


def setting_counts(setting: KvSetting) -> list[int]:
    """List the numbers of groups that config.json can say for this setting."""
    return sorted({1, setting.heads}) if setting.switch else group_counts(setting.heads)


def check_groups(groups: int, kv_heads: int, counts: list[int] | None = None) -> None:
    """Refuse a number of groups that does not divide the KV heads, or is not among ``counts`` where given.

    Raises:
        UsageError: with the numbers that are possible.
    """
    counts = group_counts(kv_heads) if counts is None else counts
    if groups in counts:
        return
    choices = ", ".join(map(str, counts)) if len(counts) > 2 else f"only {' or '.join(map(str, counts))}"
    raise UsageError(
        f"{counted(kv_heads, 'KV head')} cannot be merged into {counted(groups, 'group')}.",
        f"Possible numbers of groups: {choices}.",
    )


def find_family(checkpoint: Checkpoint, model_type: ModelType, groups: int, *, encoder: bool = False) -> Family:
    """Recognise the attention tensors of a checkpoint.

    Args:
        encoder: recognise those of an encoder-decoder's encoder, too.

    Raises:
        UsageError: ``groups`` does not divide the KV heads.
        UnsupportedError: the checkpoint cannot be converted correctly.
        CheckpointError: config.json and the tensors contradict each other.
    """
    counts = head_counts(model_type, encoder=encoder)
    for setting in counts.settings:
        check_groups(groups, setting.heads, setting_counts(setting))
    layers = _find_layers(checkpoint, model_type, counts, groups)
    notes = tuple(_notes(model_type.name, layers, checkpoint, caches_all_heads=counts.caches_all_heads))
    return Family(model_type.name, counts, _spread(model_type.text), layers, notes)


def _spread(text: Any) -> float:
    """Find the standard deviation of fresh keys and values, as the class draws them."""
    if isinstance(getattr(text, "initializer_factor", None), (int, float)) and hasattr(text, "d_model"):  # T5
        return float(text.initializer_factor * text.d_model**-0.5)
    named = (getattr(text, name, None) for name in ("initializer_range", "init_std"))
    return next((float(spread) for spread in named if isinstance(spread, (int, float))), 0.02)


def _find_layers(
    checkpoint: Checkpoint, model_type: ModelType, counts: HeadCounts, groups: int
) -> tuple[AttentionLayer, ...]:
    """Compare the class at the source's KV heads with the class at fewer, for each of its settings."""
    lowered = [setting for setting in counts.settings if setting.heads > 1]
    if not lowered:
        return ()
    config = with_kv_heads(model_type.config, counts.settings)
    many, layers = model_type.on_meta(config), list[AttentionLayer]()
    for setting in lowered:
        # With G = K nothing is lowered, and the two classes would be equal: take the next possible number instead.
        fewer = groups if groups < setting.heads else setting_counts(setting)[-2]
        few = model_type.on_meta(with_kv_heads(config, [setting], fewer))
        numbers = HeadNumbers(counts.query_heads, setting.heads, fewer)
        found = find_layers(checkpoint, model_type, many, few, numbers, FUSED_LAYOUTS.get(model_type.name))
        if not found and len(lowered) == 1:
            raise no_setting(model_type.name, model_type.model_class.__name__)
        layers.extend(found)
    refuse_left_behind(many, [layer.module for layer in layers])
    return in_order(many, layers)


def _notes(
    model_type: str, layers: tuple[AttentionLayer, ...], checkpoint: Checkpoint, *, caches_all_heads: bool
) -> Iterator[str]:
    if caches_all_heads:
        yield f"{model_type} caches every query head whatever its KV heads: this saves weights, but no KV cache"
    roles = {role for layer in layers for role in layer.roles()}
    if any(full_width_norm(layer, checkpoint) for layer in layers):
        yield (
            "one norm spans all key heads, so merging keys is approximate: their directions are merged exactly, "
            "their size is set right for the average input"
        )
    if roles & {"k_conv", "k_taps"}:
        yield "convolutions over keys and values are averaged apart from their rows, which is approximate"


def full_width_norm(layer: AttentionLayer, checkpoint: Checkpoint) -> bool:
    """Return True if one norm spans all key heads of the layer."""
    return any(
        stored.layout == "k_norm" and not stored.numbered and len(checkpoint.tensors[stored.names[0]].shape) == 1
        for stored in layer.stored
    )
