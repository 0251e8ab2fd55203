"""Read each source type into the neutral form: one function a type."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedError
from .decoder import Decoder, Linear, NeutralLayer, Settings
from .lazy import wide
from .reader import Reader, by_side, even_rotary_dim, factor_for

_CODEGEN_SHARDS = 4
"""CodeGen keeps its rows in the order of the four devices that it was trained on."""
_OPT_OFFSET = 2
"""OPT keeps two unused rows in front of its table of positions."""


def neox_settings(config: Any) -> Settings:
    """Settings of ``gpt_neox``.

    Raises:
        UnsupportedError: its rotary position embedding leaves a row without partner.
    """
    rope = dict(config.rope_parameters)
    factor, theta, kind = (rope.pop(key, None) for key in ("partial_rotary_factor", "rope_theta", "rope_type"))
    even_rotary_dim(config.hidden_size // config.num_attention_heads, factor)
    stretched = {} if kind in (None, "default") else {"rope_scaling": {"rope_type": kind, **rope}}
    return Settings(
        vocabulary=config.vocab_size,
        hidden=config.hidden_size,
        inner=config.intermediate_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        positions=config.max_position_embeddings,
        activation=config.hidden_act,
        norm_eps=config.layer_norm_eps,
        initializer_range=config.initializer_range,
        rope={"rope_theta": theta, "partial_rotary_factor": factor, **stretched},
        dropouts=dropouts(config.hidden_dropout, config.hidden_dropout, config.attention_dropout),
    )


def read_neox(reader: Reader, settings: Settings) -> Decoder:
    """``gpt_neox``: rows of ``query_key_value`` are q, k and v of one head after the other."""
    return Decoder(
        settings=settings,
        embedding=reader.tensor("embed_in.weight"),
        positions=None,
        layers=tuple(_neox_layer(reader, f"layers.{index}", settings) for index in range(settings.layers)),
        final_norm=reader.norm("final_layer_norm"),
        head=reader.head(),
    )


def _neox_layer(reader: Reader, at: str, settings: Settings) -> NeutralLayer:
    fused = reader.linear(f"{at}.attention.query_key_value")

    def side(place: int) -> Linear:
        return by_side(fused, lambda rows: split_heads(rows, settings.heads, 3)[:, place].flatten(0, 1))

    return NeutralLayer(
        attention_norm=reader.norm(f"{at}.input_layernorm"),
        mlp_norm=reader.norm(f"{at}.post_attention_layernorm"),
        q=side(0),
        k=side(1),
        v=side(2),
        o=reader.linear(f"{at}.attention.dense"),
        up=reader.linear(f"{at}.mlp.dense_h_to_4h"),
        down=reader.linear(f"{at}.mlp.dense_4h_to_h"),
    )


def gptj_settings(config: Any) -> Settings:
    """Settings of ``gptj`` and ``codegen``.

    Raises:
        UnsupportedError: its rotary position embedding is no part of a head, or leaves a row without partner.
    """
    head_dim, rotary_dim = config.n_embd // config.n_head, config.rotary_dim
    if not isinstance(rotary_dim, int) or not 0 < rotary_dim <= head_dim:
        raise UnsupportedError(f"Its rotary_dim ({rotary_dim}) is no part of a head of width {head_dim}.")
    share = factor_for(head_dim, rotary_dim)
    even_rotary_dim(head_dim, share)
    # its class knows no other base than 10,000
    return replace(gpt_settings(config), rope={"rope_theta": 10000.0, "partial_rotary_factor": share})


def read_gptj(reader: Reader, settings: Settings) -> Decoder:
    """``gptj``: separate projections; its rotary position turns rows 2f and 2f + 1 together."""

    def sides(at: str) -> tuple[Linear, Linear, Linear]:
        q, k, v = (reader.linear(f"{at}.attn.{side}_proj") for side in "qkv")
        return q, k, v

    return _read_one_norm(reader, settings, sides)


def read_codegen(reader: Reader, settings: Settings) -> Decoder:
    """``codegen``: as ``gptj``, but q, v and k are fused, in this order, once per device of its training."""

    def sides(at: str) -> tuple[Linear, Linear, Linear]:
        fused = reader.linear(f"{at}.attn.qkv_proj")

        def side(place: int) -> Linear:
            return by_side(fused, lambda rows: split_heads(rows, _CODEGEN_SHARDS, 3)[:, place].flatten(0, 1))

        return side(0), side(2), side(1)

    return _read_one_norm(reader, settings, sides)


def _read_one_norm(
    reader: Reader, settings: Settings, sides: Callable[[str], tuple[Linear, Linear, Linear]]
) -> Decoder:
    """GPT-J and CodeGen: attention and MLP side by side behind one norm."""
    rotary_dim, order = reader.config.rotary_dim, torch.arange(settings.head_dim)
    order[:rotary_dim] = torch.cat((torch.arange(0, rotary_dim, 2), torch.arange(1, rotary_dim, 2)))

    def halved(linear: Linear) -> Linear:
        return by_side(linear, lambda rows: split_heads(rows, settings.heads)[:, order.to(rows.device)].flatten(0, 1))

    def layer(at: str) -> NeutralLayer:
        q, k, v = sides(at)
        return NeutralLayer(
            attention_norm=reader.norm(f"{at}.ln_1"),
            mlp_norm=None,
            q=halved(q),
            k=halved(k),
            v=v,
            o=reader.linear(f"{at}.attn.out_proj"),
            up=reader.linear(f"{at}.mlp.fc_in"),
            down=reader.linear(f"{at}.mlp.fc_out"),
        )

    return Decoder(
        settings=settings,
        embedding=reader.tensor("wte.weight"),
        positions=None,
        layers=tuple(layer(f"h.{index}") for index in range(settings.layers)),
        final_norm=reader.norm("ln_f"),
        head=reader.head(),
    )


def read_gpt2(reader: Reader, settings: Settings) -> Decoder:
    """``gpt2``: weights lie as (inputs, outputs), and the columns of ``c_attn`` are all q, then all k, then all v."""

    def turned(name: str) -> Linear:
        linear = reader.linear(name)
        return Linear(linear.weight.then(lambda weight: weight.T), linear.bias)

    def layer(index: int) -> NeutralLayer:
        at = f"h.{index}"
        fused = turned(f"{at}.attn.c_attn")
        q, k, v = (by_side(fused, third(place)) for place in range(3))
        if reader.config.scale_attn_by_inverse_layer_idx:
            q = by_side(q, lambda rows: wide(rows) / (index + 1))
        return NeutralLayer(
            attention_norm=reader.norm(f"{at}.ln_1"),
            mlp_norm=reader.norm(f"{at}.ln_2"),
            q=q,
            k=k,
            v=v,
            o=turned(f"{at}.attn.c_proj"),
            up=turned(f"{at}.mlp.c_fc"),
            down=turned(f"{at}.mlp.c_proj"),
        )

    return Decoder(
        settings=settings,
        embedding=reader.tensor("wte.weight"),
        positions=reader.tensor("wpe.weight"),
        layers=tuple(layer(index) for index in range(settings.layers)),
        final_norm=reader.norm("ln_f"),
        head=reader.head(),
    )


def opt_settings(config: Any) -> Settings:
    """Settings of ``opt``."""
    projected = config.word_embed_proj_dim != config.hidden_size
    linear = bool(config.enable_bias)
    return Settings(
        vocabulary=config.vocab_size,
        hidden=config.hidden_size,
        inner=config.ffn_dim,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        positions=config.max_position_embeddings,
        activation=config.activation_function,
        norm_eps=1e-5,  # its class has no setting for it
        initializer_range=config.init_std,
        rope={},
        dropouts=dropouts(0.0, config.dropout, config.attention_dropout),
        learned_positions=True,
        positions_from_mask=True,
        biases={"qkv": linear, "output": linear, "mlp": linear},
        embedding_width=config.word_embed_proj_dim if projected else None,
        norms_first=bool(config.do_layer_norm_before),
        final_norm=bool(config.do_layer_norm_before and not config._remove_final_layer_norm),
    )


def read_opt(reader: Reader, settings: Settings) -> Decoder:
    """``opt``: its table of positions starts at the third row."""
    projections = None if settings.embedding_width is None else ("decoder.project_in", "decoder.project_out")
    project_in, project_out = map(reader.linear, projections) if projections else (None, None)

    def layer(at: str) -> NeutralLayer:
        q, k, v = (reader.linear(f"{at}.self_attn.{side}_proj") for side in "qkv")
        return NeutralLayer(
            attention_norm=reader.norm(f"{at}.self_attn_layer_norm"),
            mlp_norm=reader.norm(f"{at}.final_layer_norm"),
            q=q,
            k=k,
            v=v,
            o=reader.linear(f"{at}.self_attn.out_proj"),
            up=reader.linear(f"{at}.fc1"),
            down=reader.linear(f"{at}.fc2"),
        )

    return Decoder(
        settings=settings,
        embedding=reader.tensor("decoder.embed_tokens.weight"),
        positions=reader.tensor("decoder.embed_positions.weight").then(lambda table: table[_OPT_OFFSET:]),
        layers=tuple(layer(f"decoder.layers.{index}") for index in range(settings.layers)),
        final_norm=reader.norm("decoder.final_layer_norm") if settings.final_norm else None,
        head=reader.head(),
        project_in=project_in,
        project_out=project_out,
    )


def gpt_settings(config: Any) -> Settings:
    """Settings of ``gpt2`` and of the types that call them as it does."""
    return Settings(
        vocabulary=config.vocab_size,
        hidden=config.n_embd,
        inner=4 * config.n_embd if config.n_inner is None else config.n_inner,
        layers=config.n_layer,
        heads=config.n_head,
        positions=config.n_positions,
        activation=config.activation_function,
        norm_eps=config.layer_norm_epsilon,
        initializer_range=config.initializer_range,
        rope={},
        dropouts=dropouts(config.embd_pdrop, config.resid_pdrop, config.attn_pdrop),
        score_scale=None if getattr(config, "scale_attn_weights", True) else 1.0,
        learned_positions=config.model_type == "gpt2",
    )


def dropouts(embedding: float, residual: float, attention: float) -> dict[str, float]:
    """As :class:`Settings` calls them."""
    return {"embedding": embedding, "residual": residual, "attention": attention}


def split_heads(rows: Tensor, *counts: int) -> Tensor:
    """The first axis split into ``counts`` parts, then what is left of it."""
    return rows.reshape(*counts, -1, *rows.shape[1:])


def third(place: int) -> Callable[[Tensor], Tensor]:
    """Picks q, k or v out of rows that are all q, then all k, then all v."""
    return lambda rows: rows.chunk(3)[place]
