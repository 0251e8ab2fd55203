"""A decoder without KV-head setting in neutral form: what every source is read into and every target written from.

Weights are in ``torch.nn.Linear`` layout: rows are outputs. Query, key and value rows come head by head, and the rows
that a rotary position turns are paired as halves: row f with row f + dim/2.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from .lazy import Lazy, combined, wide


@dataclass(frozen=True)
class Norm:
    """A LayerNorm; None stands for a weight of one or a bias of zero."""

    weight: Lazy | None
    bias: Lazy | None


@dataclass(frozen=True)
class Linear:
    """A linear layer; without bias it is None."""

    weight: Lazy
    bias: Lazy | None

    def bias_or_zero(self) -> Lazy:
        """The bias, for a target that always has one."""
        return self.weight.filled((self.weight.shape[0],), 0.0) if self.bias is None else self.bias


@dataclass(frozen=True)
class NeutralLayer:
    """One decoder layer.

    ``mlp_norm`` is None where attention and MLP read the output of the same norm. Both norms stand before what they
    are named after, or after it (``Settings.norms_first``).
    """

    attention_norm: Norm
    mlp_norm: Norm | None
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    up: Linear
    down: Linear


@dataclass(frozen=True)
class Settings:
    """What config.json says, in words of our own.

    Attributes:
        inner: width of the MLP.
        positions: longest sequence.
        rope: ``rope_theta``, ``partial_rotary_factor`` and, where positions are stretched, ``rope_scaling``; empty
            where nothing is rotated.
        dropouts: of ``embedding``, ``residual`` and ``attention``.
        score_scale: factor of the scores; None is one over the square root of the head dim.
        positions_from_mask: padding takes no position, also where no ``position_ids`` are given.
        alibi: slope of every query head; None where nothing is added to the scores. ``alibi_rounded``: what is added is
            rounded to the dtype of the model first.
        windows: for every layer how many tokens it sees, None for all; None where all layers see all.
        clip_qkv: queries, keys and values are cut off at this size.
        biases: which of ``qkv``, ``output`` (of the attention), ``mlp`` and ``norm`` have them; absent is True.
        embedding_width: where it is not the hidden size, the embeddings are projected.
        learned_positions, embedding_norm, norms_first, final_norm: whether there are such.
    """

    vocabulary: int
    hidden: int
    inner: int
    layers: int
    heads: int
    positions: int
    activation: str
    norm_eps: float
    initializer_range: float
    rope: dict[str, Any]
    dropouts: dict[str, float]
    score_scale: float | None = None
    learned_positions: bool = False
    positions_from_mask: bool = False
    alibi: tuple[float, ...] | None = None
    alibi_rounded: bool = False
    windows: tuple[int | None, ...] | None = None
    clip_qkv: float | None = None
    biases: dict[str, bool] = field(default_factory=dict)
    embedding_width: int | None = None
    embedding_norm: bool = False
    norms_first: bool = True
    final_norm: bool = True

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


@dataclass(frozen=True)
class Decoder:
    """A whole model.

    Attributes:
        positions: learned embeddings of absolute positions, from position 0; None where there are none.
        head: None where the output head is the embedding.
        embedding_norm: behind the embeddings.
        project_in, project_out: between the width of the embeddings and the hidden size, where these differ.
    """

    settings: Settings
    embedding: Lazy
    positions: Lazy | None
    layers: tuple[NeutralLayer, ...]
    final_norm: Norm | None
    head: Linear | None
    embedding_norm: Norm | None = None
    project_in: Linear | None = None
    project_out: Linear | None = None


def without_norms(layer: NeutralLayer) -> NeutralLayer:
    """The same layer with norms that only normalise: their weights and biases go into the layers that read them.

    ``W (γ ∘ n + β) + b = (W ∘ γ) n + (W β + b)``, computed in float32.
    """
    mlp_norm = layer.attention_norm if layer.mlp_norm is None else layer.mlp_norm
    plain = Norm(None, None)
    return replace(
        layer,
        attention_norm=plain,
        mlp_norm=None if layer.mlp_norm is None else plain,
        q=_absorbing(layer.attention_norm, layer.q),
        k=_absorbing(layer.attention_norm, layer.k),
        v=_absorbing(layer.attention_norm, layer.v),
        up=_absorbing(mlp_norm, layer.up),
    )


def _absorbing(norm: Norm, linear: Linear) -> Linear:
    weight, bias = linear.weight, linear.bias
    if norm.bias is not None:
        moved = combined(lambda w, beta: wide(w) @ wide(beta), weight, norm.bias)
        bias = moved if bias is None else combined(lambda b, extra: wide(b) + extra, bias, moved)
    if norm.weight is not None:
        weight = combined(lambda w, gamma: wide(w) * wide(gamma), weight, norm.weight)
    return Linear(weight, bias)
