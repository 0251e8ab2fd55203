"""Basis changes that let the heads of a group share one head, and their application to a layer.

Three parts of a head are free by themselves: each rotary plane of K (one complex number), the rows of K that are not
rotated (any invertible map), and V (any invertible map). For each part a method says how the shared head is combined
from the members, and how a member is read back from it. The reading back is folded into q and o, so it costs nothing
when the model runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..family.attention_layer import AttentionLayer
from .attention import Attention
from .moments import (
    AttentionWithMoments,
    HeadGrams,
    RotaryRows,
    from_planes,
    head_grams,
    rotary_rows,
    score_energy,
    to_planes,
    with_moments,
    with_projections,
)
from .table import AllowedTurns


@dataclass(frozen=True)
class SharedBasis:
    """Basis changes of one group: shared = Σ_h combine_h member_h, and member_h ≈ expand_h shared.

    Attributes:
        plane_combine_FM, plane_expand_FM: complex, one number per plane and member.
        passing_combine_MPP, passing_expand_MPP: for the key rows that are not rotated.
        value_combine_MDD, value_expand_MDD: for V.
        balanced: give the shared head the mean norm of its members, and its queries and outputs the inverse.
        rescaled: give the shared head the mean norm of its members, and nothing else the inverse.
        sharpened: bring the spread of each query head's scores half-way back to what it was, on a logarithmic scale.
    """

    plane_combine_FM: Tensor
    plane_expand_FM: Tensor
    passing_combine_MPP: Tensor
    passing_expand_MPP: Tensor
    value_combine_MDD: Tensor
    value_expand_MDD: Tensor
    balanced: bool = False
    rescaled: bool = False
    sharpened: bool = False


GroupSolver = Callable[[Attention, RotaryRows, HeadGrams], SharedBasis]
"""Method for one group: the layer (its norms limit the turns), its rows, the group's Gram matrices → its basis."""


def share_heads(attention: Attention, groups: int, second_moment: Tensor | None, solve: GroupSolver) -> Attention:
    """Let each group of neighbouring KV heads share one head.

    Args:
        groups: divides the KV heads; as many groups as heads leave the layer untouched.
        second_moment: E[x xᵀ] of the attention's input, (C+1)×(C+1), or None for the identity.
    """
    if groups == attention.kv_heads:
        return attention  # to the last bit, which a turn and its inverse would not give
    rows = rotary_rows(attention.rotary, attention.k_KDC.shape[1])
    layer = with_moments(attention, second_moment)
    parts = []
    for heads in contiguous_groups(attention.kv_heads, groups):
        basis = solve(attention, rows, head_grams(layer, rows, heads))
        parts.append(_share_group(layer, rows, heads, basis))
    q_HDE, k_GDE, v_GDE = (torch.cat([part[index] for part in parts]) for index in range(3))
    return with_projections(attention, q_HDE, k_GDE, v_GDE, torch.cat([part[3] for part in parts], dim=1))


def contiguous_groups(kv_heads: int, groups: int) -> list[list[int]]:
    """Split the heads into groups of neighbours, as ``repeat_interleave`` shares them."""
    members = kv_heads // groups
    return [list(range(first, first + members)) for first in range(0, kv_heads, members)]


Parts = tuple[Tensor, Tensor, Tensor]
"""Parts of a head that combine by themselves: planes of K (…, F, E), unrotated rows of K (…, P, E), V (…, D, E)."""


def _share_group(
    layer: AttentionWithMoments, rows: RotaryRows, heads: list[int], basis: SharedBasis
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Apply the basis of one group.

    Returns:
        q of the group's query heads (X, D, E), the shared k and v (1, D, E), o of its query heads (C, X, D).
    """
    per_kv = layer.q_HDE.shape[0] // layer.k_KDE.shape[0]
    queries = [head * per_kv + offset for head in heads for offset in range(per_kv)]
    k_MDE, v_MDE = layer.k_KDE[heads], layer.v_KDE[heads]
    members = to_planes(k_MDE, rows), k_MDE[:, rows.passing_P], v_MDE
    shared = (
        torch.einsum("fm,mfe->fe", basis.plane_combine_FM, members[0]),
        (basis.passing_combine_MPP @ members[1]).sum(0),
        (basis.value_combine_MDD @ members[2]).sum(0),
    )
    if basis.balanced:
        shared, basis = _balanced(members, shared, basis)
    plane_FE, passing_PE, v_DE = shared
    k_1DE = from_planes(plane_FE.unsqueeze(0), passing_PE.unsqueeze(0), rows)
    if basis.rescaled:
        # Nothing takes the inverse: scores and outputs are meant to grow back to their size before the average.
        k_1DE = k_1DE * _norm_ratio(k_MDE.norm(dim=(1, 2)).mean(), k_1DE.norm())
        v_DE = v_DE * _norm_ratio(v_MDE.norm(dim=(1, 2)).mean(), v_DE.norm())
    q_XDE = _read_shared_keys(layer.q_HDE[queries], rows, basis, per_kv)
    if basis.sharpened:
        before_X = score_energy(layer, rows, layer.q_HDE[queries], k_MDE.repeat_interleave(per_kv, 0))
        after_X = score_energy(layer, rows, q_XDE, k_1DE.expand_as(q_XDE))
        q_XDE = q_XDE * _sharpening(before_X, after_X)[:, None, None]
    o_CXD = torch.einsum("cxd,xde->cxe", layer.o_CHD[:, queries], basis.value_expand_MDD.repeat_interleave(per_kv, 0))
    return q_XDE, k_1DE, v_DE.unsqueeze(0), o_CXD


def _balanced(members: Parts, shared: Parts, basis: SharedBasis) -> tuple[Parts, SharedBasis]:
    """Give each part of the shared head the mean norm of its members, and what reads it the inverse.

    The product of both does not change. Sizes like the members' suit the dtype of the weights and the learning rate of
    a later training.
    """
    planes_MFE, passing_MPE, v_MDE = members
    plane_FE, passing_PE, v_DE = shared
    scale_F = _norm_ratio(planes_MFE.abs().square().sum(-1).sqrt().mean(0), plane_FE.abs().square().sum(-1).sqrt())
    passing_scale = _norm_ratio(passing_MPE.norm(dim=(1, 2)).mean(), passing_PE.norm())
    v_scale = _norm_ratio(v_MDE.norm(dim=(1, 2)).mean(), v_DE.norm())
    return (plane_FE * scale_F.unsqueeze(-1), passing_PE * passing_scale, v_DE * v_scale), replace(
        basis,
        plane_expand_FM=basis.plane_expand_FM / scale_F.unsqueeze(-1),
        passing_expand_MPP=basis.passing_expand_MPP / passing_scale,
        value_expand_MDD=basis.value_expand_MDD / v_scale,
    )


def _sharpening(before_X: Tensor, after_X: Tensor) -> Tensor:
    """Compute a factor for each query head from the energy of its scores: (before / after)^¼.

    A shared key holds only a part of each member, so scores spread less and attention goes flat. Scores are square
    roots of energies, so (before / after)^½ would bring back the whole spread. But what is left of the scores is partly
    wrong, and amplifying all of it amplifies the error: the fourth root goes half-way.
    """
    return _norm_ratio(before_X, after_X) ** 0.25


def _read_shared_keys(q_XDE: Tensor, rows: RotaryRows, basis: SharedBasis, per_kv: int) -> Tensor:
    """Rewrite queries so that they read the shared key c as they read their own k ≈ b c: qᴴ k = (conj(b) q)ᴴ c."""
    # All query heads of one member read through the same basis change.
    plane_XF = basis.plane_expand_FM.conj().T.repeat_interleave(per_kv, 0)
    passing_XPP = basis.passing_expand_MPP.repeat_interleave(per_kv, 0)
    return from_planes(to_planes(q_XDE, rows) * plane_XF.unsqueeze(-1), passing_XPP.mT @ q_XDE[:, rows.passing_P], rows)


def _norm_ratio(wanted: Tensor, found: Tensor) -> Tensor:
    """Divide, with 1 where either is zero, because then there is nothing to scale."""
    return torch.where((wanted > 0) & (found > 0), wanted / found, torch.ones_like(wanted))


def turns_in_words(layer: AttentionLayer, turns: AllowedTurns) -> str:
    """Describe the turns of one layer, such as ``keys: a phase per rotary plane; values: a rotation``."""
    return f"keys: {_key_turns(layer, turns)}; values: {turns.of_rows}"


def _key_turns(layer: AttentionLayer, turns: AllowedTurns) -> str:
    if layer.keys_normed:  # whatever the method would turn, the norm allows no more
        return "a sign per rotary plane or row, or a phase where the two weights of the q/k norm are equal"
    rotated = 0 if layer.rotary is None or layer.rotary.layout == "none" else layer.rotary.dim
    of_planes = [f"{turns.of_planes} per rotary plane"] if rotated else []
    of_rows = [turns.of_rows] if rotated < layer.head_dim else []
    return ", ".join([*of_planes, *of_rows]) + (" of the rows not rotated" if of_planes and of_rows else "")
