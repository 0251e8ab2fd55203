"""How a group of KV heads becomes one: a table of methods.

A method that treats every per-KV-head tensor alone is a *pool* (mean, first, random); the others rewrite the whole
block (k, v, q and o), see folding.py. Letters of shapes as in heads.py; R is the rows of one head (D for a projection).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .aligned import aligned, aligned_and_rescaled
from .attention import Attention
from .folded import folded


@dataclass(frozen=True)
class MethodContext:
    """What a method may know besides the weights.

    Attributes:
        layer: index of the layer, so that a random method differs from layer to layer.
        seed: of the random numbers.
        initializer_range: standard deviation of a fresh weight, from the config.
        second_moment: E[x xᵀ] at the attention input, (C+1)×(C+1) float64 with the constant 1 as last index;
            None means the identity (no data).
    """

    layer: int
    seed: int = 0
    initializer_range: float = 0.02
    second_moment: Tensor | None = None

    def for_tensor(self, place: int) -> MethodContext:
        """The same with a seed of its own for the block's ``place``-th tensor, so that no two tensors are alike."""
        return replace(self, seed=(self.seed * 1_000_003 + self.layer) * 8 + place)


Pool = Callable[[Tensor, int, MethodContext], Tensor]
"""(K, R, …) tensor of all KV heads, groups G → (G, R, …) in float32 or float64."""


@dataclass(frozen=True)
class Method:
    """An entry of :data:`METHODS`.

    Attributes:
        apply: Attention with K KV heads → Attention with G.
        summary: one line for ``--help`` and the record.
        pool: set when every per-KV-head tensor may be treated alone, so that q and o are not even read.
    """

    apply: Callable[[Attention, int, MethodContext], Attention]
    summary: str
    pool: Pool | None = None

    @property
    def rewrites_queries(self) -> bool:
        """True when q and o change too."""
        return self.pool is None


def pool_mean(heads: Tensor, groups: int, context: MethodContext) -> Tensor:
    """The mean of each group (Ainslie et al. 2023, section 2.1).

    float32 is summed in float64 and half types in float32, so the mean of equal heads is that head, to the last bit.
    """
    wide = torch.float64 if heads.dtype in (torch.float32, torch.float64) else torch.float32
    members = heads.shape[0] // groups
    total = heads[::members].to(wide, copy=True)
    for member in range(1, members):
        total += heads[member::members]
    return total / members


def pool_first(heads: Tensor, groups: int, context: MethodContext) -> Tensor:
    """The first head of each group (Ainslie et al. 2023, section 3.3, compares it with the mean)."""
    return heads[:: heads.shape[0] // groups].clone()


def pool_random(heads: Tensor, groups: int, context: MethodContext) -> Tensor:
    """A fresh head: normal with the config's ``initializer_range``; zero for a bias, as model classes start theirs."""
    shape = (groups, *heads.shape[1:])
    if heads.dim() < 3:
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(context.seed)
    return torch.randn(shape, generator=generator) * context.initializer_range


def pooled(attention: Attention, groups: int, pool: Pool, context: MethodContext) -> Attention:
    """Apply ``pool`` to each per-KV-head tensor of a block."""

    def one(place: int, heads: Tensor | None) -> Tensor | None:
        return None if heads is None else pool(heads, groups, context.for_tensor(place)).to(heads.dtype)

    return replace(
        attention,
        k_KDC=pool(attention.k_KDC, groups, context.for_tensor(0)).to(attention.k_KDC.dtype),
        v_KDC=pool(attention.v_KDC, groups, context.for_tensor(1)).to(attention.v_KDC.dtype),
        k_bias_KD=one(2, attention.k_bias_KD),
        v_bias_KD=one(3, attention.v_bias_KD),
    )


def _from_pool(pool: Pool, summary: str) -> Method:
    def apply(attention: Attention, groups: int, context: MethodContext) -> Attention:
        return pooled(attention, groups, pool, context)

    return Method(apply, summary, pool)


METHODS: dict[str, Method] = {
    "mean": _from_pool(pool_mean, "average the heads of a group"),
    "first": _from_pool(pool_first, "keep the first head of a group"),
    "random": _from_pool(pool_random, "start each group from fresh random weights (a baseline)"),
    "aligned": Method(aligned, "turn the heads of a group towards each other first, then average"),
    "aligned+rescale": Method(aligned_and_rescaled, "the same, then give the average its members' mean norm"),
    "folded": Method(folded, "the shared head that loses least, its basis folded into queries and outputs"),
}
