"""Write the neutral form as the decoder of our own, whose code goes along with the weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...checkpoint.modelling import OWN_TYPES, own_config
from .decoder import Decoder, Linear, Settings
from .lazy import Lazy
from .targets import TargetType, norm_tensors

_TYPE = OWN_TYPES["headfold_decoder"]
_VERSIONS = "4.57 and 5.24"
"""TESTED of its file, which only these can import."""


def _config(settings: Settings, tied: bool) -> dict[str, Any]:
    """Settings that a checkpoint does not use are left to the class's defaults."""
    used = {
        "score_scale": settings.score_scale,
        "alibi_slopes": None if settings.alibi is None else list(settings.alibi),
        "alibi_in_model_dtype": settings.alibi_rounded or None,
        "attention_windows": None if settings.windows is None else list(settings.windows),
        "clip_qkv": settings.clip_qkv,
        "embedding_size": settings.embedding_width,
    }
    told = {
        "vocab_size": settings.vocabulary,
        "hidden_size": settings.hidden,
        "intermediate_size": settings.inner,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.heads,
        "hidden_act": settings.activation,
        "max_position_embeddings": settings.positions,
        "layer_norm_eps": settings.norm_eps,
        "initializer_range": settings.initializer_range,
        "learned_positions": settings.learned_positions,
        "positions_from_mask": settings.positions_from_mask,
        **{key: value for key, value in used.items() if value is not None},
        "embedding_norm": settings.embedding_norm,
        "norms_first": settings.norms_first,
        "final_norm": settings.final_norm,
        **{f"{kind}_bias": settings.biases.get(kind, True) for kind in ("qkv", "output", "mlp", "norm")},
        **{f"{kind}_dropout": share for kind, share in settings.dropouts.items()},
        "tie_word_embeddings": tied,
    }
    return own_config(_TYPE, told)


def _tensors(decoder: Decoder) -> Iterator[tuple[str, Lazy]]:
    settings = decoder.settings
    yield "model.embed_tokens.weight", decoder.embedding
    if decoder.positions is not None:
        yield "model.embed_positions.weight", decoder.positions
    for name, projection in (("project_in", decoder.project_in), ("project_out", decoder.project_out)):
        if projection is not None:
            yield f"model.{name}.weight", projection.weight
    for index, layer in enumerate(decoder.layers):
        at = f"model.layers.{index}"
        assert layer.mlp_norm is not None
        for name, norm in (("input_layernorm", layer.attention_norm), ("post_attention_layernorm", layer.mlp_norm)):
            yield from norm_tensors(f"{at}.{name}", norm, layer.q.weight, biased=settings.biases.get("norm", True))
        for name, linear, kind in (
            ("self_attn.q_proj", layer.q, "qkv"),
            ("self_attn.k_proj", layer.k, "qkv"),
            ("self_attn.v_proj", layer.v, "qkv"),
            ("self_attn.o_proj", layer.o, "output"),
            ("mlp.fc1", layer.up, "mlp"),
            ("mlp.fc2", layer.down, "mlp"),
        ):
            yield from _linear(f"{at}.{name}", linear, biased=settings.biases.get(kind, True))
    for name, around in (("embed_norm", decoder.embedding_norm), ("norm", decoder.final_norm)):
        if around is not None:
            near = decoder.layers[0].q.weight
            yield from norm_tensors(f"model.{name}", around, near, biased=settings.biases.get("norm", True))
    if decoder.head is not None:
        yield "lm_head.weight", decoder.head.weight


def _linear(at: str, linear: Linear, *, biased: bool) -> Iterator[tuple[str, Lazy]]:
    yield f"{at}.weight", linear.weight
    if biased:
        yield f"{at}.bias", linear.bias_or_zero()


OWN_DECODER = TargetType(
    _TYPE.model_type,
    _TYPE.model_class,
    any_groups=True,
    folds_norms=False,
    config=_config,
    tensors=_tensors,
    runs=f"Its code lies beside the weights ({_TYPE.file_name}) and runs in transformers {_VERSIONS}, loaded "
    "with trust_remote_code=True; headfold itself needs no such permission.",
    fails="vLLM, SGLang, TensorRT-LLM and llama.cpp do not know this type.",
)
