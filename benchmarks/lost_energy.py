"""What a conversion does to one attention block, from weights and moments alone: energy of the errors it makes.

The same measure that ``folded`` minimises (see energy.py and docs/methods.md), for any block with fewer KV heads,
whatever method made it. Letters of shapes as in heads.py; X query heads.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from .attention import Attention
from .moments import KEY_MEAN_SHARE, Extended, Rows, extended, gains, rotary_rows, to_planes

_Product = Callable[[Extended, Extended], Tensor]
"""(X,) inner products of what the query heads of two blocks do."""


def lost_shares(before: Attention, after: Attention, second_moment: Tensor | None) -> tuple[float, float]:
    """Shares of the energy of scores and of outputs that are lost; above 1 where more is wrong than was there.

    Args:
        before: the source's block, its KV heads in the order in which ``after`` groups them.
        second_moment: E[x xᵀ] of the attention's input, (C+1)×(C+1), or None for the identity.
    """
    rows = rotary_rows(before.rotary, before.k_KDC.shape[1])
    old, new = extended(before, second_moment), extended(after, second_moment)
    gain_X = gains(old, old.v_KDE, _by_kv_head(old)).flatten()

    def scores(one: Extended, other: Extended) -> Tensor:
        product: Tensor = gain_X * _score_product(one, other, rows)
        return product

    return _lost(scores, old, new), _lost(_output_product, old, new)


def _lost(product: _Product, old: Extended, new: Extended) -> float:
    total = product(old, old).sum()
    lost = total - 2 * product(old, new).sum() + product(new, new).sum()
    return float(lost / total) if total > 0 else 0.0


def _by_kv_head(layer: Extended) -> Tensor:
    o_KQCD: Tensor = layer.o_CHD.unflatten(1, (layer.k_KDE.shape[0], -1)).permute(1, 2, 0, 3)
    return o_KQCD


def _repeated(layer: Extended, heads_KDE: Tensor) -> Tensor:
    return heads_KDE.repeat_interleave(layer.q_HDE.shape[0] // heads_KDE.shape[0], 0)


def _score_product(one: Extended, other: Extended, rows: Rows) -> Tensor:
    """Mean product of two blocks' scores, over tokens and evenly spread positions."""
    k_XDE, other_k_XDE = _repeated(one, one.k_KDE), _repeated(other, other.k_KDE)
    moved_q_XDE, moved_k_XDE = one.asked(one.q_HDE), one.moved(k_XDE, KEY_MEAN_SHARE)
    queries_XF, keys_XF = (
        (to_planes(moved_XDE, rows) * to_planes(rows_XDE, rows).conj()).sum(-1)
        for moved_XDE, rows_XDE in ((moved_q_XDE, other.q_HDE), (moved_k_XDE, other_k_XDE))
    )
    passing = rows.passing_P
    queries_XPP = moved_q_XDE[:, passing] @ other.q_HDE[:, passing].mT
    keys_XPP = one.moved(k_XDE[:, passing], 0) @ other_k_XDE[:, passing].mT
    product: Tensor = (queries_XF.conj() * keys_XF).real.sum(-1) / 2 + (queries_XPP * keys_XPP).sum((-1, -2))
    return product


def _output_product(one: Extended, other: Extended) -> Tensor:
    """Mean product of two blocks' outputs of single tokens."""
    values_XDD = one.moved(_repeated(one, one.v_KDE)) @ _repeated(other, other.v_KDE).mT
    outputs_XDD = one.o_CHD.permute(1, 2, 0) @ other.o_CHD.transpose(0, 1)
    product: Tensor = (values_XDD * outputs_XDD).sum((-1, -2))
    return product
