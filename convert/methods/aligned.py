"""``aligned``: turn the heads of a group towards each other, then average them.

Orthogonal Procrustes over a group (Jin et al. 2024, arXiv 2412.20677, section 3), in the metric of the activations.
For K under rotary positions the turn of a plane is one phase, because nothing else commutes with every rotation.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .attention import Attention
from .basis_change import SharedBasis, share_heads
from .context import MethodContext
from .moments import HeadGrams, RotaryRows

_SWEEPS, _SETTLED = 50, 1e-7
"""No sweep lowers the agreement, so the loop converges. Unrelated heads settle slowest, and there more digits would not
improve the average."""


def aligned(attention: Attention, groups: int, context: MethodContext) -> Attention:
    """Average each group after lining its heads up.

    Where the keys pass through a norm, only turns that commute with it are used, see :func:`normed_turns`.

    Raises:
        UnsupportedError: the rotary layout is not known.
        UsageError: the statistics belong to a model of another width.
    """
    return share_heads(attention, groups, context.second_moment, align_group)


def aligned_and_rescaled(attention: Attention, groups: int, context: MethodContext) -> Attention:
    """Average as :func:`aligned` does, then give K and V of the shared head the mean norm of its members.

    An average of heads that do not quite agree is shorter than they are, so scores and outputs shrink. This corrects
    their size.
    """
    return share_heads(attention, groups, context.second_moment, _align_and_rescale)


def _align_and_rescale(attention: Attention, rows: RotaryRows, grams: HeadGrams) -> SharedBasis:
    return replace(align_group(attention, rows, grams), rescaled=True)


def align_group(attention: Attention, rows: RotaryRows, grams: HeadGrams) -> SharedBasis:
    """Find phases for the planes of K, and rotations for its other rows and for V."""
    members = grams.values_KDKD.shape[0]
    if attention.keys_normed:
        planes_FM, passing_MPP, scale_M = normed_turns(attention, rows, grams)
    else:
        planes_FM, passing_MPP = phases(grams.planes_FKK), rotations(grams.passing_KPKP)
        scale_M = torch.ones(members, dtype=torch.float64)
    values_MDD = rotations(grams.values_KDKD)
    # A member is its turn times the common head, so it is divided by the turn first: conj(b) for |b| = 1, Oᵀ for O.
    return SharedBasis(
        plane_combine_FM=planes_FM.conj() * scale_M / members,
        plane_expand_FM=planes_FM,
        passing_combine_MPP=passing_MPP.mT * scale_M[:, None, None] / members,
        passing_expand_MPP=passing_MPP,
        value_combine_MDD=values_MDD.mT / members,
        value_expand_MDD=values_MDD,
    )


def phases(gram_FMM: Tensor) -> Tensor:
    """Find unit numbers b (F, M) that maximise Σ_ij conj(b_i) S_ij b_j, with b_0 = 1; members are divided by them.

    For real S they are signs. The search starts at the phases of the top eigenvector, the optimum without the unit
    constraint. It then turns one member at a time towards the sum of the others, which never lowers the agreement.
    """
    turn_FM = _unit(torch.linalg.eigh(gram_FMM).eigenvectors[..., -1])
    others_FMM = gram_FMM - torch.diag_embed(gram_FMM.diagonal(dim1=-2, dim2=-1))
    for _ in range(_SWEEPS):
        before_FM = turn_FM.clone()
        for member in range(turn_FM.shape[1]):
            turn_FM[:, member] = _unit((others_FMM[:, member] * turn_FM).sum(-1))
        if torch.allclose(turn_FM, before_FM, rtol=0, atol=_SETTLED):
            break
    # A phase common to all members changes nothing, so the first member can stay as it is.
    return turn_FM * turn_FM[:, :1].conj()


def _unit(numbers: Tensor) -> Tensor:
    """Divide by the absolute value, with 1 for zero, which has no phase."""
    size = numbers.abs()
    return torch.where(size > 0, numbers / size.clamp_min(torch.finfo(torch.float64).tiny), torch.ones_like(numbers))


def rotations(gram_MRMR: Tensor) -> Tensor:
    """Find orthogonal O (M, R, R) that maximise Σ_ij tr O_iᵀ S_ij O_j, with O_0 = 1; O_iᵀ W_i then agree.

    The search starts with every member turned towards the first. It then turns one member at a time towards the sum of
    the others, as :func:`phases` does.
    """
    members, width = gram_MRMR.shape[:2]
    turn_MRR = _polar(gram_MRMR[:, :, 0])
    others = torch.arange(members)
    for _ in range(_SWEEPS if width else 0):
        before_MRR = turn_MRR.clone()
        for member in range(members):
            rest = others[others != member]
            turn_MRR[member] = _polar(torch.einsum("pjq,jqr->pr", gram_MRMR[member][:, rest], turn_MRR[rest]))
        if torch.allclose(turn_MRR, before_MRR, rtol=0, atol=_SETTLED):
            break
    return turn_MRR @ turn_MRR[0].T


def _polar(matrices_RR: Tensor) -> Tensor:
    """Find the nearest orthogonal matrices, the solution of the Procrustes problem (Schönemann 1966)."""
    left, _, right = torch.linalg.svd(matrices_RR)
    nearest_RR: Tensor = left @ right
    return nearest_RR


def normed_turns(attention: Attention, rows: RotaryRows, grams: HeadGrams) -> tuple[Tensor, Tensor, Tensor]:
    """Find turns that commute with a norm over each head.

    An RMS norm, known by its two weight vectors, allows signs, and any phase in a plane whose weights are equal. A norm
    that is not known allows no turn.

    Returns:
        Phases (F, M), signs as diagonal matrices (M, P, P), and a scale for each member (M,).
    """
    row_energy_MP = grams.passing_KPKP.flatten(0, 1).flatten(1, 2).diagonal().view(grams.passing_KPKP.shape[:2])
    plane_energy_MF = grams.planes_FKK.diagonal(dim1=-2, dim2=-1).real.T
    size_M = (row_energy_MP.sum(1) + plane_energy_MF.sum(1)).clamp_min(torch.finfo(torch.float64).tiny).sqrt()
    # The norm divides by a member's size, so large members must not outvote small ones: bring all to the mean size.
    scale_M = size_M.mean() / size_M
    if attention.q_norm_D is None or attention.k_norm_D is None:
        unturned_FM = torch.ones_like(plane_energy_MF.T).to(grams.planes_FKK.dtype)
        return unturned_FM, torch.diag_embed(torch.ones_like(row_energy_MP)), scale_M
    scale_MM = scale_M.unsqueeze(-1) * scale_M
    planes_FMM = grams.planes_FKK * scale_MM
    weights_2D = torch.stack([attention.q_norm_D, attention.k_norm_D])
    equal_F = (weights_2D[:, rows.first_F] == weights_2D[:, rows.second_F]).all(0)
    # phases() of the real part gives signs, which commute with any weights.
    planes_FM = torch.where(equal_F.unsqueeze(-1), phases(planes_FMM), phases(planes_FMM.real).to(planes_FMM.dtype))
    rows_PMM = grams.passing_KPKP.diagonal(dim1=1, dim2=3).permute(2, 0, 1) * scale_MM
    return planes_FM, torch.diag_embed(phases(rows_PMM).T), scale_M
