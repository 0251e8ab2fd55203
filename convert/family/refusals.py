"""Refuse checkpoints that cannot be converted correctly: by type, by settings, or because they are quantised."""

from __future__ import annotations

import re
from typing import Any

from ...checkpoint.modelling import register_own_code
from ...checkpoint.source import Checkpoint
from ...errors import UnsupportedError
from .model_type import KV_KEY, ModelType

SOME_TYPES = "llama, mistral, qwen2, qwen3, gemma, gemma2, phi, olmo, granite, cohere, stablelm, starcoder2, mixtral"

_NO_ROUTE = "Types that are rewritten as one that can: gpt_neox, gptj, codegen, gpt2, opt, gpt_neo, bloom, mpt."
_NO_ENCODER_DECODER = "Encoder-decoders that can be converted: t5, mt5, bart, mbart, marian, pegasus, m2m_100."

REFUSED: dict[str, tuple[str, str | None]] = {
    "jetmoe": ("ties the number of query heads to the KV heads, so fewer KV heads are another model", None),
    "doge": ("computes its attention mask from the values of all KV heads (dt_proj)", None),
    "zaya": ("mixes query and key channels of all heads by convolutions", None),
    "mimo_v2_flash": ("gives its sliding layers twice the KV heads", None),
    "deepseek_v4": ("caches one key head for all queries already", None),
    "dots3_note": ("uses multi-head latent attention and has no KV heads to merge", None),
    "dots3_note_text": ("uses multi-head latent attention and has no KV heads to merge", None),
    "persimmon": ("norms queries and keys in a way that no type with a KV setting does", _NO_ROUTE),
    "umt5": ("has relative position biases in every layer, which headfold's code for t5 lacks", _NO_ENCODER_DECODER),
    "longt5": ("reads its source text in windows, which headfold's code for t5 does not", _NO_ENCODER_DECODER),
    "switch_transformers": ("has experts, which headfold's code for t5 lacks", _NO_ENCODER_DECODER),
    "whisper": ("reads sound, which no encoder-decoder that headfold has code for does", _NO_ENCODER_DECODER),
    **dict.fromkeys(
        ("blenderbot", "blenderbot-small", "plbart", "led", "bigbird_pegasus", "pegasus_x", "mvp", "prophetnet"),
        ("is an encoder-decoder that headfold has no code for", _NO_ENCODER_DECODER),
    ),
    **dict.fromkeys(
        ("fsmt", "nllb-moe", "seamless_m4t", "seamless_m4t_v2", "speech_to_text", "encoder-decoder"),
        ("is an encoder-decoder that headfold has no code for", _NO_ENCODER_DECODER),
    ),
    "moonshine": ("has a KV setting that its forward pass cannot run with", None),
}
"""Type → (reason, hint), for types whose reason the general rule would not find or not name well."""

_PACKED = re.compile(r"\.(qweight|qzeros|scales|absmax|quant_map|nested_absmax|SCB|g_idx)$|\.quant_state\.")
_SCALE = re.compile(r"[._](weight_scale|scale|scale_inv|input_scale)$")


def model_type_to_convert(checkpoint: Checkpoint) -> ModelType:
    """Recognise the type of a checkpoint that is to be converted.

    Raises:
        UnsupportedError: it is quantised, its type is not known, or code of its own lies beside the weights.
        CheckpointError: the code of its type is missing.
    """
    _refuse_quantised(checkpoint)
    register_own_code(checkpoint.config, checkpoint.folder)
    return ModelType(checkpoint.config)


def refuse_unconvertible(model_type: ModelType) -> None:
    """Refuse types and settings whose KV heads cannot be merged.

    Raises:
        UnsupportedError: with the reason.
    """
    if model_type.name in REFUSED:
        reason, hint = REFUSED[model_type.name]
        raise UnsupportedError(f"Checkpoints of type {model_type.name} cannot be converted: this type {reason}.", hint)
    _refuse_per_layer(model_type.config)
    if getattr(model_type.text, "kv_lora_rank", None):
        raise UnsupportedError(
            f"Models of type {model_type.name} use multi-head latent attention (kv_lora_rank): "
            f"they cache one latent vector and have no KV heads to merge, whatever {KV_KEY} says."
        )


def no_setting(model_type: str, class_name: str | None = None) -> UnsupportedError:
    """Make the error for a type that cannot run with fewer KV heads."""
    reason = f"{class_name} ignores {KV_KEY}" if class_name else "its class has no setting for the number of KV heads"
    return UnsupportedError(
        f"Models of type {model_type} cannot run with fewer KV heads: {reason}.",
        f"Types that can, among others: {SOME_TYPES}.",
    )


def _refuse_per_layer(config: dict[str, Any]) -> None:
    """Refuse counts that differ from layer to layer: they would need one G per layer, which no class here can load."""
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


def _refuse_quantised(checkpoint: Checkpoint) -> None:
    """Refuse quantised tensors: their numbers are codes, and the average of codes means nothing."""
    hint = "Convert the checkpoint it was quantised from, and quantise the result."
    if checkpoint.config.get("quantization_config"):
        raise UnsupportedError("This checkpoint is quantised (quantization_config in config.json).", hint)
    for name, info in checkpoint.tensors.items():
        # Norms have a `scale` of their own, and some models a `scale` without a weight beside it: neither is a code's.
        scale = _SCALE.search(name) and "norm" not in name and _has_weight(checkpoint, name)
        if _PACKED.search(name) or scale or info.dtype.startswith(("F8", "F4", "F6")):
            raise UnsupportedError(
                f"This checkpoint is quantised: {name} is stored as {info.dtype} codes or scales.", hint
            )
        if re.search(r"[kv]_proj\.weight$", name) and info.dtype not in ("F16", "BF16", "F32", "F64"):
            raise UnsupportedError(f"This checkpoint is quantised: {name} is stored as {info.dtype}.", hint)


def _has_weight(checkpoint: Checkpoint, scale: str) -> bool:
    """Return True if the tensor ``scale`` lies beside the weight that it scales."""
    stem = re.sub(r"[._](weight_scale|scale|scale_inv|input_scale|weight_scale_inv)$", "", scale)
    return stem.removesuffix(".weight") + ".weight" in checkpoint.tensors
