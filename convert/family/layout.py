"""The order of heads in the tensors of an attention layer on disk: along which axis, and whose heads.

Nearly every type keeps a tensor per projection. Some keep several projections in one tensor (fused), and some keep one
tensor per head (numbered). In shapes, R is the rows of one head in a tensor (D for the weight of a projection).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Spans = tuple[tuple[str, int], ...]
"""(role, heads) in the order of the axis. Roles: ``q``, ``k``, ``v``, with ``_bias``, and those in kv_parameters.py."""


def _one_after_the_other(query_heads: int, kv_heads: int) -> Spans:
    return ("q", query_heads), ("k", kv_heads), ("v", kv_heads)


def _group_by_group(query_heads: int, kv_heads: int) -> Spans:
    return (("q", query_heads // kv_heads), ("k", 1), ("v", 1)) * kv_heads


FUSED: dict[str, Callable[[int, int], Spans]] = {"q|k|v": _one_after_the_other, "grouped": _group_by_group}
"""Fused layouts: all queries, all keys, all values (``q|k|v``), or each KV head behind its queries (``grouped``)."""


@dataclass(frozen=True)
class StoredHeads:
    """Tensors on disk that together hold the heads of one role, or of several fused ones.

    Attributes:
        names: one tensor; or one for every KV head, in their order (``numbered``).
        layout: a key of :data:`FUSED`, or the one role that is stored.
        axis: the axis along which heads lie.
        suffix: ``_bias`` where a fused tensor holds the biases of its roles.
    """

    names: tuple[str, ...]
    layout: str
    axis: int = 0
    suffix: str = ""
    numbered: bool = False

    @property
    def fused(self) -> bool:
        return self.layout in FUSED

    def spans(self, query_heads: int, kv_heads: int) -> Spans:
        """List whose heads follow each other along the axis."""
        if not self.fused:
            return ((self.layout, kv_heads),)
        return tuple((role + self.suffix, heads) for role, heads in FUSED[self.layout](query_heads, kv_heads))

    def merged_shape(self, shape: tuple[int, ...], query_heads: int, kv_heads: int, groups: int) -> tuple[int, ...]:
        """Compute the shape of each tensor with ``groups`` KV heads."""
        if self.numbered:
            return shape
        before, after = (sum(heads for _, heads in self.spans(query_heads, count)) for count in (kv_heads, groups))
        return (*shape[: self.axis], shape[self.axis] // before * after, *shape[self.axis + 1 :])

    def split(self, tensors: list[Tensor], query_heads: int, kv_heads: int) -> dict[str, Tensor]:
        """Split into role → (heads, R, …), heads in the order in which queries use them.

        Args:
            tensors: the contents of ``names``.
        """
        if self.numbered:
            return {self.layout: torch.stack(tensors).unsqueeze(1)}
        spans = self.spans(query_heads, kv_heads)
        lengths = [heads for _, heads in spans]
        heads = tensors[0].movedim(self.axis, 0).unflatten(0, (sum(lengths), -1))
        pieces: dict[str, list[Tensor]] = {}
        for (role, _), piece in zip(spans, heads.split(lengths), strict=True):
            pieces.setdefault(role, []).append(piece)
        return {role: found[0] if len(found) == 1 else torch.cat(found) for role, found in pieces.items()}

    def join(self, heads: Mapping[str, Tensor], query_heads: int, groups: int) -> dict[str, Tensor]:
        """Undo :meth:`split` for a result with ``groups`` KV heads: disk name → tensor."""
        if self.numbered:
            return dict(
                zip(self.names, heads[self.layout].squeeze(1), strict=False)
            )  # names past the groups are dropped
        pieces, taken = [], dict.fromkeys(heads, 0)
        for role, count in self.spans(query_heads, groups):
            pieces.append(heads[role][taken[role] : taken[role] + count])
            taken[role] += count
        wide = pieces[0].dtype if len(pieces) == 1 else torch.promote_types(pieces[0].dtype, pieces[1].dtype)
        whole = torch.cat([piece.to(wide) for piece in pieces]).flatten(0, 1)
        return {self.names[0]: whole.movedim(0, self.axis)}
