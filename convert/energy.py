"""What the heads of one layer carry on real text: second moments of their keys, queries, values and outputs.

Every method that looks at data needs nothing else, so it works on these small matrices and not on activations.
Letters of shapes as in heads.py; besides: F rotary planes, P rows that are not rotated, E the width of the attention's
input, extended by a constant 1 where a projection has a bias (E = C or C + 1).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import UnsupportedError, UsageError
from .heads import Attention, Rotary

_DAMPING = 1e-6
"""Share of the mean variance added to every input direction, so that what the text never shows is not lost."""


@dataclass(frozen=True)
class Rows:
    """The rows of one head by their role: plane f is rows (first[f], second[f]); the others pass through."""

    first_F: Tensor
    second_F: Tensor
    passing_P: Tensor


def rotary_rows(rotary: Rotary, head_dim: int) -> Rows:
    """Sort the rows of a head.

    Raises:
        UnsupportedError: the layout is none of half, interleaved and none.
    """
    rotated = torch.arange(rotary.dim if rotary.layout != "none" else 0)
    passing_P = torch.arange(len(rotated), head_dim)
    if rotary.layout == "interleaved":
        return Rows(rotated[0::2], rotated[1::2], passing_P)
    if rotary.layout in ("half", "none"):
        half = len(rotated) // 2
        return Rows(rotated[:half], rotated[half:], passing_P)
    raise UnsupportedError(
        f"How this model pairs the rows of a head for its rotary positions is not known ({rotary.layout!r}).",
        "Use --method mean, which needs no such knowledge.",
    )


def to_planes(rows_XDE: Tensor, rows: Rows) -> Tensor:
    """Rotated rows of X heads as complex rows (X, F, E): z = x_first + i x_second, which positions turn by e^iθ."""
    return torch.complex(rows_XDE[:, rows.first_F], rows_XDE[:, rows.second_F])


def assembled(planes_XFE: Tensor, passing_XPE: Tensor, rows: Rows) -> Tensor:
    """The inverse of :func:`to_planes`: complex and passing rows back at their places, (X, D, E)."""
    heads, planes, width = planes_XFE.shape
    rows_XDE = passing_XPE.new_empty(heads, 2 * planes + passing_XPE.shape[1], width)
    rows_XDE[:, rows.first_F] = planes_XFE.real
    rows_XDE[:, rows.second_F] = planes_XFE.imag
    rows_XDE[:, rows.passing_P] = passing_XPE
    return rows_XDE


@dataclass(frozen=True)
class Extended:
    """The projections of a layer in float64, biases as a last column, with the second moment of their input."""

    q_HDE: Tensor
    k_KDE: Tensor
    v_KDE: Tensor
    o_CHD: Tensor
    moment_EE: Tensor


def extended(attention: Attention, second_moment: Tensor | None) -> Extended:
    """Widen to float64 and put biases into the matrices.

    Args:
        second_moment: E[x xᵀ], (C+1)×(C+1) with the constant as last index; None means the identity.

    Raises:
        UsageError: the second moment is not of this layer's width.
    """
    biased = any(bias is not None for bias in (attention.q_bias_HD, attention.k_bias_KD, attention.v_bias_KD))

    def widen(weight_XDC: Tensor, bias_XD: Tensor | None) -> Tensor:
        wide = weight_XDC.double()
        if not biased:
            return wide
        column = wide.new_zeros(wide.shape[:2]) if bias_XD is None else bias_XD.double()
        return torch.cat([wide, column.unsqueeze(-1)], dim=-1)

    q_HDE = widen(attention.q_HDC, attention.q_bias_HD)
    k_KDE, v_KDE = widen(attention.k_KDC, attention.k_bias_KD), widen(attention.v_KDC, attention.v_bias_KD)
    moment_EE = _moment(second_moment, attention.q_HDC.shape[-1], q_HDE.shape[-1]).to(q_HDE.device)
    return Extended(q_HDE, k_KDE, v_KDE, attention.o_CHD.double(), moment_EE)


def _moment(second_moment: Tensor | None, hidden: int, width: int) -> Tensor:
    if second_moment is None:
        return torch.eye(width, dtype=torch.float64)
    if second_moment.shape != (hidden + 1, hidden + 1):
        raise UsageError(
            f"The statistics are {second_moment.shape[0] - 1} wide, the attention's input {hidden}.",
            "They belong to another checkpoint; collect them again from this one.",
        )
    moment_EE = second_moment[:width, :width].double()
    return moment_EE + torch.eye(width, dtype=torch.float64) * (_DAMPING * moment_EE.diagonal().mean())


def narrowed(attention: Attention, q_HDE: Tensor, k_GDE: Tensor, v_GDE: Tensor, o_CHD: Tensor) -> Attention:
    """The block with new projections, in the dtypes it had; a bias stays absent where it was."""
    hidden = attention.q_HDC.shape[-1]

    def bias(rows_XDE: Tensor, old: Tensor | None) -> Tensor | None:
        return None if old is None else rows_XDE[..., -1].to(old.dtype)

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
class Energy:
    """Second moments between the K heads of a layer, or of a group of it.

    Attributes:
        planes_FKK: κ_i C κ_jᴴ for the complex key rows of a plane.
        plane_queries_FK: w_h, the energy of the queries that read head h in a plane.
        passing_KPKP: Wk_i C Wk_jᵀ for the key rows that are not rotated.
        passing_queries_KPP: the same of the queries of head h, summed.
        values_KDKD: Wv_i C Wv_jᵀ.
        outputs_KDD: Wo_hᵀ Wo_h, summed over the query heads of head h.
    """

    planes_FKK: Tensor
    plane_queries_FK: Tensor
    passing_KPKP: Tensor
    passing_queries_KPP: Tensor
    values_KDKD: Tensor
    outputs_KDD: Tensor


def measured(layer: Extended, rows: Rows, heads: list[int]) -> Energy:
    """The energy of some KV heads of a layer and of the query heads that use them."""
    per_kv = layer.q_HDE.shape[0] // layer.k_KDE.shape[0]
    q_KQDE = layer.q_HDE.unflatten(0, (-1, per_kv))[heads]
    k_KDE, v_KDE = layer.k_KDE[heads], layer.v_KDE[heads]
    moved_k_KDE, moved_q_KQDE = k_KDE @ layer.moment_EE, q_KQDE @ layer.moment_EE
    planes_FKE = to_planes(k_KDE, rows).transpose(0, 1)
    moved_planes_FKE = to_planes(moved_k_KDE, rows).transpose(0, 1)
    query_energy_KD = (moved_q_KQDE * q_KQDE).sum((1, 3))
    passing_q_KQPE, moved_passing_q_KQPE = (rows_[:, :, rows.passing_P] for rows_ in (q_KQDE, moved_q_KQDE))
    o_KCQD = layer.o_CHD.unflatten(1, (-1, per_kv))[:, heads].transpose(0, 1)
    outputs_KND = o_KCQD.flatten(1, 2)
    return Energy(
        planes_FKK=moved_planes_FKE @ planes_FKE.mH,
        plane_queries_FK=(query_energy_KD[:, rows.first_F] + query_energy_KD[:, rows.second_F]).T,
        passing_KPKP=torch.einsum("ipe,jqe->ipjq", moved_k_KDE[:, rows.passing_P], k_KDE[:, rows.passing_P]),
        passing_queries_KPP=(moved_passing_q_KQPE @ passing_q_KQPE.mT).sum(1),
        values_KDKD=torch.einsum("ipe,jqe->ipjq", v_KDE @ layer.moment_EE, v_KDE),
        outputs_KDD=outputs_KND.mT @ outputs_KND,
    )
