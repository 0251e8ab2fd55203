"""What is known of one model type: a rule that needs no row, and rows for the types that depart from it.

The rule: build the type's class on the meta device with the source's KV heads and with fewer; the parameters whose
shape differs are the per-KV-head tensors. A new Llama-like type needs no line here.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from ..checkpoint.source import Checkpoint
from ..errors import CheckpointError, UnsupportedError, UsageError
from .blocks import Block, find_blocks
from .shapes import build, known_type, model_class, resolved_config

KV_KEY = "num_key_value_heads"
SOME_TYPES = "llama, mistral, qwen2, qwen3, gemma, gemma2, phi, olmo, granite, cohere, stablelm, starcoder2, mixtral"

REFUSED: dict[str, tuple[str, str | None]] = {
    "falcon": ("keeps its query, key and value rows fused, and caches all heads whatever their number", None),
    "gpt_bigcode": ("can only switch between one KV head and all (multi_query)", None),
    "dbrx": ("keeps its query, key and value rows fused in Wqkv", None),
    "blt": ("has a KV setting for each of its four stacks", None),
    "jetmoe": ("ties the number of query heads to the KV heads, so fewer KV heads are another model", None),
    "diffllama": ("splits its value heads in two halves across heads, so neighbours do not share", None),
    "mimo_v2_flash": ("gives its sliding layers twice the KV heads", None),
    "moonshine": ("has a KV setting that its forward pass cannot run with", None),
}
"""Types whose reason for refusal the rule would not find or not name well."""


@dataclass(frozen=True)
class Family:
    """The attention of one checkpoint.

    Attributes:
        kv_path: where config.json keeps the number of KV heads, from the top.
        blocks: every attention block whose tensors follow that number, in the order of the layers.
        initializer_range: standard deviation of fresh weights.
    """

    model_type: str
    model_class: type[PreTrainedModel]
    kv_path: tuple[str, ...]
    query_heads: int
    kv_heads: int
    initializer_range: float
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class HeadCounts:
    """Heads as the config class resolves them (a missing key means another number in nearly every class)."""

    query_heads: int
    kv_heads: int
    kv_path: tuple[str, ...]


def head_counts(config: dict[str, Any]) -> HeadCounts:
    """Query and KV heads from config.json alone.

    Raises:
        UnsupportedError: the type is unknown, has no such setting, or sets it per layer.
        CheckpointError: the config class refuses the values.
    """
    model_type = known_type(config)
    _refuse_by_row(model_type)
    _refuse_per_layer(config)
    resolved = resolved_config(_without_null(config))
    text = resolved.get_text_config(decoder=True)
    _refuse_latent(resolved, model_type)
    heads = getattr(text, "num_attention_heads", None)
    key = (getattr(type(text), "attribute_map", None) or {}).get(KV_KEY, KV_KEY)
    kv_heads = getattr(text, KV_KEY, None)
    if not isinstance(heads, int) or (kv_heads is None and not hasattr(text, KV_KEY)):
        raise no_setting(model_type)
    if heads < 1 or (getattr(text, "num_hidden_layers", None) or 1) < 1:
        raise CheckpointError("config.json asks for a model without heads or without layers.", "Repair config.json.")
    path = (*_place(config, resolved, text), key)
    return HeadCounts(heads, heads if kv_heads is None or _is_null(config, path) else int(kv_heads), path)


def group_counts(kv_heads: int) -> list[int]:
    """Every number of groups that ``kv_heads`` can be merged into: its divisors."""
    return [groups for groups in range(1, kv_heads + 1) if kv_heads % groups == 0]


def check_groups(groups: int, kv_heads: int) -> None:
    """Refuse a number of groups that does not divide.

    Raises:
        UsageError: with the numbers that do.
    """
    counts = group_counts(kv_heads)
    if groups in counts:
        return
    choices = ", ".join(map(str, counts)) if len(counts) > 2 else f"only {' or '.join(map(str, counts))}"
    raise UsageError(
        f"{kv_heads} KV heads cannot be merged into {groups} groups.", f"Possible numbers of groups: {choices}."
    )


def find_family(checkpoint: Checkpoint, groups: int) -> Family:
    """Recognise the attention tensors of a checkpoint.

    Raises:
        UsageError: ``groups`` does not divide the KV heads.
        UnsupportedError: the checkpoint cannot be converted correctly.
        CheckpointError: config.json and the tensors contradict each other.
    """
    _refuse_quantised(checkpoint)
    counts = head_counts(checkpoint.config)
    check_groups(groups, counts.kv_heads)
    cls = model_class(checkpoint.config)
    blocks: tuple[Block, ...] = ()
    if counts.kv_heads > 1:
        fewer = groups if groups < counts.kv_heads else 1
        many = build(cls, with_kv_heads(checkpoint.config, counts.kv_path, counts.kv_heads))
        few = build(cls, with_kv_heads(checkpoint.config, counts.kv_path, fewer))
        blocks = find_blocks(checkpoint, many, few, counts.query_heads, counts.kv_heads, fewer)
        if not blocks:
            raise no_setting(known_type(checkpoint.config), cls.__name__)
    text = resolved_config(_without_null(checkpoint.config)).get_text_config(decoder=True)
    spread = getattr(text, "initializer_range", None)
    return Family(
        known_type(checkpoint.config),
        cls,
        counts.kv_path,
        counts.query_heads,
        counts.kv_heads,
        float(spread) if isinstance(spread, (int, float)) else 0.02,
        blocks,
    )


def with_kv_heads(config: dict[str, Any], path: tuple[str, ...], kv_heads: int) -> dict[str, Any]:
    """A copy of config.json's contents with another number of KV heads."""
    edited = copy.deepcopy(config)
    place = edited
    for key in path[:-1]:
        place = place.setdefault(key, {})
    place[path[-1]] = kv_heads
    return edited


def _place(config: dict[str, Any], resolved: PretrainedConfig, text: PretrainedConfig) -> tuple[str, ...]:
    """The sub-config of config.json that describes the text decoder; () when it is the top level."""
    if text is resolved:
        return ()
    for name in type(resolved).sub_configs:
        if getattr(resolved, name, None) is text and isinstance(config.get(name), dict):
            return (name,)
    raise UnsupportedError("config.json does not show where the settings of the text decoder are.")


def _without_null(config: dict[str, Any]) -> dict[str, Any]:
    """Some config classes refuse an explicit null; it means "as many as query heads", see :func:`head_counts`."""
    return {
        key: _without_null(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if not (key == KV_KEY and value is None)
    }


def _is_null(config: dict[str, Any], path: tuple[str, ...]) -> bool:
    place: Any = config
    for key in path[:-1]:
        place = place.get(key, {})
    return path[-1] in place and place[path[-1]] is None


def no_setting(model_type: str, class_name: str | None = None) -> UnsupportedError:
    reason = f"{class_name} ignores {KV_KEY}" if class_name else "its class has no setting for the number of KV heads"
    return UnsupportedError(
        f"Models of type {model_type} cannot run with fewer KV heads: {reason}.",
        f"Types that can, among others: {SOME_TYPES}.",
    )


def _refuse_by_row(model_type: str) -> None:
    if model_type in REFUSED:
        reason, hint = REFUSED[model_type]
        raise UnsupportedError(f"Checkpoints of type {model_type} cannot be converted: this type {reason}.", hint)


def _refuse_per_layer(config: dict[str, Any]) -> None:
    """Counts that differ from layer to layer would need one G per layer, which no class here can load."""
    for key, value in config.items():
        names_kv_heads = re.search(r"(num|n)_(key_value|kv)_heads|num_query_groups", key)
        if key in ("per_layer_config", "block_configs") and "key_value_heads" in repr(value):
            raise _per_layer(key)
        if names_kv_heads and isinstance(value, (list, dict)):
            raise _per_layer(key)


def _per_layer(key: str) -> UnsupportedError:
    return UnsupportedError(f"The KV heads of this checkpoint differ from layer to layer ({key} in config.json).")


def _refuse_latent(resolved: PretrainedConfig, model_type: str) -> None:
    if getattr(resolved.get_text_config(decoder=True), "kv_lora_rank", None):
        raise UnsupportedError(
            f"Models of type {model_type} use multi-head latent attention (kv_lora_rank): "
            f"they cache one latent vector and have no KV heads to merge, whatever {KV_KEY} says."
        )


def _refuse_quantised(checkpoint: Checkpoint) -> None:
    """The numbers of a quantised tensor are codes; their average means nothing."""
    hint = "Convert the checkpoint it was quantised from, and quantise the result."
    if checkpoint.config.get("quantization_config"):
        raise UnsupportedError("This checkpoint is quantised (quantization_config in config.json).", hint)
    for name, info in checkpoint.tensors.items():
        packed = re.search(r"\.(qweight|qzeros|scales|absmax|quant_map|nested_absmax|SCB|g_idx)$|\.quant_state\.", name)
        scale = re.search(r"[._](weight_scale|scale|scale_inv|input_scale)$", name) and "norm" not in name
        if packed or info.dtype.startswith(("F8", "F4", "F6")) or (scale and _has_weight(checkpoint, name)):
            raise UnsupportedError(
                f"This checkpoint is quantised: {name} is stored as {info.dtype} codes or scales.", hint
            )
        if re.search(r"[kv]_proj\.weight$", name) and info.dtype not in ("F16", "BF16", "F32", "F64"):
            raise UnsupportedError(f"This checkpoint is quantised: {name} is stored as {info.dtype}.", hint)


def _has_weight(checkpoint: Checkpoint, scale: str) -> bool:
    """True when the tensor ``scale`` lies beside the weight it scales."""
    stem = re.sub(r"[._](weight_scale|scale|scale_inv|input_scale|weight_scale_inv)$", "", scale)
    return stem.removesuffix(".weight") + ".weight" in checkpoint.tensors
