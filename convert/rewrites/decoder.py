"""The neutral form of a decoder-only model: every source is read into it, and every target is written from it.

Weights are in ``torch.nn.Linear`` layout: rows are outputs. Query, key and value rows come head by head. Rotary
positions turn rows in pairs of halves: row f with row f + dim/2.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from .lazy import LazyTensor, at_least_float32, combined


@dataclass(frozen=True)
class NormWeights:
    """Weights of a LayerNorm. None stands for a weight of one or a bias of zero."""

    weight: LazyTensor | None
    bias: LazyTensor | None


@dataclass(frozen=True)
class LinearWeights:
    """Weights of a linear layer. ``bias`` is None where it has none."""

    weight: LazyTensor
    bias: LazyTensor | None

    def bias_or_zero(self) -> LazyTensor:
        """Return the bias, or zeros for a target whose layer always has one."""
        return self.weight.filled((self.weight.shape[0],), 0.0) if self.bias is None else self.bias


@dataclass(frozen=True)
class NeutralLayer:
    """One decoder layer.

    ``mlp_norm`` is None where attention and MLP read the output of the same norm. Both norms precede the part that
    they are named after, or follow it (``NeutralSettings.norms_first``).
    """

    attention_norm: NormWeights
    mlp_norm: NormWeights | None
    q: LinearWeights
    k: LinearWeights
    v: LinearWeights
    o: LinearWeights
    up: LinearWeights
    down: LinearWeights


@dataclass(frozen=True)
class NeutralSettings:
    """The architecture that config.json describes, with one name per setting for all types.

    Attributes:
        inner: width of the MLP.
        positions: longest sequence.
        rope: ``rope_theta``, ``partial_rotary_factor`` and, for stretched positions, ``rope_scaling``. Empty without
            rotary positions.
        dropouts: shares of ``embedding``, ``residual`` and ``attention``.
        score_scale: factor of the attention scores. None: one over the square root of the head dim.
        positions_from_mask: padding takes no position, even if no ``position_ids`` are given.
        alibi: ALiBi slope of every query head. None: nothing is added to the scores.
        alibi_rounded: round ALiBi's biases to the dtype of the model before they are added.
        windows: number of tokens that each layer sees, None for all. None instead of a tuple: every layer sees all.
        clip_qkv: clamp queries, keys and values to this size.
        biases: which of ``qkv``, ``output`` (of the attention), ``mlp`` and ``norm`` have biases. Absent means True.
        embedding_width: width of the embeddings, which are projected if it differs from the hidden size.
        learned_positions, embedding_norm, final_norm: whether the model has such a part.
        norms_first: norms precede attention and MLP.
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
class NeutralDecoder:
    """A whole model.

    Attributes:
        positions: learned embeddings of absolute positions, from position 0.
        head: None where the output head is the embedding.
        embedding_norm: norm that follows the embeddings.
        project_in, project_out: projections between the width of the embeddings and the hidden size.
    """

    settings: NeutralSettings
    embedding: LazyTensor
    positions: LazyTensor | None
    layers: tuple[NeutralLayer, ...]
    final_norm: NormWeights | None
    head: LinearWeights | None
    embedding_norm: NormWeights | None = None
    project_in: LinearWeights | None = None
    project_out: LinearWeights | None = None


@dataclass(frozen=True)
class TensorNames:
    """Names of a type's tensors, without ``.weight`` and ``.bias``. None: the type has no such part.

    Attributes:
        layer: prefix of a layer, with ``{}`` for its index. The names of norms, projections and MLP follow it.
        qkv: name of the fused projection; or names of the three projections, with ``{}`` for ``q``, ``k`` and ``v``.
    """

    embedding: str
    layer: str
    attention_norm: str
    qkv: str
    o: str
    mlp_norm: str | None
    up: str
    down: str
    final_norm: str
    head: str = "lm_head"
    positions: str | None = None
    embedding_norm: str | None = None
    project_in: str | None = None
    project_out: str | None = None


def without_norms(layer: NeutralLayer) -> NeutralLayer:
    """Fold the norms' weights and biases into the linear layers that read them, so that the norms only normalise.

    ``W (γ ∘ n + β) + b = (W ∘ γ) n + (W β + b)``, computed in float32.
    """
    mlp_norm = layer.attention_norm if layer.mlp_norm is None else layer.mlp_norm
    plain = NormWeights(None, None)
    return replace(
        layer,
        attention_norm=plain,
        mlp_norm=None if layer.mlp_norm is None else plain,
        q=_with_norm_folded_in(layer.attention_norm, layer.q),
        k=_with_norm_folded_in(layer.attention_norm, layer.k),
        v=_with_norm_folded_in(layer.attention_norm, layer.v),
        up=_with_norm_folded_in(mlp_norm, layer.up),
    )


def _with_norm_folded_in(norm: NormWeights, linear: LinearWeights) -> LinearWeights:
    weight, bias = linear.weight, linear.bias
    if norm.bias is not None:
        # W β uses the weight as it was: the norm's own weight scales n, not β
        moved = combined(lambda w, beta: at_least_float32(w) @ at_least_float32(beta), weight, norm.bias)
        bias = moved if bias is None else combined(lambda b, extra: at_least_float32(b) + extra, bias, moved)
    if norm.weight is not None:
        weight = combined(lambda w, gamma: at_least_float32(w) * at_least_float32(gamma), weight, norm.weight)
    return LinearWeights(weight, bias)
