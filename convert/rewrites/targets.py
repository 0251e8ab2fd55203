"""The types that a decoder can be written as, one row each; see :class:`TargetType` for its columns.

config.json has the keys of transformers 4 (``rope_theta``, ``torch_dtype``), since version 5 reads them and version 4
does not read the new ones. Every target is written with as many KV heads as query heads. Merging them is the next step.
"""

from __future__ import annotations

from typing import Any

from ...checkpoint.modelling import OWN_TYPES, own_config
from .decoder import NeutralSettings, TensorNames
from .target_type import TargetType

_OWN = OWN_TYPES["headfold_decoder"]


def _usual_keys(settings: NeutralSettings) -> dict[str, Any]:
    return {
        "vocab_size": settings.vocabulary,
        "hidden_size": settings.hidden,
        "intermediate_size": settings.inner,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.heads,
        "hidden_act": settings.activation,
        "max_position_embeddings": settings.positions,
        "initializer_range": settings.initializer_range,
        "attention_dropout": settings.dropouts["attention"],
        **settings.rope,
    }


def _phi(settings: NeutralSettings, tied: bool) -> dict[str, Any]:
    return {
        **_usual_keys(settings),
        "layer_norm_eps": settings.norm_eps,
        "resid_pdrop": settings.dropouts["residual"],
        "embd_pdrop": settings.dropouts["embedding"],
        "qk_layernorm": False,
        "tie_word_embeddings": False,  # its head has a bias, and vLLM wants it untied
    }


def _nemotron(settings: NeutralSettings, tied: bool) -> dict[str, Any]:
    return {
        **_usual_keys(settings),
        "head_dim": settings.head_dim,
        "norm_eps": settings.norm_eps,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": tied,
    }


def _bigcode(settings: NeutralSettings, tied: bool) -> dict[str, Any]:
    return {
        "vocab_size": settings.vocabulary,
        "n_positions": settings.positions,
        "n_embd": settings.hidden,
        "n_layer": settings.layers,
        "n_head": settings.heads,
        "n_inner": settings.inner,
        "activation_function": settings.activation,
        "resid_pdrop": settings.dropouts["residual"],
        "embd_pdrop": settings.dropouts["embedding"],
        "attn_pdrop": settings.dropouts["attention"],
        "layer_norm_epsilon": settings.norm_eps,
        "initializer_range": settings.initializer_range,
        "scale_attn_weights": settings.score_scale is None,
        "attention_softmax_in_fp32": True,
        "scale_attention_softmax_in_fp32": True,
        "multi_query": False,
        "tie_word_embeddings": tied,
    }


def _own_decoder(settings: NeutralSettings, tied: bool) -> dict[str, Any]:
    only_where_used = {
        "score_scale": settings.score_scale,
        "alibi_slopes": None if settings.alibi is None else list(settings.alibi),
        "alibi_in_model_dtype": settings.alibi_rounded or None,
        "attention_windows": None if settings.windows is None else list(settings.windows),
        "clip_qkv": settings.clip_qkv,
        "embedding_size": settings.embedding_width,
    }
    keys = {
        **_usual_keys(settings),
        "layer_norm_eps": settings.norm_eps,
        "learned_positions": settings.learned_positions,
        "positions_from_mask": settings.positions_from_mask,
        **{key: value for key, value in only_where_used.items() if value is not None},
        "embedding_norm": settings.embedding_norm,
        "norms_first": settings.norms_first,
        "final_norm": settings.final_norm,
        **{f"{kind}_bias": settings.biases.get(kind, True) for kind in ("qkv", "output", "mlp", "norm")},
        **{f"{kind}_dropout": share for kind, share in settings.dropouts.items()},
        "tie_word_embeddings": tied,
    }
    return own_config(_OWN, keys)


PHI = TargetType(
    "phi",
    "PhiForCausalLM",
    TensorNames(
        embedding="model.embed_tokens",
        layer="model.layers.{}",
        attention_norm="input_layernorm",
        qkv="self_attn.{}_proj",
        o="self_attn.dense",
        mlp_norm=None,
        up="mlp.fc1",
        down="mlp.fc2",
        final_norm="model.final_layernorm",
    ),
    any_groups=True,
    config=_phi,
    head_has_bias=True,
)
NEMOTRON = TargetType(
    "nemotron",
    "NemotronForCausalLM",
    TensorNames(
        embedding="model.embed_tokens",
        layer="model.layers.{}",
        attention_norm="input_layernorm",
        qkv="self_attn.{}_proj",
        o="self_attn.o_proj",
        mlp_norm="post_attention_layernorm",
        up="mlp.up_proj",
        down="mlp.down_proj",
        final_norm="model.norm",
    ),
    any_groups=True,
    config=_nemotron,
    # In 16 bits "weight - 1" loses the digits of small weights. So the norms of the layers are folded away, and only
    # the last one is stored so: the layer that follows it has no bias to fold into.
    norms_minus=1.0,
)
GPT_BIGCODE = TargetType(
    "gpt_bigcode",
    "GPTBigCodeForCausalLM",
    TensorNames(
        embedding="transformer.wte",
        positions="transformer.wpe",
        layer="transformer.h.{}",
        attention_norm="ln_1",
        qkv="attn.c_attn",
        o="attn.c_proj",
        mlp_norm="ln_2",
        up="mlp.c_fc",
        down="mlp.c_proj",
        final_norm="transformer.ln_f",
    ),
    any_groups=False,
    config=_bigcode,
    folds_norms=False,
)
OWN_DECODER = TargetType(
    _OWN.model_type,
    _OWN.model_class,
    TensorNames(
        embedding="model.embed_tokens",
        positions="model.embed_positions",
        embedding_norm="model.embed_norm",
        project_in="model.project_in",
        project_out="model.project_out",
        layer="model.layers.{}",
        attention_norm="input_layernorm",
        qkv="self_attn.{}_proj",
        o="self_attn.o_proj",
        mlp_norm="post_attention_layernorm",
        up="mlp.fc1",
        down="mlp.fc2",
        final_norm="model.norm",
    ),
    any_groups=True,
    config=_own_decoder,
    folds_norms=False,
    optional_biases=True,
)
