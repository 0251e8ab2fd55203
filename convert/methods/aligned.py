"""``aligned``: turn the heads of a group towards each other, then average them.

Orthogonal Procrustes over a group (Jin et al. 2024, arXiv 2412.20677, section 3), in the metric of the activations;
for K under rotary positions the turn of a plane is one phase, since nothing else commutes with every rotation.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .attention import Attention
from .basis_change import Sharing, shared
from .moments import Energy, Rows

if TYPE_CHECKING:
    from .table import MethodContext

_SWEEPS, _SETTLED = 50, 1e-7
"""Each sweep can only raise the agreement; unrelated heads settle slowest, and there the last digits gain nothing."""


def aligned(attention: Attention, groups: int, context: MethodContext) -> Attention:
    """Average each group after lining its heads up.

    Where the keys pass through a norm, only what commutes with it is turned, see :func:`normed_turns`.

    Raises:
        UnsupportedError: the rotary layout is not known.
        UsageError: the statistics belong to a model of another width.
    """
    return shared(attention, groups, context.second_moment, align_group)


def aligned_and_rescaled(attention: Attention, groups: int, context: MethodContext) -> Attention:
    """The same, then K and V of the shared head get the mean norm of its members.

    An average of heads that do not quite agree is shorter than they are, so scores and outputs shrink; this makes up
    for the size of it.
    """
    return shared(attention, groups, context.second_moment, _align_and_rescale)


def _align_and_rescale(attention: Attention, rows: Rows, energy: Energy) -> Sharing:
    return replace(align_group(attention, rows, energy), rescaled=True)


def align_group(attention: Attention, rows: Rows, energy: Energy) -> Sharing:
    """Phases for the planes of K, rotations for its other rows and for V."""
    members = energy.values_KDKD.shape[0]
    if attention.keys_normed:
        planes_Fm, passing_mPP, scale_m = normed_turns(attention, rows, energy)
    else:
        planes_Fm, passing_mPP = phases(energy.planes_FKK), rotations(energy.passing_KPKP)
        scale_m = torch.ones(members, dtype=torch.float64)
    values_mDD = rotations(energy.values_KDKD)
    return Sharing(
        plane_combine_Fm=planes_Fm.conj() * scale_m / members,
        plane_expand_Fm=planes_Fm,
        passing_combine_mPP=passing_mPP.mT * scale_m[:, None, None] / members,
        passing_expand_mPP=passing_mPP,
        value_combine_mDD=values_mDD.mT / members,
        value_expand_mDD=values_mDD,
    )


def phases(gram_Fmm: Tensor) -> Tensor:
    """Unit numbers b (F, m) that maximise Σ_ij conj(b_i) S_ij b_j, so that members divided by them agree best.

    For real S they are signs. Starts at the top eigenvector; turning one member at a time towards the sum of the others
    never lowers the agreement. b_0 is 1.
    """
    turn_Fm = _unit(torch.linalg.eigh(gram_Fmm).eigenvectors[..., -1])
    others_Fmm = gram_Fmm - torch.diag_embed(gram_Fmm.diagonal(dim1=-2, dim2=-1))
    for _ in range(_SWEEPS):
        before_Fm = turn_Fm.clone()
        for member in range(turn_Fm.shape[1]):
            turn_Fm[:, member] = _unit((others_Fmm[:, member] * turn_Fm).sum(-1))
        if torch.allclose(turn_Fm, before_Fm, rtol=0, atol=_SETTLED):
            break
    return turn_Fm * turn_Fm[:, :1].conj()


def _unit(numbers: Tensor) -> Tensor:
    size = numbers.abs()
    return torch.where(size > 0, numbers / size.clamp_min(torch.finfo(torch.float64).tiny), torch.ones_like(numbers))


def rotations(gram_mPmP: Tensor) -> Tensor:
    """Orthogonal O (m, P, P) that maximise Σ_ij tr O_iᵀ S_ij O_j, so that O_iᵀ W_i agree; O_0 is the identity.

    Turns one member at a time towards the sum of the others, as :func:`phases` does.
    """
    members, width = gram_mPmP.shape[:2]
    turn_mPP = _polar(gram_mPmP[:, :, 0])
    others = torch.arange(members)
    for _ in range(_SWEEPS if width else 0):
        before_mPP = turn_mPP.clone()
        for member in range(members):
            rest = others[others != member]
            turn_mPP[member] = _polar(torch.einsum("pjq,jqr->pr", gram_mPmP[member][:, rest], turn_mPP[rest]))
        if torch.allclose(turn_mPP, before_mPP, rtol=0, atol=_SETTLED):
            break
    return turn_mPP @ turn_mPP[0].T


def _polar(matrices: Tensor) -> Tensor:
    """The nearest orthogonal matrices (Schönemann 1966)."""
    left, _, right = torch.linalg.svd(matrices)
    nearest: Tensor = left @ right
    return nearest


def normed_turns(attention: Attention, rows: Rows, energy: Energy) -> tuple[Tensor, Tensor, Tensor]:
    """What a norm over a head leaves free: phases (F, m), signs as matrices (m, P, P), and a scale per member.

    The norm hides a member's size, so members are first brought to their mean size. An RMS norm, known by its two
    weight vectors, also allows signs, and any phase in a plane whose weights are equal; an unknown norm allows no turn.
    """
    row_energy_mP = energy.passing_KPKP.flatten(0, 1).flatten(1, 2).diagonal().view(energy.passing_KPKP.shape[:2])
    plane_energy_mF = energy.planes_FKK.diagonal(dim1=-2, dim2=-1).real.T
    size_m = (row_energy_mP.sum(1) + plane_energy_mF.sum(1)).clamp_min(torch.finfo(torch.float64).tiny).sqrt()
    scale_m = size_m.mean() / size_m
    if attention.q_norm_D is None or attention.k_norm_D is None:
        unturned_Fm = torch.ones_like(plane_energy_mF.T).to(energy.planes_FKK.dtype)
        return unturned_Fm, torch.diag_embed(torch.ones_like(row_energy_mP)), scale_m
    scale_mm = scale_m.unsqueeze(-1) * scale_m
    planes_Fmm = energy.planes_FKK * scale_mm
    norms_ND = torch.stack([attention.q_norm_D, attention.k_norm_D])
    equal_F = (norms_ND[:, rows.first_F] == norms_ND[:, rows.second_F]).all(0)
    planes_Fm = torch.where(equal_F.unsqueeze(-1), phases(planes_Fmm), phases(planes_Fmm.real).to(planes_Fmm.dtype))
    rows_Pmm = energy.passing_KPKP.diagonal(dim1=1, dim2=3).permute(2, 0, 1) * scale_mm
    return planes_Fm, torch.diag_embed(phases(rows_Pmm).T), scale_m
