"""Read into the neutral form the types that only our own decoder can hold: GPT-Neo, BLOOM and MPT."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from .decoder import Decoder, Linear, NeutralLayer, Settings
from .reader import Reader, by_side
from .sources import dropouts, split_heads, third


def gpt_neo_settings(config: Any) -> Settings:
    """Settings of ``gpt_neo``, which does not scale its scores."""
    kinds = config.attention_layers
    return Settings(
        vocabulary=config.vocab_size,
        hidden=config.hidden_size,
        inner=4 * config.hidden_size if config.intermediate_size is None else config.intermediate_size,
        layers=config.num_layers,
        heads=config.num_heads,
        positions=config.max_position_embeddings,
        activation=config.activation_function,
        norm_eps=config.layer_norm_epsilon,
        initializer_range=config.initializer_range,
        rope={},
        dropouts=dropouts(config.embed_dropout, config.resid_dropout, config.attention_dropout),
        score_scale=1.0,
        learned_positions=True,
        windows=tuple(config.window_size if kind == "local" else None for kind in kinds) if "local" in kinds else None,
        biases={"qkv": False},
    )


def read_gpt_neo(reader: Reader, settings: Settings) -> Decoder:
    """``gpt_neo``."""

    def layer(at: str) -> NeutralLayer:
        q, k, v = (reader.linear(f"{at}.attn.attention.{side}_proj") for side in "qkv")
        return NeutralLayer(
            attention_norm=reader.norm(f"{at}.ln_1"),
            mlp_norm=reader.norm(f"{at}.ln_2"),
            q=q,
            k=k,
            v=v,
            o=reader.linear(f"{at}.attn.attention.out_proj"),
            up=reader.linear(f"{at}.mlp.c_fc"),
            down=reader.linear(f"{at}.mlp.c_proj"),
        )

    return Decoder(
        settings=settings,
        embedding=reader.tensor("wte.weight"),
        positions=reader.tensor("wpe.weight"),
        layers=tuple(layer(f"h.{index}") for index in range(settings.layers)),
        final_norm=reader.norm("ln_f"),
        head=reader.head(),
    )


def bloom_settings(config: Any) -> Settings:
    """Settings of ``bloom``."""
    slopes = build_alibi_tensor(torch.ones(1, 2, dtype=torch.long), config.n_head, torch.float32)[:, 0, 1]
    return Settings(
        vocabulary=config.vocab_size,
        hidden=config.hidden_size,
        inner=4 * config.hidden_size,
        layers=config.n_layer,
        heads=config.n_head,
        positions=getattr(config, "seq_length", 2048),
        activation="gelu_pytorch_tanh",
        norm_eps=config.layer_norm_epsilon,
        initializer_range=config.initializer_range,
        rope={},
        dropouts=dropouts(0.0, config.hidden_dropout, config.attention_dropout),
        positions_from_mask=True,
        alibi=tuple(slopes.tolist()),
        alibi_rounded=True,
        embedding_norm=True,
    )


def read_bloom(reader: Reader, settings: Settings) -> Decoder:
    """``bloom``: rows of ``query_key_value`` are q, k and v of one head after the other."""

    def layer(at: str) -> NeutralLayer:
        fused = reader.linear(f"{at}.self_attention.query_key_value")

        def side(place: int) -> Linear:
            return by_side(fused, lambda rows: split_heads(rows, settings.heads, 3)[:, place].flatten(0, 1))

        return NeutralLayer(
            attention_norm=reader.norm(f"{at}.input_layernorm"),
            mlp_norm=reader.norm(f"{at}.post_attention_layernorm"),
            q=side(0),
            k=side(1),
            v=side(2),
            o=reader.linear(f"{at}.self_attention.dense"),
            up=reader.linear(f"{at}.mlp.dense_h_to_4h"),
            down=reader.linear(f"{at}.mlp.dense_4h_to_h"),
        )

    return Decoder(
        settings=settings,
        embedding=reader.tensor("word_embeddings.weight"),
        positions=None,
        layers=tuple(layer(f"h.{index}") for index in range(settings.layers)),
        final_norm=reader.norm("ln_f"),
        head=reader.head(),
        embedding_norm=reader.norm("word_embeddings_layernorm"),
    )


_IGNORED = "which its class in transformers ignores"
MPT_DEMANDS = (
    (lambda config: config.attn_config.attn_type == "multihead_attention", f"it is multi-query already, {_IGNORED}"),
    (lambda config: config.attn_config.alibi, f"it has learned positions, {_IGNORED}"),
    (lambda config: not config.attn_config.qk_ln, f"it norms queries and keys (qk_ln), {_IGNORED}"),
    (lambda config: not config.attn_config.prefix_lm, f"it looks ahead in a prefix (prefix_lm), {_IGNORED}"),
    (lambda config: config.attn_config.alibi_bias_max == 8, f"its alibi_bias_max is not 8, {_IGNORED}"),
    (lambda config: config.no_bias, f"its layers have biases (no_bias is false), {_IGNORED}"),
    (lambda config: config.logit_scale is None, f"it scales its logits (logit_scale), {_IGNORED}"),
)
"""Settings with which the class in transformers computes something else than the model that was trained."""


def mpt_settings(config: Any) -> Settings:
    """Settings of ``mpt``."""
    attention = config.attn_config
    slopes = -build_mpt_alibi_tensor(config.n_heads, 2)[:, 0, 0]
    dropout = attention.attn_pdrop  # its class takes one share for everything
    return Settings(
        vocabulary=config.vocab_size,
        hidden=config.d_model,
        inner=4 * config.d_model,
        layers=config.n_layers,
        heads=config.n_heads,
        positions=config.max_seq_len,
        activation="gelu",
        norm_eps=config.layer_norm_epsilon,
        initializer_range=config.initializer_range,
        rope={},
        dropouts=dropouts(0.0, dropout, dropout),
        score_scale=attention.softmax_scale,
        alibi=tuple(slopes.tolist()),
        clip_qkv=attention.clip_qkv or None,
        biases=dict.fromkeys(("qkv", "output", "mlp", "norm"), False),
    )


def read_mpt(reader: Reader, settings: Settings) -> Decoder:
    """``mpt``: rows of ``Wqkv`` are all q, then all k, then all v."""

    def layer(at: str) -> NeutralLayer:
        fused = reader.linear(f"{at}.attn.Wqkv")
        q, k, v = (by_side(fused, third(place)) for place in range(3))
        return NeutralLayer(
            attention_norm=reader.norm(f"{at}.norm_1"),
            mlp_norm=reader.norm(f"{at}.norm_2"),
            q=q,
            k=k,
            v=v,
            o=reader.linear(f"{at}.attn.out_proj"),
            up=reader.linear(f"{at}.ffn.up_proj"),
            down=reader.linear(f"{at}.ffn.down_proj"),
        )

    return Decoder(
        settings=settings,
        embedding=reader.tensor("wte.weight"),
        positions=None,
        layers=tuple(layer(f"blocks.{index}") for index in range(settings.layers)),
        final_norm=reader.norm("norm_f"),
        head=reader.head(),
    )
