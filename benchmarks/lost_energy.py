"""Measure from weights and second moments alone how wrong a converted attention layer is.

This is the measure that ``folded`` minimises (docs/methods.md), computed on the result of any method.
"""

from __future__ import annotations

from collections.abc import Callable

from headfold.convert.methods.attention import Attention
from headfold.convert.methods.moments import (
    KEY_MEAN_SHARE,
    AttentionWithMoments,
    RotaryRows,
    rotary_rows,
    score_error_gains,
    to_planes,
    with_moments,
)
from torch import Tensor

_Product = Callable[[AttentionWithMoments, AttentionWithMoments], Tensor]
"""Two layers → inner products of the scores or outputs of their query heads, (H,)."""


def lost_shares(before: Attention, after: Attention, second_moment: Tensor | None) -> tuple[float, float]:
    """Compute the shares of the energy of scores and of outputs that are lost.

    The error may have more energy than the source had, so a share can exceed 1.

    Args:
        before: the source's layer, its KV heads in the order in which ``after`` groups them.
        second_moment: E[x xᵀ] of the attention's input, (C+1)×(C+1), or None for the identity.
    """
    rows = rotary_rows(before.rotary, before.k_KDC.shape[1])
    old, new = with_moments(before, second_moment), with_moments(after, second_moment)
    gain_H = score_error_gains(old, old.v_KDE, _by_kv_head(old)).flatten()

    def scores(one: AttentionWithMoments, other: AttentionWithMoments) -> Tensor:
        product: Tensor = gain_H * _score_product(one, other, rows)
        return product

    return _lost(scores, old, new), _lost(_output_product, old, new)


def _lost(product: _Product, old: AttentionWithMoments, new: AttentionWithMoments) -> float:
    total = product(old, old).sum()
    # |old − new|² from inner products, so that no matrix as large as the scores is made
    lost = total - 2 * product(old, new).sum() + product(new, new).sum()
    return float(lost / total) if total > 0 else 0.0


def _by_kv_head(layer: AttentionWithMoments) -> Tensor:
    o_KQCD: Tensor = layer.o_CHD.unflatten(1, (layer.k_KDE.shape[0], -1)).permute(1, 2, 0, 3)
    return o_KQCD


def _repeated(layer: AttentionWithMoments, heads_KDE: Tensor) -> Tensor:
    return heads_KDE.repeat_interleave(layer.q_HDE.shape[0] // heads_KDE.shape[0], 0)


def _score_product(one: AttentionWithMoments, other: AttentionWithMoments, rows: RotaryRows) -> Tensor:
    """Average the product of two layers' scores, over tokens and evenly spread positions."""
    k_HDE, other_k_HDE = _repeated(one, one.k_KDE), _repeated(other, other.k_KDE)
    q_moment_HDE, k_moment_HDE = one.queries_times_moment(one.q_HDE), one.times_moment(k_HDE, KEY_MEAN_SHARE)
    queries_HF, keys_HF = (
        (to_planes(moment_HDE, rows) * to_planes(rows_HDE, rows).conj()).sum(-1)
        for moment_HDE, rows_HDE in ((q_moment_HDE, other.q_HDE), (k_moment_HDE, other_k_HDE))
    )
    passing = rows.passing_P
    queries_HPP = q_moment_HDE[:, passing] @ other.q_HDE[:, passing].mT
    keys_HPP = one.times_moment(k_HDE[:, passing], 0) @ other_k_HDE[:, passing].mT
    product: Tensor = (queries_HF.conj() * keys_HF).real.sum(-1) / 2 + (queries_HPP * keys_HPP).sum((-1, -2))
    return product


def _output_product(one: AttentionWithMoments, other: AttentionWithMoments) -> Tensor:
    """Average the product of two layers' outputs for single tokens."""
    values_HDD = one.times_moment(_repeated(one, one.v_KDE)) @ _repeated(other, other.v_KDE).mT
    outputs_HDD = one.o_CHD.permute(1, 2, 0) @ other.o_CHD.transpose(0, 1)
    product: Tensor = (values_HDD * outputs_HDD).sum((-1, -2))
    return product
