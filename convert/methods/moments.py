"""What the heads of one layer carry on real text: second moments of their keys, queries, values and outputs.

Every method that looks at data needs nothing else, so it works on these small matrices and not on activations.
Letters of shapes as in heads.py; besides: F rotary planes, P rows that are not rotated, E the width of the attention's
input, extended by a constant 1 where a projection has a bias (E = C or C + 1).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...errors import UnsupportedError, UsageError
from .attention import Attention, Rotary

_DAMPING = 1e-6
"""Share of the mean variance added to every input direction, so that what the text never shows is not lost."""
KEY_MEAN_SHARE = 0.5
"""How much of the mean input counts for rotated keys. What is the same in all keys shifts all scores alike and is lost
in the softmax; under a rotation that is so in slow planes and not in fast ones. Half was best of 0, ½, ¾ and 1."""


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
    """The projections of a layer in float64, biases as a last column, with the moments of their input.

    Attributes:
        moment_EE, mean_E: of what keys and values are made of.
        query_moment_EE, query_mean_E: of what queries are made of, which is the same but in cross-attention.
    """

    q_HDE: Tensor
    k_KDE: Tensor
    v_KDE: Tensor
    o_CHD: Tensor
    moment_EE: Tensor
    mean_E: Tensor
    query_moment_EE: Tensor
    query_mean_E: Tensor

    def moved(self, rows_XDE: Tensor, mean_share: float = 1.0) -> Tensor:
        """Rows of keys or values @ E[x xᵀ] of inputs whose mean counts by that share of its energy (0: covariance)."""
        return _moved(rows_XDE, self.moment_EE, self.mean_E, mean_share)

    def asked(self, rows_XDE: Tensor, mean_share: float = 1.0) -> Tensor:
        """The same for rows of queries."""
        return _moved(rows_XDE, self.query_moment_EE, self.query_mean_E, mean_share)


def _moved(rows_XDE: Tensor, moment_EE: Tensor, mean_E: Tensor, mean_share: float) -> Tensor:
    moved_XDE = rows_XDE @ moment_EE
    if mean_share == 1:
        return moved_XDE
    return moved_XDE - (1 - mean_share) * (rows_XDE @ mean_E).unsqueeze(-1) * mean_E


def extended(attention: Attention, second_moment: Tensor | None) -> Extended:
    """Widen to float64 and put biases into the matrices.

    Args:
        second_moment: E[x xᵀ], (C+1)×(C+1) with the constant as last index; None means the identity. In
            cross-attention two of them, (2, C+1, C+1): of what keys and values read, and of what queries read.

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
    width = q_HDE.shape[-1]
    read = [second_moment] if second_moment is None or second_moment.dim() == 2 else list(second_moment)
    moments = [_moment(one, attention.q_HDC.shape[-1], width) for one in read]
    return Extended(q_HDE, k_KDE, v_KDE, attention.o_CHD.double(), *moments[0], *moments[-1])


def _moment(second_moment: Tensor | None, hidden: int, width: int) -> tuple[Tensor, Tensor]:
    """(second moment, damped; mean)"""
    if second_moment is None:
        return torch.eye(width, dtype=torch.float64), torch.zeros(width, dtype=torch.float64)
    if second_moment.shape != (hidden + 1, hidden + 1):
        raise UsageError(
            f"The statistics are {second_moment.shape[0] - 1} wide, the attention's input {hidden}.",
            "They belong to another checkpoint; collect them again from this one.",
        )
    moment_EE = second_moment[:width, :width].double()
    damping_EE = torch.eye(width, dtype=torch.float64) * (_DAMPING * moment_EE.diagonal().mean())
    return moment_EE + damping_EE, second_moment[-1, :width].double()


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
        planes_FKK: κ_i C κ_jᴴ for the complex key rows of a plane; C counts the mean by ``KEY_MEAN_SHARE``.
        plane_queries_FK: w_h, the energy of the queries that read head h in a plane, each query head's times its gain.
        passing_KPKP: Wk_i C Wk_jᵀ for the key rows that are not rotated; C is the covariance.
        passing_queries_KPP: the same of the queries of head h, each times its gain, summed.
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
    o_KQCD = layer.o_CHD.unflatten(1, (-1, per_kv))[:, heads].permute(1, 2, 0, 3)
    gain_KQ = gains(layer, v_KDE, o_KQCD)
    moved_q_KQDE = layer.asked(q_KQDE) * gain_KQ[..., None, None]
    planes_FKE = to_planes(k_KDE, rows).transpose(0, 1)
    moved_planes_FKE = to_planes(layer.moved(k_KDE, KEY_MEAN_SHARE), rows).transpose(0, 1)
    query_energy_KD = (moved_q_KQDE * q_KQDE).sum((1, 3))
    passing_KPE, passing_q_KQPE = k_KDE[:, rows.passing_P], q_KQDE[:, :, rows.passing_P]
    outputs_KND = o_KQCD.flatten(1, 2)
    return Energy(
        planes_FKK=moved_planes_FKE @ planes_FKE.mH,
        plane_queries_FK=(query_energy_KD[:, rows.first_F] + query_energy_KD[:, rows.second_F]).T,
        passing_KPKP=torch.einsum("ipe,jqe->ipjq", layer.moved(passing_KPE, 0), passing_KPE),
        passing_queries_KPP=(moved_q_KQDE[:, :, rows.passing_P] @ passing_q_KQPE.mT).sum(1),
        values_KDKD=torch.einsum("ipe,jqe->ipjq", layer.moved(v_KDE), v_KDE),
        outputs_KDD=outputs_KND.mT @ outputs_KND,
    )


def gains(layer: Extended, v_KDE: Tensor, o_KQCD: Tensor) -> Tensor:
    """How much a unit of error in the scores of each query head moves the block's output: tr Wo Cov(v) Woᵀ.

    An error moves attention from one token to another, so what counts is how far values lie apart.
    """
    spread_KDD = layer.moved(v_KDE, 0) @ v_KDE.mT
    gain_KQ: Tensor = torch.einsum("kqcd,kde,kqce->kq", o_KQCD, spread_KDD, o_KQCD).clamp_min(0)
    return gain_KQ


def score_energy(layer: Extended, rows: Rows, q_XDE: Tensor, k_XDE: Tensor) -> Tensor:
    """(X,) mean square of the scores of X pairs of a query and a key head, both without their mean."""
    moved_q_XDE, moved_k_XDE = layer.asked(q_XDE, 0), layer.moved(k_XDE, 0)
    energy_q_XD, energy_k_XD = (moved_q_XDE * q_XDE).sum(-1), (moved_k_XDE * k_XDE).sum(-1)
    planes_q_XF, planes_k_XF = (
        energy_XD[:, rows.first_F] + energy_XD[:, rows.second_F] for energy_XD in (energy_q_XD, energy_k_XD)
    )
    passing = rows.passing_P
    passing_q_XPP, passing_k_XPP = (
        moved_XDE[:, passing] @ rows_XDE[:, passing].mT
        for moved_XDE, rows_XDE in ((moved_q_XDE, q_XDE), (moved_k_XDE, k_XDE))
    )
    return (planes_q_XF * planes_k_XF).sum(-1) / 2 + (passing_q_XPP * passing_k_XPP).sum((-1, -2))
