"""Basis changes that let the heads of a group share one head, and their application to a block.

Three parts of a head are free by themselves: each rotary plane of K (one complex number), the rows of K that are not
rotated (any invertible map), and V (any invertible map). For each part a method says how the shared head is combined
from the members, and how a member is read back from it; the reading back is folded into q and o, so it costs nothing.
Letters of shapes as in heads.py and energy.py; m members of a group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .attention import Attention
from .moments import (
    Energy,
    Extended,
    Rows,
    assembled,
    extended,
    measured,
    narrowed,
    rotary_rows,
    score_energy,
    to_planes,
)


@dataclass(frozen=True)
class Sharing:
    """How one group shares: shared = Σ_h combine_h member_h, and member_h ≈ expand_h shared.

    Attributes:
        plane_combine_Fm, plane_expand_Fm: complex, one number per plane and member.
        passing_combine_mPP, passing_expand_mPP: for the key rows that are not rotated.
        value_combine_mDD, value_expand_mDD: for V.
        balanced: give the shared head the mean norm of its members, and its queries and outputs the inverse.
        rescaled: give the shared head the mean norm of its members, and nothing else the inverse.
        sharpened: bring the spread of each query head's scores half-way back to what it was, in logarithms.
    """

    plane_combine_Fm: Tensor
    plane_expand_Fm: Tensor
    passing_combine_mPP: Tensor
    passing_expand_mPP: Tensor
    value_combine_mDD: Tensor
    value_expand_mDD: Tensor
    balanced: bool = False
    rescaled: bool = False
    sharpened: bool = False


Solver = Callable[[Attention, Rows, Energy], Sharing]
"""A method for one group: the block (for what its norms allow), its rows, the group's energy → how it shares."""


def shared(attention: Attention, groups: int, second_moment: Tensor | None, solve: Solver) -> Attention:
    """Let each group of neighbouring KV heads share one head.

    Args:
        groups: divides the KV heads; as many groups as heads leave the block untouched.
        second_moment: E[x xᵀ] of the attention's input, (C+1)×(C+1), or None for the identity.
    """
    if groups == attention.kv_heads:
        return attention
    rows = rotary_rows(attention.rotary, attention.k_KDC.shape[1])
    layer = extended(attention, second_moment)
    parts = []
    for heads in contiguous_groups(attention.kv_heads, groups):
        sharing = solve(attention, rows, measured(layer, rows, heads))
        parts.append(_share_group(layer, rows, heads, sharing))
    q_HDE, k_GDE, v_GDE = (torch.cat([part[index] for part in parts]) for index in range(3))
    return narrowed(attention, q_HDE, k_GDE, v_GDE, torch.cat([part[3] for part in parts], dim=1))


def contiguous_groups(kv_heads: int, groups: int) -> list[list[int]]:
    """Neighbouring heads by group, the order in which ``repeat_interleave`` shares them."""
    members = kv_heads // groups
    return [list(range(first, first + members)) for first in range(0, kv_heads, members)]


def _share_group(
    layer: Extended, rows: Rows, heads: list[int], sharing: Sharing
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(q of the group's query heads, the shared k, the shared v, o of its query heads)."""
    per_kv = layer.q_HDE.shape[0] // layer.k_KDE.shape[0]
    queries = [head * per_kv + offset for head in heads for offset in range(per_kv)]
    planes_mFE, passing_mPE, v_mDE = (
        to_planes(layer.k_KDE[heads], rows),
        layer.k_KDE[heads][:, rows.passing_P],
        layer.v_KDE[heads],
    )
    plane_FE = torch.einsum("fm,mfe->fe", sharing.plane_combine_Fm, planes_mFE)
    passing_PE = (sharing.passing_combine_mPP @ passing_mPE).sum(0)
    v_DE = (sharing.value_combine_mDD @ v_mDE).sum(0)
    if sharing.balanced:
        scale_F = _norm_ratio(planes_mFE.abs().square().sum(-1).sqrt().mean(0), plane_FE.abs().square().sum(-1).sqrt())
        passing_scale = _norm_ratio(passing_mPE.norm(dim=(1, 2)).mean(), passing_PE.norm())
        v_scale = _norm_ratio(v_mDE.norm(dim=(1, 2)).mean(), v_DE.norm())
        plane_FE, passing_PE, v_DE = plane_FE * scale_F.unsqueeze(-1), passing_PE * passing_scale, v_DE * v_scale
        sharing = replace(
            sharing,
            plane_expand_Fm=sharing.plane_expand_Fm / scale_F.unsqueeze(-1),
            passing_expand_mPP=sharing.passing_expand_mPP / passing_scale,
            value_expand_mDD=sharing.value_expand_mDD / v_scale,
        )
    k_DE = assembled(plane_FE.unsqueeze(0), passing_PE.unsqueeze(0), rows)
    if sharing.rescaled:
        k_DE = k_DE * _norm_ratio(layer.k_KDE[heads].norm(dim=(1, 2)).mean(), k_DE.norm())
        v_DE = v_DE * _norm_ratio(v_mDE.norm(dim=(1, 2)).mean(), v_DE.norm())
    q_XDE = _read_keys(layer.q_HDE[queries], rows, sharing, per_kv)
    if sharing.sharpened:
        q_XDE = q_XDE * _sharpening(layer, rows, heads, queries, q_XDE, k_DE)[:, None, None]
    o_CXD = torch.einsum("cxd,xde->cxe", layer.o_CHD[:, queries], sharing.value_expand_mDD.repeat_interleave(per_kv, 0))
    return q_XDE, k_DE, v_DE.unsqueeze(0), o_CXD


def _sharpening(
    layer: Extended, rows: Rows, heads: list[int], queries: list[int], q_XDE: Tensor, k_1DE: Tensor
) -> Tensor:
    """A factor for each query head: the fourth root of what the energy of its scores was over what it is.

    A shared key holds a part of each member only, so scores spread less and attention goes flat; the square root would
    make up for all of it, but what is left of the scores is not to be trusted that much.
    """
    per_head = len(queries) // len(heads)
    before_X = score_energy(layer, rows, layer.q_HDE[queries], layer.k_KDE[heads].repeat_interleave(per_head, 0))
    after_X = score_energy(layer, rows, q_XDE, k_1DE.expand_as(q_XDE))
    return _norm_ratio(before_X, after_X) ** 0.25


def _read_keys(q_XDE: Tensor, rows: Rows, sharing: Sharing, per_kv: int) -> Tensor:
    """Queries that read the shared key as they read their own: k ≈ b c gives qᴴ k = (conj(b) q)ᴴ c."""
    plane_XF = sharing.plane_expand_Fm.conj().T.repeat_interleave(per_kv, 0)
    passing_XPP = sharing.passing_expand_mPP.repeat_interleave(per_kv, 0)
    return assembled(to_planes(q_XDE, rows) * plane_XF.unsqueeze(-1), passing_XPP.mT @ q_XDE[:, rows.passing_P], rows)


def _norm_ratio(wanted: Tensor, found: Tensor) -> Tensor:
    """wanted / found; 1 where either is zero, since there is nothing to scale."""
    return torch.where((wanted > 0) & (found > 0), wanted / found, torch.ones_like(wanted))
