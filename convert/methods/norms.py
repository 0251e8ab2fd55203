"""Merge keys that pass through norms with weights for every head.

A norm of each head by itself (weights K×D) is merged like a bias: its weights are pooled with the rows.
A norm over the full width of all key heads (OLMo 2) divides by a size r(x) that the number of heads changes, so merging
it is approximate: the directions of the keys are merged exactly, their size is set right for the average input.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

FRESH = {"k_norm": 1.0, "k_norm_bias": 0.0}
"""What a norm of its own starts from, by role: what `random` gives it."""

Pooling = Callable[[Tensor], Tensor]
"""(K, R, …) → (G, R, …)."""


def merge_full_width(
    k_KDC: Tensor, k_bias_KD: Tensor | None, norm_KD: Tensor, pool: Pooling, second_moment: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Keys, their bias and the norm's weights for fewer heads, in float64.

    The source's key of head h is w_h∘(W_h x) / r(x), with r(x) the root mean square of W x over all heads. What is
    pooled is w_h∘W_h, the key up to its size. The result is written as u∘A with u the members' weights (root mean
    square), so that equal heads give back exactly their own W and w; then the new norm's weights are c·u with
    c = √(E|A x|² / E|W x|²) per row, which makes 1/r(x) right on average. (Pooling W and w alone would make keys of
    unrelated heads about √(K/G) too large.)

    Args:
        pool: how a group becomes one head, for any tensor of heads.
        second_moment: E[x xᵀ], (C+1)×(C+1) with the constant 1 last; None means the identity.
    """
    wide_KDE = k_KDC.double()
    if k_bias_KD is not None:
        wide_KDE = torch.cat([wide_KDE, k_bias_KD.double().unsqueeze(-1)], -1)
    weights_KD = norm_KD.double()
    keys_GDE = pool(weights_KD.unsqueeze(-1) * wide_KDE).double()
    size_GD = pool(weights_KD.square()).double().sqrt() * pool(weights_KD).double().sign()
    size_GD = torch.where(size_GD == 0, torch.ones_like(size_GD), size_GD)
    rows_GDE = keys_GDE / size_GD.unsqueeze(-1)
    scale = (_mean_energy(rows_GDE, second_moment) / _mean_energy(wide_KDE, second_moment)).sqrt()
    hidden = k_KDC.shape[-1]
    bias_GD = None if k_bias_KD is None else rows_GDE[..., hidden]
    return rows_GDE[..., :hidden], bias_GD, size_GD * torch.where(scale > 0, scale, 1.0)


def _mean_energy(rows_KDE: Tensor, second_moment: Tensor | None) -> Tensor:
    """E[(row · x)²], mean over the rows."""
    flat_RE = rows_KDE.flatten(0, 1)
    if second_moment is None:
        return flat_RE.square().sum(-1).mean()
    width = flat_RE.shape[1]
    return ((flat_RE @ second_moment[:width, :width].double()) * flat_RE).sum(-1).mean()
