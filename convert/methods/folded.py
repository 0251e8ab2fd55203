"""``folded``: keep the best subspace that the heads of a group can share, in closed form.

For each part of a head that allows a basis change (see basis_change.py), the shared head is the principal component of
its members (Eckart and Young 1936): K weighted by the energy of the queries, V weighted by the output projection, both
in the metric C = E[x xᵀ] of the activations. docs/methods.md has the derivation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .aligned import normed_turns
from .attention import Attention
from .basis_change import SharedBasis, contiguous_groups, share_heads
from .context import MethodContext
from .moments import HeadGrams, RotaryRows, head_grams, rotary_rows, with_moments

_DAMPING = 1e-9
"""Share of the mean weight given to rows that no query reads or no output shows, so that roots can be inverted."""


def folded(attention: Attention, groups: int, context: MethodContext) -> Attention:
    """Replace each group by its principal head and fold the basis changes into q and o.

    Where the keys pass through an RMS norm, K is averaged after the turns that the norm allows (see ``aligned``), and
    only V is folded.

    Raises:
        UnsupportedError: the rotary layout is not known.
        UsageError: the statistics belong to a model of another width.
    """
    return share_heads(attention, groups, context.second_moment, fold_group)


def fold_group(attention: Attention, rows: RotaryRows, grams: HeadGrams) -> SharedBasis:
    """Find principal components for the planes of K, for its other rows, and for V."""
    if attention.keys_normed:
        # The norm fixes the size of every key and allows few turns: average, as aligned does.
        planes_FM, passing_MPP, scale_M = normed_turns(attention, rows, grams)
        members = len(scale_M)
        plane_combine_FM, plane_expand_FM = planes_FM.conj() * scale_M / members, planes_FM
        passing_combine_MPP, passing_expand_MPP = passing_MPP.mT * scale_M[:, None, None] / members, passing_MPP
    else:
        plane_combine_FM, plane_expand_FM = principal_row(grams.planes_FKK, grams.plane_weights_FK)
        passing_combine_MPP, passing_expand_MPP = principal_rows(grams.passing_KPKP, grams.passing_weights_KPP)
    value_combine_MDD, value_expand_MDD = principal_rows(grams.values_KDKD, grams.value_weights_KDD)
    return SharedBasis(
        plane_combine_FM,
        plane_expand_FM,
        passing_combine_MPP,
        passing_expand_MPP,
        value_combine_MDD,
        value_expand_MDD,
        balanced=not attention.keys_normed,
        sharpened=not attention.keys_normed,
    )


def principal_row(gram_FMM: Tensor, weight_FM: Tensor) -> tuple[Tensor, Tensor]:
    """Find the complex row c that all members share best: min Σ_h w_h |κ_h − b_h c|² in the metric C.

    With S_ij = √(w_i w_j) κ_i C κ_jᴴ and its top eigenvector u, c = Σ_h conj(u_h) √w_h κ_h and b_h = u_h / √w_h
    (docs/methods.md, "K, per rotary plane").

    Args:
        gram_FMM: κ_i C κ_jᴴ, per plane.
        weight_FM: w_h, how large the queries of member h are in the plane.

    Returns:
        (combine, expand), both (F, M): c = Σ_h combine_h κ_h and κ_h ≈ expand_h c.
    """
    root_FM = _damped(weight_FM).sqrt()
    vector_FM = torch.linalg.eigh(_weighted_planes(gram_FMM, root_FM)).eigenvectors[..., -1]
    # An eigenvector is determined up to a phase: choose it so that the member with the largest part is not turned.
    largest = vector_FM.gather(-1, vector_FM.abs().argmax(-1, keepdim=True))
    vector_FM = vector_FM * largest.conj() / largest.abs()
    # κ_h is weighted to enter the eigenproblem, and what it gives is divided by the weight to be read as κ_h again.
    return vector_FM.conj() * root_FM, vector_FM / root_FM


def principal_rows(gram_MRMR: Tensor, weight_MRR: Tensor) -> tuple[Tensor, Tensor]:
    """Find the R rows c that all members share best: min Σ_h ‖A_h (W_h − B_h c)‖² in the metric C, A_hᵀ A_h = weight_h.

    With U the top R eigenvectors of the stacked A_i W_i C W_jᵀ A_jᵀ, c = Σ_h U_hᵀ A_h W_h and B_h = A_h⁻¹ U_h
    (docs/methods.md, "V").

    Args:
        gram_MRMR: W_i C W_jᵀ.
        weight_MRR: how strongly the readers of member h see each of its directions: outputs for V, queries for K.

    Returns:
        (combine, expand), both (M, R, R): c = Σ_h combine_h W_h and W_h ≈ expand_h c.
    """
    members, width = gram_MRMR.shape[:2]
    if width == 0:  # every row is rotated
        return gram_MRMR.new_zeros(members, 0, 0), gram_MRMR.new_zeros(members, 0, 0)
    root_MRR, inverse_MRR = _roots(weight_MRR)
    gram = _weighted_rows(gram_MRMR, root_MRR).reshape(members * width, members * width)
    # eigh sorts in ascending order: the last vectors are the principal ones.
    vectors_MRR = torch.linalg.eigh(gram).eigenvectors[:, -width:].unflatten(0, (members, width))
    return vectors_MRR.mT @ root_MRR, inverse_MRR @ vectors_MRR


def _damped(weight_FM: Tensor) -> Tensor:
    """Raise weights a little above zero. ``tiny`` serves a plane that no query of any member reads."""
    tiny = torch.finfo(torch.float64).tiny
    return weight_FM + (_DAMPING * weight_FM.mean(-1, keepdim=True)).clamp_min(tiny)


def _roots(weight_MRR: Tensor) -> tuple[Tensor, Tensor]:
    """Compute A and A⁻¹ with AᵀA = weight, damped."""
    values_MR, vectors_MRR = torch.linalg.eigh(weight_MRR)
    root_MR = _damped(values_MR.clamp_min(0)).sqrt()
    return root_MR.unsqueeze(-1) * vectors_MRR.mT, vectors_MRR / root_MR.unsqueeze(-2)


def _weighted_planes(gram_FMM: Tensor, root_FM: Tensor) -> Tensor:
    return gram_FMM * root_FM.unsqueeze(-1) * root_FM.unsqueeze(-2)


def _weighted_rows(gram_MRMR: Tensor, root_MRR: Tensor) -> Tensor:
    return torch.einsum("iap,ipjq,jbq->iajb", root_MRR, gram_MRMR, root_MRR)


@dataclass(frozen=True)
class WeightedGrams:
    """Gram matrices of a layer's heads, weighted by their readers: give the loss of any group of heads.

    Attributes:
        planes_FKK, passing_KPKP, values_KDKD: as in :class:`.moments.HeadGrams`, weighted by queries and outputs.
    """

    planes_FKK: Tensor
    passing_KPKP: Tensor
    values_KDKD: Tensor

    def lost_energy(self, heads: list[int]) -> tuple[float, float]:
        """Compute the energy of K and of V that one shared head cannot hold, in squared scores and squared outputs."""
        # A plane's score is the real part of a complex product whose phase positions spread evenly: half its energy.
        planes = torch.linalg.eigvalsh(self.planes_FKK[:, heads][:, :, heads])[..., :-1].sum().item() / 2
        return planes + _tail(self.passing_KPKP, heads), _tail(self.values_KDKD, heads)

    def total_energy(self) -> tuple[float, float]:
        """Compute all the energy of K and of V."""
        planes = self.planes_FKK.diagonal(dim1=-2, dim2=-1).real.sum().item() / 2
        passing, values = (_square(gram).trace().item() for gram in (self.passing_KPKP, self.values_KDKD))
        return planes + passing, values


def _square(gram_KRKR: Tensor) -> Tensor:
    """Flatten to one matrix, (K·R, K·R)."""
    return gram_KRKR.flatten(0, 1).flatten(1, 2)


def _tail(gram_KRKR: Tensor, heads: list[int]) -> float:
    """Sum the eigenvalues that R shared rows cannot hold: all but the R largest."""
    width = gram_KRKR.shape[1]
    if width == 0:
        return 0.0
    values = torch.linalg.eigvalsh(_square(gram_KRKR[heads][:, :, heads]))
    return float(values[:-width].clamp_min(0).sum())  # rounding can make zero eigenvalues negative


def weighted_grams(attention: Attention, context: MethodContext) -> WeightedGrams:
    """Weigh the Gram matrices of a layer's heads by the queries and outputs that read them."""
    rows = rotary_rows(attention.rotary, attention.k_KDC.shape[1])
    grams = head_grams(with_moments(attention, context.second_moment), rows, list(range(attention.kv_heads)))
    return WeightedGrams(
        # Nothing is divided by these roots, so zero weights of planes need no damping.
        planes_FKK=_weighted_planes(grams.planes_FKK, grams.plane_weights_FK.sqrt()),
        passing_KPKP=_weighted_rows(grams.passing_KPKP, _roots(grams.passing_weights_KPP)[0]),
        values_KDKD=_weighted_rows(grams.values_KDKD, _roots(grams.value_weights_KDD)[0]),
    )


@dataclass(frozen=True)
class PredictedLoss:
    """Shares of a layer's energy that ``folded`` would lose, by group. The layer loses their sum.

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
    """Predict the loss of grouping neighbours: the energy outside the subspace that a group can share.

    Where the keys are normed, the figure for K assumes a free basis, so it is a lower bound.
    """
    grams = weighted_grams(attention, context)
    keys_total, values_total = grams.total_energy()
    lost = [grams.lost_energy(heads) for heads in contiguous_groups(attention.kv_heads, groups)]
    return PredictedLoss(
        keys_G=[keys / keys_total if keys_total else 0.0 for keys, _ in lost],
        values_G=[values / values_total if values_total else 0.0 for _, values in lost],
    )
