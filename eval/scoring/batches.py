"""Pad windows into batches, and mark the position of each scored token's logits.

Letters of shapes: B windows in a batch, T tokens in a window, N scored tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import DataError, UsageError
from .targets import TargetBatch, TargetWindow, collate_targets
from .windows import ScoredDocument, Window, make_windows


@dataclass(frozen=True)
class WindowBatch:
    """Windows of near-equal length, padded on the right.

    Attributes:
        ids_BT: token ids. Padding is id 0 on the right, where no scored token can see it.
        mask_BT: 1 on real tokens, or None when nothing is padded.
        rows_N, columns_N: position of the logits of each scored token, one before the token itself.
        targets_N: the scored token ids.
        places_N: index of each scored token among all scored tokens of the text.
    """

    ids_BT: Tensor
    mask_BT: Tensor | None
    rows_N: Tensor
    columns_N: Tensor
    targets_N: Tensor
    places_N: Tensor

    @property
    def highest(self) -> int:
        """Find the largest token id."""
        return int(self.ids_BT.max())

    def inputs(self, model: Any) -> dict[str, Tensor]:
        """Build the arguments that the model is called with."""
        return {"input_ids": self.ids_BT, **({} if self.mask_BT is None else {"attention_mask": self.mask_BT})}


AnyBatch = WindowBatch | TargetBatch


def group_windows(
    documents: Sequence[ScoredDocument], window: int, stride: int | None, batch_size: int
) -> list[list[Window]]:
    """Group windows of near-equal length into batches, which are the same for any number of processes.

    Raises:
        UsageError: window, stride or batch size out of range.
        DataError: no documents.
    """
    if batch_size < 1:
        raise UsageError(f"The batch size is {batch_size}.", "Give a batch size of at least 1.")
    if not documents:
        raise DataError("There is no document to score.", "Give text with at least two tokens.")
    windows = make_windows(documents, window, stride)
    # Longest first: little padding, and a batch that does not fit into memory fails at once instead of late.
    windows.sort(key=lambda made: made.start - made.stop)
    return [windows[first : first + batch_size] for first in range(0, len(windows), batch_size)]


def collate(windows: Sequence[Window], documents: Sequence[ScoredDocument]) -> AnyBatch:
    """Make one batch of these windows, which are either all text or all targets."""
    offsets = offsets_of(documents)
    # a text has either windows or pairs, never both
    pairs = [made for made in windows if isinstance(made, TargetWindow)]
    if pairs:
        return collate_targets(pairs, [torch.from_numpy(places_of(made, offsets)) for made in pairs])
    return _collate_text(windows, documents, offsets)


def _collate_text(
    windows: Sequence[Window], documents: Sequence[ScoredDocument], offsets: np.ndarray[Any, Any]
) -> WindowBatch:
    longest = max(made.stop - made.start for made in windows)
    ids_BT = torch.zeros(len(windows), longest, dtype=torch.long)
    mask_BT = torch.zeros_like(ids_BT)
    rows, columns, places = [], [], []
    for row, made in enumerate(windows):
        ids = made.ids(documents)
        ids_BT[row, : len(ids)] = torch.tensor(ids)
        mask_BT[row, : len(ids)] = 1
        positions = torch.arange(made.first_scored, made.stop)
        rows.append(torch.full_like(positions, row))
        columns.append(positions - made.start - 1)
        places.append(torch.from_numpy(places_of(made, offsets)))
    rows_N, columns_N = torch.cat(rows), torch.cat(columns)
    return WindowBatch(
        ids_BT,
        None if bool(mask_BT.all()) else mask_BT,
        rows_N,
        columns_N,
        ids_BT[rows_N, columns_N + 1],
        torch.cat(places),
    )


def offsets_of(documents: Sequence[ScoredDocument]) -> np.ndarray[Any, Any]:
    """Find the index of each document's first scored token among all."""
    return np.cumsum([0, *(document.scored for document in documents)])


def places_of(made: Window, offsets: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """List the indices of a window's scored tokens among all."""
    return np.arange(made.first_scored, made.stop) - 1 + int(offsets[made.document])


def split_by_document(
    values_N: np.ndarray[Any, Any], documents: Sequence[ScoredDocument]
) -> list[np.ndarray[Any, Any]]:
    """Cut values of all scored tokens into one array per document."""
    return list(np.split(values_N, offsets_of(documents)[1:-1]))
