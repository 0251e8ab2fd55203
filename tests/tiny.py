"""Tiny random models of any type of transformers, and the same model with repeated KV heads."""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

_CLASSES = (
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)
HEAD_DIM = 16
LAYERS = 2
KV_KEYS = ("num_key_value_heads", "num_kv_heads", "kv_n_heads", "swa_num_key_value_heads", "num_global_key_value_heads")
HEAD_KEYS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "swa_num_attention_heads")
_HIDDEN_KEYS = ("hidden_size", "d_model", "n_embd", "attention_hidden_size", "lru_width", "embed_dim")
_LISTS_BY_LAYER = ("layer_types", "layers_block_type", "mlp_layer_types")
_SIZES: dict[str, int] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), LAYERS),
    **dict.fromkeys(("head_dim", "attention_head_dim", "kv_channels", "d_kv", "swa_head_dim"), HEAD_DIM),
    **dict.fromkeys(("global_head_dim", "attention_head_size", "v_head_dim", "kv_lora_rank", "q_lora_rank"), HEAD_DIM),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "mamba_d_head"), HEAD_DIM),
    **dict.fromkeys(("mamba_head_dim", "hidden_size_per_layer_input", "query_pre_attn_scalar"), HEAD_DIM),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "shared_intermediate_size"), 64),
    **dict.fromkeys(("shared_expert_intermediate_size", "dense_intermediate_size", "intermediate_size_mlp"), 64),
    **dict.fromkeys(("block_ff_dim", "attention_window_size", "index_topk"), 64),
    **dict.fromkeys(("moe_intermediate_size", "expert_intermediate_size", "moe_shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_routed_experts", "index_n_heads", "linear_num_value_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "moe_top_k"), 2),
    **dict.fromkeys(("num_experts_per_token", "num_selected_experts", "linear_num_key_heads", "altup_num_inputs"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "mamba_n_groups", "n_groups"), 1),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "index_head_dim", "rotary_dim", "laurel_rank"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "mamba_d_state", "ssm_state_size"), 8),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 300),
}
_BLT_STACK = {"vocab_size": 260, "hidden_size_global": 64}
_QWEN4_TEXT = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": HEAD_DIM,
    "hc_lowrank": HEAD_DIM,
    "indexer_budget": 64,
    "indexer_compress_ratio": 4,
    "ngram_vocab_size_base": 1000,
    "ple_embed_dim": 64,
}
_DEPARTURES: dict[str, dict[str, Any]] = {
    "dbrx": {
        "attn_config": {"clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 32, "hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "bamba": {"attn_layer_indices": [1]},
    "blt": {
        "vocab_size": 260,
        "encoder_hash_byte_group_vocab": 500,
        "encoder_config": _BLT_STACK,
        "decoder_config": _BLT_STACK,
        "patcher_config": {"vocab_size": 260},
    },
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")
        },
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "deepseek_v3": {"head_dim": 8, "qk_head_dim": 16},
    "dory": {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "mlp", "full_attention", "mlp", "sliding_attention", "mlp"],
        **dict.fromkeys(("n_input_layers", "n_recurrent_layers", "n_output_layers"), 2),
    },
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "falcon": {"new_decoder_architecture": True},
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hunyuan_v1_dense": {"head_dim": HEAD_DIM},
    "hunyuan_v1_moe": {"head_dim": HEAD_DIM},
    "inkling2_loop_text": {"unpadded_vocab_size": 300},
    "inkling2_text": {"unpadded_vocab_size": 300},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False, "mamba_dt_rank": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": HEAD_DIM},
    "ministral": {"head_dim": HEAD_DIM},
    "phi4_multimodal": {
        "audio_config": {
            "num_blocks": 1,
            **dict.fromkeys(("ext_pw_out_channel", "depthwise_separable_out_channel", "nemo_conv_channels"), 64),
        },
    },
    "qwen4_exp": {"text_config": _QWEN4_TEXT, "vision_config": {"depth": 1, "out_hidden_size": 64}},
    "qwen4_exp_text": _QWEN4_TEXT,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "whisper": dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    "xlnet": {"d_head": HEAD_DIM},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": HEAD_DIM},
    "zamba": {
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "mamba_dt_rank": 8,
        "use_mamba_kernels": False,
        "num_hidden_layers": 5,
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid", "linear_attention", "hybrid"],
    },
    "zamba2": {
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_query_groups": 4,
        "mamba_headdim": HEAD_DIM,
        "n_mamba_heads": 8,
        "num_hidden_layers": 3,
        "hybrid_layer_ids": [2],
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid"],
    },
}


def tiny_config(model_type: str, heads: int = 4, kv_heads: int | None = None, **over: Any) -> Any:
    """The type's default config, shrunk: ``heads`` heads of width 16, hidden size 16·heads, 2 layers, 300 tokens."""
    config_class = CONFIG_MAPPING[model_type]
    values = _shrunk(config_class().to_dict(), heads, heads if kv_heads is None else kv_heads)
    for key, value in (_DEPARTURES.get(model_type, {}) | over).items():
        part = key.endswith("_config") and isinstance(values.get(key), dict)
        values[key] = {**values[key], **copy.deepcopy(value)} if part else copy.deepcopy(value)
    if model_type == "nemotron":
        values["num_key_value_heads"] = kv_heads or heads
    if model_type == "dbrx":
        values["attn_config"]["kv_n_heads"] = kv_heads or heads
        values.pop("num_key_value_heads")
    for name in ("transformers_version", "_name_or_path", "architectures", "model_type", "dtype", "torch_dtype"):
        values.pop(name, None)
    return config_class(**values)


def tiny_model(model_type: str, heads: int = 4, kv_heads: int | None = None, *, seed: int = 0, **over: Any) -> Any:
    """A random language model of that type in evaluation mode; norm weights and biases are random too."""
    logging.set_verbosity_error()
    config = tiny_config(model_type, heads, kv_heads, **over)
    model = new_model(model_type, config).eval()
    randomise(model, seed)
    return model


def new_model(model_type: str, config: Any) -> Any:
    """The type's own language model class, causal where it has one, with the config that it takes."""
    cls = getattr(transformers, next(table[model_type] for table in _CLASSES if model_type in table))
    return cls(config if isinstance(config, cls.config_class) else config.get_text_config())


_T5 = {
    "num_decoder_layers": LAYERS,
    "decoder_start_token_id": 0,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "d_ff": 48,
}
_KIN = {
    **dict.fromkeys(("encoder_layers", "decoder_layers"), LAYERS),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
}
PAIRS: dict[str, dict[str, Any]] = {
    "t5": _T5,
    "mt5": _T5,
    "bart": _KIN,
    "mbart": {**_KIN, "scale_embedding": True, "decoder_start_token_id": 3},
    "marian": {**_KIN, "decoder_vocab_size": 300, "scale_embedding": True},
    "pegasus": _KIN,
    "m2m_100": {**_KIN, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
}
"""Encoder-decoder types that have a tiny model, and what a tiny one of them needs."""


def tiny_pair(model_type: str, *, seed: int = 0, **over: Any) -> Any:
    """A random encoder-decoder of that type with 4 heads in evaluation mode, its norms and biases random too."""
    logging.set_verbosity_error()
    config = tiny_config(model_type, 4, **{**PAIRS[model_type], **over})
    model = transformers.AutoModelForSeq2SeqLM.from_config(config).eval()
    randomise(model, seed)
    if hasattr(model, "final_logits_bias"):
        noise = torch.randn(model.final_logits_bias.shape, generator=torch.Generator().manual_seed(seed))
        model.final_logits_bias.copy_(noise)
    return model


def repeat_kv_heads(model: Any, kv_heads: int, *, tile: bool = False) -> Any:
    """The same function with ``kv_heads`` KV heads: every head is repeated for its neighbours.

    Args:
        tile: repeat in the wrong order (head j serves queries j, j + G, …), for controls that must fail.
    """
    config = copy.deepcopy(model.config)
    set_kv_heads(config, kv_heads)
    torch.manual_seed(0)
    wide = type(model)(config).to(model.dtype).eval()
    few = kv_heads_of(model.config)
    order = [head % few if tile else head * few // kv_heads for head in range(kv_heads)]
    sources = model.state_dict()
    values = {
        name: _repeated(name, sources[_numbered_source(name, sources, order)], target, few, order)
        for name, target in wide.state_dict().items()
    }
    wide.load_state_dict(values)
    return wide


def kv_heads_of(config: Any) -> int:
    """The (first) number of KV heads of the text config."""
    return next(getattr(part, key) for part, key in _kv_settings(config))


def has_kv_heads(config: Any) -> bool:
    """True when the text config has a number of KV heads."""
    return bool(_kv_settings(config))


def set_kv_heads(config: Any, kv_heads: int) -> None:
    """Set every number of KV heads that the (text) config has."""
    for part, key in _kv_settings(config):
        setattr(part, key, kv_heads)


def _kv_settings(config: Any) -> list[tuple[Any, str]]:
    text = config.get_text_config(decoder=True)
    parts = [text, *(getattr(text, name) for name in type(text).sub_configs)]
    return [(part, key) for part in parts for key in KV_KEYS if part and getattr(part, key, None) is not None]


def logits_of(model: Any, *, tokens: int = 12) -> Tensor:
    """Logits for two fixed random sequences, without a cache."""
    ids = torch.randint(5, 200, (2, tokens), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def _numbered_source(name: str, sources: dict[str, Tensor], order: list[int]) -> str:
    """Norms that are one module per head (StableLM's ``k_layernorm.norms.3``): which head's a repeated head gets."""
    match = re.fullmatch(r"(.*\.k_layernorm\.norms\.)(\d+)(\.\w+)", name)
    return f"{match[1]}{order[int(match[2])]}{match[3]}" if match else name


def _repeated(name: str, tensor: Tensor, target: Tensor, few: int, order: list[int]) -> Tensor:
    """``tensor`` with KV heads ``order`` instead of its own, along the axis that differs."""
    if tensor.shape == target.shape:
        return tensor
    axis = next(i for i, (before, after) in enumerate(zip(tensor.shape, target.shape, strict=True)) if before != after)
    rows = tensor.movedim(axis, 0)
    leaf = name.split(".")[-2]
    if leaf == "query_key_value":  # Falcon: each KV head behind its queries
        width = (target.shape[axis] - len(rows)) // (2 * (len(order) - few))
        groups = rows.unflatten(0, (few, -1, width))
        q, k, v = groups[:, :-2].flatten(0, 1), groups[:, -2], groups[:, -1]
        q = q.unflatten(0, (len(order), -1))
        made = torch.cat([q, k[order].unsqueeze(1), v[order].unsqueeze(1)], 1).flatten(0, 2)
    elif leaf in ("qkv_proj", "Wqkv"):  # all queries, all keys, all values
        width = (target.shape[axis] - len(rows)) // (2 * (len(order) - few))
        heads = rows.unflatten(0, (-1, width))
        q, k, v = heads[: -2 * few], heads[-2 * few : -few], heads[-few:]
        made = torch.cat([q, k[order], v[order]]).flatten(0, 1)
    else:
        made = rows.unflatten(0, (few, -1))[order].flatten(0, 1)
    return made.movedim(0, axis)


def _shrunk(values: dict[str, Any], heads: int, kv_heads: int) -> dict[str, Any]:
    layers = next((values[key] for key in ("num_hidden_layers", "n_layer", "num_layers") if values.get(key)), None)
    kept = _layers_to_keep(values)
    small = dict(values)
    for key, value in values.items():
        if isinstance(value, dict):
            plain = key in ("rope_parameters", "rope_scaling", "id2label", "label2id")
            small[key] = value if plain else _shrunk(value, heads, kv_heads)
            if key == "per_layer_config":
                small[key] = {i: _shrunk(one, heads, kv_heads) for i, one in value.items() if int(i) < kept}
        elif isinstance(value, list):
            if key == "num_attention_heads_per_layer":
                small[key] = [heads] * kept
            elif key in _LISTS_BY_LAYER or (layers and len(value) == layers):
                small[key] = value[:kept]
        elif isinstance(value, int) and not isinstance(value, bool):
            small[key] = _shrunk_number(key, value, heads, kv_heads, kept)
    return small


def _shrunk_number(key: str, value: int, heads: int, kv_heads: int, layers: int) -> int:
    if key in KV_KEYS:
        return kv_heads
    if key in HEAD_KEYS:
        return heads
    if key in _HIDDEN_KEYS:
        return heads * HEAD_DIM
    if key in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
        return layers
    if key.endswith("_token_id"):
        return min(value, 250)
    if key in ("max_position_embeddings", "n_positions", "max_sequence_length"):
        return min(value, 512)
    if key in ("sliding_window", "window_size"):
        return min(value, 64)
    return _SIZES.get(key, value)


def _layers_to_keep(values: dict[str, Any]) -> int:
    """Two layers, or as many as it takes to see every kind of layer once."""
    for key in ("layer_types", "layers_block_type"):
        kinds = values.get(key)
        if isinstance(kinds, list) and kinds:
            return max(LAYERS, min(10, 1 + max(kinds.index(kind) for kind in kinds)))
    return LAYERS


def randomise(model: Any, seed: int) -> None:
    """Random weights; norm weights around one, biases around zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.is_floating_point():
                continue
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2:
                parameter.copy_(noise * 0.6 / max(8, parameter.shape[-1]) ** 0.5)
            else:
                parameter.copy_(noise * 0.2 + (1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0))
