"""Methods that treat each per-head tensor of K and V alone: queries and outputs stay as they are."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .attention import Attention
from .context import MethodContext, Pool


def pool_mean(heads: Tensor, groups: int, context: MethodContext) -> Tensor:
    """Average each group (Ainslie et al. 2023, arXiv 2305.13245, section 2.1): (K, R, …) → (G, R, …)."""
    # A sum in the dtype itself would round, and the mean of equal heads would not be that head to the last bit.
    wide = torch.float64 if heads.dtype in (torch.float32, torch.float64) else torch.float32
    members = heads.shape[0] // groups
    # Member by member instead of one reshape and mean: only one wide copy of a group's result is in memory.
    total = heads[::members].to(wide, copy=True)
    for member in range(1, members):
        total += heads[member::members]
    return total / members


def pool_first(heads: Tensor, groups: int, context: MethodContext) -> Tensor:
    """Take the first head of each group (Ainslie et al. 2023, section 3.3): (K, R, …) → (G, R, …)."""
    return heads[:: heads.shape[0] // groups].clone()


def pool_random(heads: Tensor, groups: int, context: MethodContext) -> Tensor:
    """Draw fresh heads with the config's ``initializer_range`` (Ainslie et al. 2023, section 3.3): (G, R, …)."""
    shape = (groups, *heads.shape[1:])
    if heads.dim() < 3:  # a bias (K, D): model classes start biases at zero
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(context.seed)
    return torch.randn(shape, generator=generator) * context.initializer_range


def pool_attention(attention: Attention, groups: int, pool: Pool, context: MethodContext) -> Attention:
    """Pool k and v of a layer, and their biases."""

    def pooled(role: str, heads: Tensor) -> Tensor:
        return pool(heads, groups, context.for_role(role)).to(heads.dtype)

    k_bias_KD, v_bias_KD = attention.k_bias_KD, attention.v_bias_KD
    return replace(
        attention,
        k_KDC=pooled("k", attention.k_KDC),
        v_KDC=pooled("v", attention.v_KDC),
        k_bias_KD=None if k_bias_KD is None else pooled("k_bias", k_bias_KD),
        v_bias_KD=None if v_bias_KD is None else pooled("v_bias", v_bias_KD),
    )
