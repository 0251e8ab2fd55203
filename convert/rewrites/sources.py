"""The source types that can be rewritten, one row each; see :class:`SourceType` for its columns."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from ...errors import CheckpointError, UnsupportedError
from .decoder import NeutralLayer, TensorNames
from .lazy import at_least_float32
from .source_type import SourceType, by_rows

_CODEGEN_DEVICES = 4
"""CodeGen stores its rows in the order of the four devices that it was trained on."""


def split_heads(rows: Tensor, *counts: int) -> Tensor:
    """Split the first axis into ``counts`` parts, then the rest of it."""
    return rows.reshape(*counts, -1, *rows.shape[1:])


def _head_by_head(rows: Tensor, heads: int, side: int) -> Tensor:
    """q, k and v of the first head, then of the second."""
    return split_heads(rows, heads, 3)[:, side].flatten(0, 1)


def _device_by_device(rows: Tensor, heads: int, side: int) -> Tensor:
    """q, v and k (in this order) of the heads of the first device, then of the second."""
    return split_heads(rows, _CODEGEN_DEVICES, 3)[:, (0, 2, 1)[side]].flatten(0, 1)


def _side_by_side(rows: Tensor, heads: int, side: int) -> Tensor:
    """q of all heads, then k of all, then v of all."""
    return rows.chunk(3)[side]


def _neox(config: Any) -> dict[str, Any]:
    rope = dict(config.rope_parameters)
    factor, theta, kind = (rope.pop(key, None) for key in ("partial_rotary_factor", "rope_theta", "rope_type"))
    _require_even_rotary_dim(config.hidden_size // config.num_attention_heads, factor)
    stretched = {} if kind in (None, "default") else {"rope_scaling": {"rope_type": kind, **rope}}
    return {"rope": {"rope_theta": theta, "partial_rotary_factor": factor, **stretched}}


def _gptj(config: Any) -> dict[str, Any]:
    head_dim, rotary_dim = config.n_embd // config.n_head, config.rotary_dim
    if not isinstance(rotary_dim, int) or not 0 < rotary_dim <= head_dim:
        raise UnsupportedError(f"Its rotary_dim ({rotary_dim}) does not lie between 1 and the head dim ({head_dim}).")
    share = factor_for(head_dim, rotary_dim)
    _require_even_rotary_dim(head_dim, share)
    # its class has 10,000 written into it
    return {"rope": {"rope_theta": 10000.0, "partial_rotary_factor": share}}


def _gpt2(config: Any) -> dict[str, Any]:
    return {"score_scale": None if config.scale_attn_weights else 1.0, "learned_positions": True}


def _opt(config: Any) -> dict[str, Any]:
    projected = config.word_embed_proj_dim != config.hidden_size
    return {
        "norm_eps": 1e-5,  # its class has no setting for it
        "learned_positions": True,
        "positions_from_mask": True,
        "biases": dict.fromkeys(("qkv", "output", "mlp"), bool(config.enable_bias)),
        "embedding_width": config.word_embed_proj_dim if projected else None,
        "norms_first": bool(config.do_layer_norm_before),
        "final_norm": bool(config.do_layer_norm_before and not config._remove_final_layer_norm),
    }


def _gpt_neo(config: Any) -> dict[str, Any]:
    kinds = config.attention_layers
    windows = tuple(config.window_size if kind == "local" else None for kind in kinds)
    return {
        "score_scale": 1.0,  # it does not scale its scores
        "learned_positions": True,
        "windows": windows if "local" in kinds else None,
        "biases": {"qkv": False},
    }


def _bloom(config: Any) -> dict[str, Any]:
    slopes = build_alibi_tensor(torch.ones(1, 2, dtype=torch.long), config.n_head, torch.float32)[:, 0, 1]
    return {
        "inner": None,
        "positions": getattr(config, "seq_length", 2048),  # only some checkpoints say it
        "activation": "gelu_pytorch_tanh",
        "positions_from_mask": True,
        "alibi": tuple(slopes.tolist()),
        "alibi_rounded": True,
        "embedding_norm": True,
    }


def _mpt(config: Any) -> dict[str, Any]:
    attention = config.attn_config
    slopes = -build_mpt_alibi_tensor(config.n_heads, 2)[:, 0, 0]
    dropout = attention.attn_pdrop  # its class uses this one everywhere
    return {
        "inner": None,
        "activation": "gelu",
        "dropouts": {"embedding": 0.0, "residual": dropout, "attention": dropout},
        "score_scale": attention.softmax_scale,
        "alibi": tuple(slopes.tolist()),
        "clip_qkv": attention.clip_qkv or None,
        "biases": dict.fromkeys(("qkv", "output", "mlp", "norm"), False),
    }


def _rotary_pairs_as_halves(layer: NeutralLayer, config: Any, index: int) -> NeutralLayer:
    """GPT-J and CodeGen turn row 2f with row 2f + 1; the neutral form pairs row f with row f + dim/2."""
    heads, rotary_dim = config.n_head, config.rotary_dim
    order = torch.arange(config.n_embd // heads)
    order[:rotary_dim] = torch.cat((torch.arange(0, rotary_dim, 2), torch.arange(1, rotary_dim, 2)))

    def halved(rows: Tensor) -> Tensor:
        return split_heads(rows, heads)[:, order.to(rows.device)].flatten(0, 1)

    return replace(layer, q=by_rows(layer.q, halved), k=by_rows(layer.k, halved))


def _scale_by_layer(layer: NeutralLayer, config: Any, index: int) -> NeutralLayer:
    """GPT-2 can divide the scores by the layer's number; targets have no such setting, so the queries are divided."""
    if not config.scale_attn_by_inverse_layer_idx:
        return layer
    return replace(layer, q=by_rows(layer.q, lambda rows: at_least_float32(rows) / (index + 1)))


def _require_even_rotary_dim(head_dim: int, factor: Any) -> None:
    if not isinstance(factor, (int, float)) or not 0 <= factor <= 1:
        raise CheckpointError(f"config.json rotates a share of {factor} of every head.", "Repair config.json.")
    dim = int(head_dim * factor)
    if dim % 2:
        raise UnsupportedError(f"Its rotary position embedding turns an odd number of rows ({dim} of {head_dim}).")


def factor_for(head_dim: int, rotary_dim: int) -> float:
    """Return the share of a head that is rotated, such that ``int(head_dim * share)`` is ``rotary_dim`` again."""
    share = rotary_dim / head_dim
    return share if int(head_dim * share) == rotary_dim else math.nextafter(share, 1)


_NEOX_LAYER = TensorNames(
    embedding="embed_in",
    layer="layers.{}",
    attention_norm="input_layernorm",
    qkv="attention.query_key_value",
    o="attention.dense",
    mlp_norm="post_attention_layernorm",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
    final_norm="final_layer_norm",
)
_GPTJ_LAYER = TensorNames(
    embedding="wte",
    layer="h.{}",
    attention_norm="ln_1",
    qkv="attn.{}_proj",
    o="attn.out_proj",
    mlp_norm=None,
    up="mlp.fc_in",
    down="mlp.fc_out",
    final_norm="ln_f",
)
_GPT2_LAYER = replace(
    _GPTJ_LAYER, positions="wpe", qkv="attn.c_attn", o="attn.c_proj", mlp_norm="ln_2", up="mlp.c_fc", down="mlp.c_proj"
)
_GPT_DROPOUTS = ("embd_pdrop", "resid_pdrop", "attn_pdrop")
_IGNORED = "which its class in transformers ignores"

SOURCES: dict[str, SourceType] = {
    "gpt_neox": SourceType(
        _NEOX_LAYER,
        dropouts=("hidden_dropout", "hidden_dropout", "attention_dropout"),
        keys={"activation": "hidden_act", "norm_eps": "layer_norm_eps"},
        special=_neox,
        split_qkv=_head_by_head,
        demands=(
            (
                lambda config: (
                    config.use_parallel_residual or config.rope_parameters.get("rope_type", "default") == "default"
                ),
                "it stretches its rotary positions, which transformers 4 ignores in nemotron",
            ),
        ),
    ),
    "gptj": SourceType(
        _GPTJ_LAYER, dropouts=_GPT_DROPOUTS, keys={"inner": "n_inner"}, special=_gptj, adjust=_rotary_pairs_as_halves
    ),
    "codegen": SourceType(
        replace(_GPTJ_LAYER, qkv="attn.qkv_proj"),
        dropouts=_GPT_DROPOUTS,
        keys={"inner": "n_inner"},
        special=_gptj,
        split_qkv=_device_by_device,
        adjust=_rotary_pairs_as_halves,
    ),
    "gpt2": SourceType(
        _GPT2_LAYER,
        dropouts=_GPT_DROPOUTS,
        keys={"inner": "n_inner"},
        special=_gpt2,
        split_qkv=_side_by_side,
        transposed=True,
        adjust=_scale_by_layer,
        demands=((lambda config: not config.add_cross_attention, "it has cross attention (add_cross_attention)"),),
    ),
    "opt": SourceType(
        TensorNames(
            embedding="decoder.embed_tokens",
            positions="decoder.embed_positions",
            layer="decoder.layers.{}",
            attention_norm="self_attn_layer_norm",
            qkv="self_attn.{}_proj",
            o="self_attn.out_proj",
            mlp_norm="final_layer_norm",
            up="fc1",
            down="fc2",
            final_norm="decoder.final_layer_norm",
            project_in="decoder.project_in",
            project_out="decoder.project_out",
        ),
        dropouts=(None, "dropout", "attention_dropout"),
        keys={"inner": "ffn_dim", "initializer_range": "init_std"},
        special=_opt,
        unused_positions=2,
    ),
    "gpt_neo": SourceType(
        replace(_GPT2_LAYER, qkv="attn.attention.{}_proj", o="attn.attention.out_proj"),
        dropouts=("embed_dropout", "resid_dropout", "attention_dropout"),
        special=_gpt_neo,
    ),
    "bloom": SourceType(
        replace(
            _NEOX_LAYER,
            embedding="word_embeddings",
            embedding_norm="word_embeddings_layernorm",
            layer="h.{}",
            qkv="self_attention.query_key_value",
            o="self_attention.dense",
            final_norm="ln_f",
        ),
        dropouts=(None, "hidden_dropout", "attention_dropout"),
        special=_bloom,
        split_qkv=_head_by_head,
        demands=(
            (
                lambda config: not config.apply_residual_connection_post_layernorm,
                "it adds to the output of its norms (apply_residual_connection_post_layernorm)",
            ),
        ),
    ),
    "mpt": SourceType(
        TensorNames(
            embedding="wte",
            layer="blocks.{}",
            attention_norm="norm_1",
            qkv="attn.Wqkv",
            o="attn.out_proj",
            mlp_norm="norm_2",
            up="ffn.up_proj",
            down="ffn.down_proj",
            final_norm="norm_f",
        ),
        dropouts=(None, None, None),
        keys={"positions": "max_seq_len"},
        special=_mpt,
        split_qkv=_side_by_side,
        # with these settings the class in transformers computes something else than the model that was trained
        demands=(
            (
                lambda config: config.attn_config.attn_type == "multihead_attention",
                f"it is multi-query already, {_IGNORED}",
            ),
            (lambda config: config.attn_config.alibi, f"it has learned positions, {_IGNORED}"),
            (lambda config: not config.attn_config.qk_ln, f"it norms queries and keys (qk_ln), {_IGNORED}"),
            (lambda config: not config.attn_config.prefix_lm, f"it looks ahead in a prefix (prefix_lm), {_IGNORED}"),
            (lambda config: config.attn_config.alibi_bias_max == 8, f"its alibi_bias_max is not 8, {_IGNORED}"),
            (lambda config: config.no_bias, f"its layers have biases (no_bias is false), {_IGNORED}"),
            (lambda config: config.logit_scale is None, f"it scales its logits (logit_scale), {_IGNORED}"),
        ),
    ),
}
