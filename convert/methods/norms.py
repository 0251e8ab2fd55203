"""Merge norms of keys that have weights for every head.

A norm of each head by itself (weights K×D) is merged like a bias: its weights are pooled.
A norm over the full width of all key heads (OLMo 2) divides by a size r(x) that depends on the number of heads, so
merging it is approximate: the directions of the keys are exact, their size is right for the average input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from .context import MethodContext, Pool

_INITIAL = {"k_norm": 1.0, "k_norm_bias": 0.0}
"""Roles of key norms, and the value that model classes start them at."""


def is_norm(role: str) -> bool:
    """Return True if a tensor of this role belongs to a norm of the keys."""
    return role in _INITIAL


def merged_norms(
    heads: Mapping[str, Tensor],
    groups: int,
    kind: Literal["pooled", "averaged", "fresh"],
    pool: Pool,
    context: MethodContext,
    *,
    full_width: bool,
) -> dict[str, Tensor]:
    """Merge the norms among the tensors of a layer, by role.

    Args:
        heads: role → (K, R, …); roles other than norms stay out of the result, with one exception: a norm over the
            full width decides the size of its keys, so these are merged here as well.
        kind: ``fresh`` for initial values, see :class:`.table.Method`.
        pool: how a group of weights becomes one.
        full_width: one norm spans all key heads.
    """
    if kind == "fresh":
        return {role: torch.full_like(heads[role][:groups], _INITIAL[role]) for role in heads if is_norm(role)}
    merged = {role: pool(heads[role], groups, context) for role in heads if is_norm(role)}
    if full_width:
        k_GDC, bias_GD, merged["k_norm"] = merge_full_width(
            heads["k"],
            heads.get("k_bias"),
            heads["k_norm"],
            lambda rows: pool(rows, groups, context),
            context.second_moment,
        )
        merged |= {"k": k_GDC} | ({} if bias_GD is None else {"k_bias": bias_GD})
    return merged


def merge_full_width(
    k_KDC: Tensor,
    k_bias_KD: Tensor | None,
    norm_KD: Tensor,
    pool: Callable[[Tensor], Tensor],
    second_moment: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Merge keys, their bias and the norm that spans them, in float64.

    The source's key of head h is w_h∘(W_h x) / r(x), with r(x) the root mean square of W x over all heads. Pooled is
    w_h∘W_h, the key up to its size. The result is written as u∘A, with u the root mean square of the members' weights,
    so that equal heads give back exactly their own W and w. The new norm's weights are c·u with
    c = √(E|A x|² / E|W x|²) per row, which makes 1/r(x) right on average. (Pooling W and w alone would make keys of
    unrelated heads about √(K/G) too large.)

    Args:
        pool: (K, R, …) → (G, R, …).
        second_moment: E[x xᵀ], (C+1)×(C+1) with the constant 1 last; None means the identity.

    Returns:
        The keys (G, D, C), their bias (G, D) or None, and the norm's weights (G, D).
    """
    wide_KDE = k_KDC.double()
    if k_bias_KD is not None:
        wide_KDE = torch.cat([wide_KDE, k_bias_KD.double().unsqueeze(-1)], -1)
    weights_KD = norm_KD.double()
    keys_GDE = pool(weights_KD.unsqueeze(-1) * wide_KDE).double()
    # A root mean square has no sign, and weights may be negative: it takes the sign of their mean.
    size_GD = pool(weights_KD.square()).double().sqrt() * pool(weights_KD).double().sign()
    # Rows with weights of zero have keys of zero: any divisor serves.
    size_GD = torch.where(size_GD == 0, torch.ones_like(size_GD), size_GD)
    rows_GDE = keys_GDE / size_GD.unsqueeze(-1)
    scale = (_mean_energy(rows_GDE, second_moment) / _mean_energy(wide_KDE, second_moment)).sqrt()
    hidden = k_KDC.shape[-1]
    # Keys of zero give a scale of 0 or 0/0, and 1 serves them as well as any.
    bias_GD = None if k_bias_KD is None else rows_GDE[..., hidden]
    return rows_GDE[..., :hidden], bias_GD, size_GD * torch.where(scale > 0, scale, 1.0)


def _mean_energy(rows_XDE: Tensor, second_moment: Tensor | None) -> Tensor:
    """Compute E[(row · x)²], averaged over the rows of all heads."""
    rows = rows_XDE.flatten(0, 1)  # (X·D, E)
    if second_moment is None:
        return rows.square().sum(-1).mean()
    width = rows.shape[1]
    return ((rows @ second_moment[:width, :width].double()) * rows).sum(-1).mean()
