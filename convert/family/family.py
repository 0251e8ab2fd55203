"""What is known of one model type: a rule that needs no row, and rows for the types that depart from it.

The rule: build the type's class on the meta device with the source's KV heads and with fewer; the parameters whose
shape differs are the per-KV-head tensors. A new Llama-like type needs no line here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from ...checkpoint.source import Checkpoint
from ...errors import CheckpointError, UnsupportedError, UsageError
from ..rewrites.encoder_decoder import PAIRS
from ..serving import ignored_by
from .attention_layer import AttentionLayer, find_blocks, in_order, refuse_left_behind
from .kv_config import KvSetting, kv_settings, with_kv_heads
from .kv_parameters import Numbers
from .meta_model import build, known_type, model_class, resolved_config

KV_KEY = "num_key_value_heads"
SOME_TYPES = "llama, mistral, qwen2, qwen3, gemma, gemma2, phi, olmo, granite, cohere, stablelm, starcoder2, mixtral"

_NO_ROUTE = "Types that are rewritten as one that can: gpt_neox, gptj, codegen, gpt2, opt, gpt_neo, bloom, mpt."
_NO_PAIR = f"Encoder-decoders that can be converted: {', '.join(PAIRS)}."

REFUSED: dict[str, tuple[str, str | None]] = {
    "jetmoe": ("ties the number of query heads to the KV heads, so fewer KV heads are another model", None),
    "doge": ("computes its attention mask from the values of all KV heads (dt_proj)", None),
    "zaya": ("mixes query and key channels of all heads by convolutions", None),
    "mimo_v2_flash": ("gives its sliding layers twice the KV heads", None),
    "deepseek_v4": ("caches one key head for all queries already", None),
    "dots3_note": ("uses multi-head latent attention and has no KV heads to merge", None),
    "dots3_note_text": ("uses multi-head latent attention and has no KV heads to merge", None),
    "persimmon": ("norms queries and keys in a way that no type with a KV setting does", _NO_ROUTE),
    "umt5": ("has relative position biases in every layer, which headfold's code for t5 has not", _NO_PAIR),
    "longt5": ("reads its source text in windows, which headfold's code for t5 does not", _NO_PAIR),
    "switch_transformers": ("has experts, which headfold's code for t5 has not", _NO_PAIR),
    "whisper": ("reads sound, which no encoder-decoder that headfold has code for does", _NO_PAIR),
    **dict.fromkeys(
        ("blenderbot", "blenderbot-small", "plbart", "led", "bigbird_pegasus", "pegasus_x", "mvp", "prophetnet"),
        ("is an encoder-decoder that headfold has no code for", _NO_PAIR),
    ),
    **dict.fromkeys(
        ("fsmt", "nllb-moe", "seamless_m4t", "seamless_m4t_v2", "speech_to_text", "encoder-decoder"),
        ("is an encoder-decoder that headfold has no code for", _NO_PAIR),
    ),
    "moonshine": ("has a KV setting that its forward pass cannot run with", None),
}
"""Types whose reason for refusal the rule would not find or not name well."""

FUSED_LAYOUTS = {
    "phi3": "q|k|v",
    "phi4_multimodal": "q|k|v",
    "dbrx": "q|k|v",
    "falcon": "grouped",
    "gpt_bigcode": "grouped",
}
"""How the heads lie in the fused tensors of a type; shapes alone do not tell, so a type without a row is refused."""


@dataclass(frozen=True)
class Family:
    """The attention of one checkpoint.

    Attributes:
        settings: where config.json keeps numbers of KV heads, and what they are; nearly always one.
        blocks: every attention block whose tensors follow those numbers, in the order of the layers.
        initializer_range: standard deviation of fresh weights.
        caches_all_heads: it repeats the KV heads before it caches them, so fewer of them save weights, not cache.
        notes: what is not exact about merging this type's heads, or gains less than one expects; one sentence each.
    """

    model_type: str
    model_class: type[PreTrainedModel]
    settings: tuple[KvSetting, ...]
    query_heads: int
    kv_heads: int
    initializer_range: float
    blocks: tuple[AttentionLayer, ...]
    caches_all_heads: bool = False
    notes: tuple[str, ...] = ()

    @property
    def kv_path(self) -> tuple[str, ...]:
        """Where config.json keeps the (first) number of KV heads, from the top."""
        return self.settings[0].path

    def cached_heads(self, kv_heads: int) -> int:
        """Heads that the cache holds for a layer with ``kv_heads`` KV heads."""
        return self.query_heads if self.caches_all_heads else kv_heads


@dataclass(frozen=True)
class HeadCounts:
    """Heads as the config class resolves them (a missing key means another number in nearly every class).

    ``caches_all_heads``: the class repeats the KV heads before it caches them.
    """

    query_heads: int
    settings: tuple[KvSetting, ...]
    caches_all_heads: bool = False

    @property
    def kv_heads(self) -> int:
        return self.settings[0].heads

    @property
    def kv_path(self) -> tuple[str, ...]:
        return self.settings[0].path


def head_counts(config: dict[str, Any], *, encoder: bool = False) -> HeadCounts:
    """Query and KV heads from config.json alone.

    Args:
        encoder: of an encoder-decoder, count the encoder's, too.

    Raises:
        UnsupportedError: the type is unknown, has no such setting, or sets it per layer.
        CheckpointError: the config class refuses the values.
    """
    model_type = known_type(config)
    _refuse_by_row(model_type)
    _refuse_per_layer(config)
    resolved = resolved_config(_without_null(config))
    _refuse_latent(resolved, model_type)
    query_heads, settings = kv_settings(config, resolved, encoder=encoder)
    if not settings:
        raise no_setting(model_type)
    text = resolved.get_text_config(decoder=True)
    if query_heads < 1 or (getattr(text, "num_hidden_layers", None) or 1) < 1:
        raise CheckpointError("config.json asks for a model without heads or without layers.", "Repair config.json.")
    caches_all_heads = model_type == "falcon" and bool(resolved.new_decoder_architecture)
    return HeadCounts(query_heads, settings, caches_all_heads)


def group_counts(kv_heads: int) -> list[int]:
    """Every number of groups that ``kv_heads`` can be merged into: its divisors."""
    return [groups for groups in range(1, kv_heads + 1) if kv_heads % groups == 0]


def setting_counts(setting: KvSetting) -> list[int]:
    """Every number of groups that config.json can say for this setting."""
    return sorted({1, setting.heads}) if setting.switch else group_counts(setting.heads)


def check_groups(groups: int, kv_heads: int, counts: list[int] | None = None) -> None:
    """Refuse a number of groups that is not possible: one that does not divide, or none of ``counts`` where given.

    Raises:
        UsageError: with the numbers that are.
    """
    counts = group_counts(kv_heads) if counts is None else counts
    if groups in counts:
        return
    choices = ", ".join(map(str, counts)) if len(counts) > 2 else f"only {' or '.join(map(str, counts))}"
    raise UsageError(
        f"{kv_heads} KV heads cannot be merged into {groups} groups.", f"Possible numbers of groups: {choices}."
    )


def find_family(checkpoint: Checkpoint, groups: int, *, encoder: bool = False) -> Family:
    """Recognise the attention tensors of a checkpoint.

    Args:
        encoder: of an encoder-decoder, those of the encoder, too.

    Raises:
        UsageError: ``groups`` does not divide the KV heads.
        UnsupportedError: the checkpoint cannot be converted correctly.
        CheckpointError: config.json and the tensors contradict each other.
    """
    refuse_quantised(checkpoint)
    model_type = known_type(checkpoint.config)
    counts = head_counts(checkpoint.config, encoder=encoder)
    for setting in counts.settings:
        check_groups(groups, setting.heads, setting_counts(setting))
    cls = model_class(checkpoint.config)
    blocks = _find_blocks(checkpoint, cls, counts, groups)
    text = resolved_config(_without_null(checkpoint.config)).get_text_config(decoder=True)
    return Family(
        model_type,
        cls,
        counts.settings,
        counts.query_heads,
        counts.kv_heads,
        _spread(text),
        blocks,
        counts.caches_all_heads,
        tuple(_notes(model_type, blocks, checkpoint, counts.caches_all_heads)),
    )


def _spread(text: Any) -> float:
    """Standard deviation of fresh keys and values, as the class draws them."""
    if isinstance(getattr(text, "initializer_factor", None), (int, float)) and hasattr(text, "d_model"):  # T5
        return float(text.initializer_factor * text.d_model**-0.5)
    named = (getattr(text, name, None) for name in ("initializer_range", "init_std"))
    return next((float(spread) for spread in named if isinstance(spread, (int, float))), 0.02)


def _find_blocks(
    checkpoint: Checkpoint, cls: type[PreTrainedModel], counts: HeadCounts, groups: int
) -> tuple[AttentionLayer, ...]:
    """The class with the source's KV heads against the class with one of its settings lowered, for each setting."""
    lowered = [setting for setting in counts.settings if setting.heads > 1]
    if not lowered:
        return ()
    config = with_kv_heads(checkpoint.config, counts.settings)
    many, blocks = build(cls, config), list[AttentionLayer]()
    fused = FUSED_LAYOUTS.get(known_type(checkpoint.config))
    for setting in lowered:
        fewer = groups if groups < setting.heads else setting_counts(setting)[-2]
        few = build(cls, with_kv_heads(config, [setting], fewer))
        found = find_blocks(checkpoint, many, few, Numbers(counts.query_heads, setting.heads, fewer), fused)
        if not found and len(lowered) == 1:
            raise no_setting(known_type(checkpoint.config), cls.__name__)
        blocks.extend(found)
    refuse_left_behind(many, [block.module for block in blocks])
    return in_order(many, blocks)


def _notes(
    model_type: str, blocks: tuple[AttentionLayer, ...], checkpoint: Checkpoint, caches_all_heads: bool
) -> Iterator[str]:
    if caches_all_heads:
        yield f"{model_type} caches every query head whatever its KV heads: this saves weights, but no KV cache"
    ignored = ignored_by(model_type)
    if ignored is not None:
        yield ignored
    roles = {role for block in blocks for role in block.roles()}
    if any(full_width_norm(block, checkpoint) for block in blocks):
        yield (
            "one norm spans all key heads, so merging keys is approximate: their directions are merged exactly, "
            "their size is set right for the average input"
        )
    if roles & {"k_conv", "k_taps"}:
        yield "convolutions over keys and values are averaged apart from their rows, which is approximate"


def full_width_norm(block: AttentionLayer, checkpoint: Checkpoint) -> bool:
    """True when one norm spans all key heads of the block."""
    return any(
        stored.layout == "k_norm" and not stored.numbered and len(checkpoint.tensors[stored.names[0]].shape) == 1
        for stored in block.stored
    )


def _without_null(config: dict[str, Any]) -> dict[str, Any]:
    """Some config classes refuse an explicit null; it means "as many as query heads", see :func:`head_counts`."""
    return {
        key: _without_null(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if not (key == KV_KEY and value is None)
    }


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
        if isinstance(value, dict) and key.endswith("_config"):
            _refuse_per_layer(value)
        if key == "num_global_key_value_heads" and value is not None and config.get("attention_k_eq_v"):
            raise _per_layer(key)
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


def refuse_quantised(checkpoint: Checkpoint) -> None:
    """The numbers of a quantised tensor are codes; their average means nothing.

    Raises:
        UnsupportedError: the checkpoint is quantised.
    """
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
