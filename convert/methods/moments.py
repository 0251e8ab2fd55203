"""Second moments of one layer's keys, queries, values and outputs on real text.

Methods that read text need nothing else, so they work on these small matrices and not on activations. Throughout,
C = E[x xᵀ] is the second moment of the attention's input; docs/methods.md derives where its mean counts and where not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...errors import UnsupportedError, UsageError
from ..family.rotary import Rotary
from .attention import Attention

_DAMPING = 1e-6
"""Share of the mean variance added to every input direction, so that directions absent from the text are not lost."""
KEY_MEAN_SHARE = 0.5
"""Share at which the mean input counts for rotated keys. A part that all keys share shifts all scores alike, and the
softmax ignores it. Under a rotation that holds in slow planes and fails in fast ones. Half was the best of 0, ½, ¾
and 1."""


@dataclass(frozen=True)
class RotaryRows:
    """The rows of one head: plane f is rows (first[f], second[f]), the others pass unrotated."""

    first_F: Tensor
    second_F: Tensor
    passing_P: Tensor


def rotary_rows(rotary: Rotary, head_dim: int) -> RotaryRows:
    """Sort the rows of a head by their part in the rotation.

    Raises:
        UnsupportedError: the layout is not half, interleaved or none.
    """
    rotated = torch.arange(rotary.dim if rotary.layout != "none" else 0)
    passing_P = torch.arange(len(rotated), head_dim)
    if rotary.layout == "interleaved":
        return RotaryRows(rotated[0::2], rotated[1::2], passing_P)
    if rotary.layout in ("half", "none"):
        half = len(rotated) // 2
        return RotaryRows(rotated[:half], rotated[half:], passing_P)
    raise UnsupportedError(
        f"How this model pairs the rows of a head for its rotary positions is not known ({rotary.layout!r}).",
        "Use --method mean, which works without that.",
    )


def to_planes(rows_XDE: Tensor, rows: RotaryRows) -> Tensor:
    """Turn rotated rows into complex rows z = x_first + i x_second, which a position multiplies by e^iθ: (X, F, E)."""
    return torch.complex(rows_XDE[:, rows.first_F], rows_XDE[:, rows.second_F])


def from_planes(planes_XFE: Tensor, passing_XPE: Tensor, rows: RotaryRows) -> Tensor:
    """Put complex and passing rows back in their places: (X, D, E), the inverse of :func:`to_planes`."""
    heads, planes, width = planes_XFE.shape
    rows_XDE = passing_XPE.new_empty(heads, 2 * planes + passing_XPE.shape[1], width)
    rows_XDE[:, rows.first_F] = planes_XFE.real
    rows_XDE[:, rows.second_F] = planes_XFE.imag
    rows_XDE[:, rows.passing_P] = passing_XPE
    return rows_XDE


@dataclass(frozen=True)
class AttentionWithMoments:
    """A layer's projections in float64, biases as a last column, with the moments of their inputs.

    E is C + 1 where a projection has a bias, else C. Queries read the same input as keys and values, except in
    cross-attention.

    Attributes:
        moment_EE, mean_E: of the input of keys and values.
        query_moment_EE, query_mean_E: of the input of queries.
    """

    q_HDE: Tensor
    k_KDE: Tensor
    v_KDE: Tensor
    o_CHD: Tensor
    moment_EE: Tensor
    mean_E: Tensor
    query_moment_EE: Tensor
    query_mean_E: Tensor

    def times_moment(self, rows_XDE: Tensor, mean_share: float = 1.0) -> Tensor:
        """Multiply rows of keys or values by the second moment of their input.

        Args:
            mean_share: share at which the mean of the input counts; at 0 the moment is the covariance.
        """
        return _times_moment(rows_XDE, self.moment_EE, self.mean_E, mean_share)

    def queries_times_moment(self, rows_XDE: Tensor, mean_share: float = 1.0) -> Tensor:
        """Multiply rows of queries by the second moment of their input, see :meth:`times_moment`."""
        return _times_moment(rows_XDE, self.query_moment_EE, self.query_mean_E, mean_share)


def _times_moment(rows_XDE: Tensor, moment_EE: Tensor, mean_E: Tensor, mean_share: float) -> Tensor:
    product_XDE = rows_XDE @ moment_EE
    if mean_share == 1:
        return product_XDE
    # rows (C − (1 − share) μμᵀ), without a second E×E matrix
    return product_XDE - (1 - mean_share) * (rows_XDE @ mean_E).unsqueeze(-1) * mean_E


def with_moments(attention: Attention, second_moment: Tensor | None) -> AttentionWithMoments:
    """Widen a layer to float64, and put its biases into the matrices.

    Args:
        second_moment: E[x xᵀ], (C+1)×(C+1) with the constant as last index; None means the identity. In
            cross-attention two of them, (2, C+1, C+1): the input of keys and values, then the input of queries.

    Raises:
        UsageError: the second moment belongs to a layer of another width.
    """
    biased = any(bias is not None for bias in (attention.q_bias_HD, attention.k_bias_KD, attention.v_bias_KD))

    def widen(weight_XDC: Tensor, bias_XD: Tensor | None) -> Tensor:
        wide = weight_XDC.double()
        if not biased:
            return wide
        # Every projection gets the column, so that all share the same E.
        column = wide.new_zeros(wide.shape[:2]) if bias_XD is None else bias_XD.double()
        return torch.cat([wide, column.unsqueeze(-1)], dim=-1)

    q_HDE = widen(attention.q_HDC, attention.q_bias_HD)
    k_KDE, v_KDE = widen(attention.k_KDC, attention.k_bias_KD), widen(attention.v_KDC, attention.v_bias_KD)
    width = q_HDE.shape[-1]
    given = [second_moment] if second_moment is None or second_moment.dim() == 2 else list(second_moment)
    moments = [_damped_moment(one, attention.q_HDC.shape[-1], width) for one in given]
    # Self-attention has one moment, which is both the first and the last.
    return AttentionWithMoments(q_HDE, k_KDE, v_KDE, attention.o_CHD.double(), *moments[0], *moments[-1])


def _damped_moment(second_moment: Tensor | None, hidden: int, width: int) -> tuple[Tensor, Tensor]:
    """Split a second moment into the damped matrix (E, E) and the mean (E,)."""
    if second_moment is None:
        return torch.eye(width, dtype=torch.float64), torch.zeros(width, dtype=torch.float64)
    if second_moment.shape != (hidden + 1, hidden + 1):
        raise UsageError(
            f"The statistics are {second_moment.shape[0] - 1} wide, the attention's input {hidden}.",
            "They belong to another checkpoint; collect them again from this one.",
        )
    moment_EE = second_moment[:width, :width].double()
    damping_EE = torch.eye(width, dtype=torch.float64) * (_DAMPING * moment_EE.diagonal().mean())
    # The constant 1 makes the last row of E[x xᵀ] the mean E[x].
    return moment_EE + damping_EE, second_moment[-1, :width].double()


def with_projections(attention: Attention, q_HDE: Tensor, k_GDE: Tensor, v_GDE: Tensor, o_CHD: Tensor) -> Attention:
    """Give a layer new projections in the dtypes it had. A bias stays absent where it was."""
    hidden = attention.q_HDC.shape[-1]

    def bias(rows_XDE: Tensor, old_XD: Tensor | None) -> Tensor | None:
        return None if old_XD is None else rows_XDE[..., -1].to(old_XD.dtype)

    return replace(
        attention,
        q_HDC=q_HDE[..., :hidden].to(attention.q_HDC.dtype),
        k_KDC=k_GDE[..., :hidden].to(attention.k_KDC.dtype),
        v_KDC=v_GDE[..., :hidden].to(attention.v_KDC.dtype),
        o_CHD=o_CHD.to(attention.o_CHD.dtype),
        q_bias_HD=bias(q_HDE, attention.q_bias_HD),
        k_bias_KD=bias(k_GDE, attention.k_bias_KD),
        v_bias_KD=bias(v_GDE, attention.v_bias_KD),
    )


@dataclass(frozen=True)
class HeadGrams:
    """Gram matrices between K KV heads (a layer's, or those of one group), and weights by what reads each head.

    Attributes:
        planes_FKK: κ_i C κ_jᴴ for the complex key rows of a plane; C counts the mean at ``KEY_MEAN_SHARE``.
        plane_weights_FK: Σ g χ C χᴴ over the query heads of KV head h, with their gains g.
        passing_KPKP: Wk_i C Wk_jᵀ for the key rows that are not rotated; C is the covariance.
        passing_weights_KPP: Σ g Wq C Wqᵀ over the query heads of KV head h, for the rows that are not rotated.
        values_KDKD: Wv_i C Wv_jᵀ.
        value_weights_KDD: Σ Woᵀ Wo over the query heads of KV head h.
    """

    planes_FKK: Tensor
    plane_weights_FK: Tensor
    passing_KPKP: Tensor
    passing_weights_KPP: Tensor
    values_KDKD: Tensor
    value_weights_KDD: Tensor


def head_grams(layer: AttentionWithMoments, rows: RotaryRows, heads: list[int]) -> HeadGrams:
    """Compute the Gram matrices of some KV heads, with the weights of the query heads that use them."""
    per_kv = layer.q_HDE.shape[0] // layer.k_KDE.shape[0]
    q_KQDE = layer.q_HDE.unflatten(0, (-1, per_kv))[heads]
    k_KDE, v_KDE = layer.k_KDE[heads], layer.v_KDE[heads]
    o_KQCD = layer.o_CHD.unflatten(1, (-1, per_kv))[:, heads].permute(1, 2, 0, 3)
    gain_KQ = score_error_gains(layer, v_KDE, o_KQCD)
    q_moment_KQDE = layer.queries_times_moment(q_KQDE) * gain_KQ[..., None, None]
    planes_FKE = to_planes(k_KDE, rows).transpose(0, 1)
    planes_moment_FKE = to_planes(layer.times_moment(k_KDE, KEY_MEAN_SHARE), rows).transpose(0, 1)
    # |χ|² of a complex row is the sum over its two real rows.
    query_energy_KD = (q_moment_KQDE * q_KQDE).sum((1, 3))
    passing_KPE, passing_q_KQPE = k_KDE[:, rows.passing_P], q_KQDE[:, :, rows.passing_P]
    outputs_KRD = o_KQCD.flatten(1, 2)  # R = Q·C: the outputs of all query heads of a KV head
    return HeadGrams(
        planes_FKK=planes_moment_FKE @ planes_FKE.mH,
        plane_weights_FK=(query_energy_KD[:, rows.first_F] + query_energy_KD[:, rows.second_F]).T,
        # Without rotation the mean key shifts all scores alike, and the softmax ignores it: only the covariance counts.
        passing_KPKP=torch.einsum("ipe,jqe->ipjq", layer.times_moment(passing_KPE, 0), passing_KPE),
        passing_weights_KPP=(q_moment_KQDE[:, :, rows.passing_P] @ passing_q_KQPE.mT).sum(1),
        values_KDKD=torch.einsum("ipe,jqe->ipjq", layer.times_moment(v_KDE), v_KDE),
        value_weights_KDD=outputs_KRD.mT @ outputs_KRD,
    )


def score_error_gains(layer: AttentionWithMoments, v_KDE: Tensor, o_KQCD: Tensor) -> Tensor:
    """Compute how much a unit of error in each query head's scores moves the layer's output: tr Wo Cov(v) Woᵀ, (K, Q).

    An error moves attention from one token to another, so the distance between values counts, not their size.
    """
    covariance_KDD = layer.times_moment(v_KDE, 0) @ v_KDE.mT
    gain_KQ: Tensor = torch.einsum("kqcd,kde,kqce->kq", o_KQCD, covariance_KDD, o_KQCD)
    return gain_KQ.clamp_min(0)  # a covariance is a difference, so rounding can make it negative


def score_energy(layer: AttentionWithMoments, rows: RotaryRows, q_XDE: Tensor, k_XDE: Tensor) -> Tensor:
    """Compute the mean square of the scores of X pairs of a query and a key head, both without their mean: (X,)."""
    q_moment_XDE, k_moment_XDE = layer.queries_times_moment(q_XDE, 0), layer.times_moment(k_XDE, 0)
    energy_q_XD, energy_k_XD = (q_moment_XDE * q_XDE).sum(-1), (k_moment_XDE * k_XDE).sum(-1)
    planes_q_XF, planes_k_XF = (
        energy_XD[:, rows.first_F] + energy_XD[:, rows.second_F] for energy_XD in (energy_q_XD, energy_k_XD)
    )
    passing = rows.passing_P
    passing_q_XPP, passing_k_XPP = (
        moment_XDE[:, passing] @ rows_XDE[:, passing].mT
        for moment_XDE, rows_XDE in ((q_moment_XDE, q_XDE), (k_moment_XDE, k_XDE))
    )
    # A plane's score is the real part of a complex product whose phase positions spread evenly: half its energy.
    return (planes_q_XF * planes_k_XF).sum(-1) / 2 + (passing_q_XPP * passing_k_XPP).sum((-1, -2))
