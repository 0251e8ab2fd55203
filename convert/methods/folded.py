"""``folded``: keep the best subspace that the heads of a group can share, in closed form.

For each part of a head that allows a basis change (see basis.py), the shared head is the principal component of its
members: of K weighted by the energy of the queries, of V weighted by the output projection, both in the metric
C = E[x xᵀ] of the activations (Eckart–Young). See docs/methods.md for the derivation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .aligned import normed_turns
from .attention import Attention
from .basis_change import Sharing, contiguous_groups, shared
from .moments import Energy, Rows, extended, measured, rotary_rows

if TYPE_CHECKING:
    from .table import MethodContext

_DAMPING = 1e-9
"""Share of the mean weight given to what no query reads or no output shows, so that roots can be inverted."""


def folded(attention: Attention, groups: int, context: MethodContext) -> Attention:
    """Replace each group by its principal head and fold the basis changes into q and o.

    Where the keys pass through an RMS norm, K is averaged after the turns that the norm allows (see ``aligned``), and
    only V is folded.

    Raises:
        UnsupportedError: the rotary layout is not known.
        UsageError: the statistics belong to a model of another width.
    """
    return shared(attention, groups, context.second_moment, fold_group)


def fold_group(attention: Attention, rows: Rows, energy: Energy) -> Sharing:
    """Principal components for the planes of K, for its other rows, and for V."""
    if attention.keys_normed:
        planes_Fm, passing_mPP, scale_m = normed_turns(attention, rows, energy)
        members = len(scale_m)
        plane_combine_Fm, plane_expand_Fm = planes_Fm.conj() * scale_m / members, planes_Fm
        passing_combine_mPP, passing_expand_mPP = passing_mPP.mT * scale_m[:, None, None] / members, passing_mPP
    else:
        plane_combine_Fm, plane_expand_Fm = principal_row(energy.planes_FKK, energy.plane_queries_FK)
        passing_combine_mPP, passing_expand_mPP = principal_rows(energy.passing_KPKP, energy.passing_queries_KPP)
    value_combine_mDD, value_expand_mDD = principal_rows(energy.values_KDKD, energy.outputs_KDD)
    return Sharing(
        plane_combine_Fm,
        plane_expand_Fm,
        passing_combine_mPP,
        passing_expand_mPP,
        value_combine_mDD,
        value_expand_mDD,
        balanced=not attention.keys_normed,
        sharpened=not attention.keys_normed,
    )


def principal_row(gram_Fmm: Tensor, weight_Fm: Tensor) -> tuple[Tensor, Tensor]:
    """The complex row c that all members share best: min Σ_h w_h |κ_h − b_h c|² in the metric of the gram.

    Args:
        gram_Fmm: κ_i C κ_jᴴ, per plane.
        weight_Fm: w_h, how large the queries of member h are in the plane.

    Returns:
        (combine, expand), both (F, m): c = Σ_h combine_h κ_h and κ_h ≈ expand_h c.
    """
    root_Fm = _damped(weight_Fm).sqrt()
    vector_Fm = torch.linalg.eigh(_weighted_planes(gram_Fmm, root_Fm)).eigenvectors[..., -1]
    # An eigenvector has no phase of its own: the member that it holds most of stays as it was.
    largest = vector_Fm.gather(-1, vector_Fm.abs().argmax(-1, keepdim=True))
    vector_Fm = vector_Fm * largest.conj() / largest.abs()
    return vector_Fm.conj() * root_Fm, vector_Fm / root_Fm


def principal_rows(gram_mPmP: Tensor, weight_mPP: Tensor) -> tuple[Tensor, Tensor]:
    """The P rows that all members share best: min Σ_h ‖R_h (W_h − B_h c)‖² with R_hᵀ R_h = weight_h.

    Args:
        gram_mPmP: W_i C W_jᵀ.
        weight_mPP: how strongly what reads member h sees each direction of it.

    Returns:
        (combine, expand), both (m, P, P): c = Σ_h combine_h W_h and W_h ≈ expand_h c.
    """
    members, width = gram_mPmP.shape[:2]
    if width == 0:
        return gram_mPmP.new_zeros(members, 0, 0), gram_mPmP.new_zeros(members, 0, 0)
    root_mPP, inverse_mPP = _roots(weight_mPP)
    gram = _weighted_rows(gram_mPmP, root_mPP).reshape(members * width, members * width)
    vectors_mPP = torch.linalg.eigh(gram).eigenvectors[:, -width:].unflatten(0, (members, width))
    return vectors_mPP.mT @ root_mPP, inverse_mPP @ vectors_mPP


def _damped(weight_Fm: Tensor) -> Tensor:
    tiny = torch.finfo(torch.float64).tiny
    return weight_Fm + (_DAMPING * weight_Fm.mean(-1, keepdim=True)).clamp_min(tiny)


def _roots(weight_mPP: Tensor) -> tuple[Tensor, Tensor]:
    """R and R⁻¹ with RᵀR = weight, damped."""
    values_mP, vectors_mPP = torch.linalg.eigh(weight_mPP)
    root_mP = _damped(values_mP.clamp_min(0)).sqrt()
    return root_mP.unsqueeze(-1) * vectors_mPP.mT, vectors_mPP / root_mP.unsqueeze(-2)


def _weighted_planes(gram_Fmm: Tensor, root_Fm: Tensor) -> Tensor:
    return gram_Fmm * root_Fm.unsqueeze(-1) * root_Fm.unsqueeze(-2)


def _weighted_rows(gram_mPmP: Tensor, root_mPP: Tensor) -> Tensor:
    return torch.einsum("iap,ipjq,jbq->iajb", root_mPP, gram_mPmP, root_mPP)


@dataclass(frozen=True)
class Spectra:
    """What sharing would lose, ready for any choice of heads.

    Attributes:
        planes_FKK, passing_KPKP, values_KDKD: the grams of :class:`Energy`, weighted by queries and outputs.
    """

    planes_FKK: Tensor
    passing_KPKP: Tensor
    values_KDKD: Tensor

    def lost(self, heads: list[int]) -> tuple[float, float]:
        """Energy of K and of V that one shared head cannot hold, in squared scores and squared outputs.

        The score of a plane is the real part of a product that positions turn evenly, hence its half.
        """
        planes = torch.linalg.eigvalsh(self.planes_FKK[:, heads][:, :, heads])[..., :-1].sum().item() / 2
        return planes + _tail(self.passing_KPKP, heads), _tail(self.values_KDKD, heads)

    def total(self) -> tuple[float, float]:
        """All the energy of K and of V."""
        planes = self.planes_FKK.diagonal(dim1=-2, dim2=-1).real.sum().item() / 2
        passing, values = (_square(gram).trace().item() for gram in (self.passing_KPKP, self.values_KDKD))
        return planes + passing, values


def _square(gram_KPKP: Tensor) -> Tensor:
    return gram_KPKP.flatten(0, 1).flatten(1, 2)


def _tail(gram_KPKP: Tensor, heads: list[int]) -> float:
    width = gram_KPKP.shape[1]
    if width == 0:
        return 0.0
    values = torch.linalg.eigvalsh(_square(gram_KPKP[heads][:, :, heads]))
    return float(values[:-width].clamp_min(0).sum())


def spectra(attention: Attention, context: MethodContext) -> Spectra:
    """Weigh the energy of a layer's heads by what reads them."""
    rows = rotary_rows(attention.rotary, attention.k_KDC.shape[1])
    energy = measured(extended(attention, context.second_moment), rows, list(range(attention.kv_heads)))
    return Spectra(
        planes_FKK=_weighted_planes(energy.planes_FKK, energy.plane_queries_FK.sqrt()),
        passing_KPKP=_weighted_rows(energy.passing_KPKP, _roots(energy.passing_queries_KPP)[0]),
        values_KDKD=_weighted_rows(energy.values_KDKD, _roots(energy.outputs_KDD)[0]),
    )


@dataclass(frozen=True)
class PredictedLoss:
    """Shares of a layer's energy that ``folded`` would lose, by group; their sums are the layer's.

    Attributes:
        keys_G: share of the energy of the scores.
        values_G: share of the energy of the outputs.
    """

    keys_G: list[float]
    values_G: list[float]

    @property
    def keys(self) -> float:
        return sum(self.keys_G)

    @property
    def values(self) -> float:
        return sum(self.values_G)


def predicted_loss(attention: Attention, groups: int, context: MethodContext) -> PredictedLoss:
    """Say before a conversion how much it would lose: the energy outside the subspace that a group can share.

    Where the keys are normed, the figure for K is that of a free basis, so it is a lower bound.
    """
    layer = spectra(attention, context)
    keys_total, values_total = layer.total()
    lost = [layer.lost(heads) for heads in contiguous_groups(attention.kv_heads, groups)]
    return PredictedLoss(
        keys_G=[keys / keys_total if keys_total else 0.0 for keys, _ in lost],
        values_G=[values / values_total if values_total else 0.0 for _, values in lost],
    )
