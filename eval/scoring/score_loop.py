"""Score a text with models, batch by batch: shared by the processes, saved as it goes, resumed where it stopped.

Letters of shapes: N scored tokens. Values are of shape (rows, N), with one row per value of a token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ...console import human_seconds, info, progress, talk
from .batches import AnyBatch, collate, group_windows, offsets_of, places_of
from .resume import SavedMeasurements
from .windows import ScoredDocument, Window

if TYPE_CHECKING:
    from accelerate import Accelerator

DEFAULT_WINDOW = 512
DEFAULT_BATCH = 8


@dataclass(frozen=True)
class ScoreLoop:
    """Runs a text through a computation, window by window.

    Attributes:
        window, stride: see :func:`headfold.eval.scoring.windows.make_windows`.
        batch_size: windows in one forward pass.
        accelerator: its processes share the batches and each gets the whole result (None for a single process).
        saved: where values are saved as they are computed, so that a run that was stopped can continue.
    """

    window: int = DEFAULT_WINDOW
    stride: int | None = None
    batch_size: int = DEFAULT_BATCH
    accelerator: Accelerator | None = None
    saved: SavedMeasurements | None = None

    def values(
        self, name: str, rows: int, documents: Sequence[ScoredDocument], compute: Callable[[AnyBatch], Tensor]
    ) -> Tensor:
        """Compute float32 values (rows, N) for all scored tokens of the documents.

        Args:
            name: of this measurement, for ``saved``.
            rows: values per token.
            compute: gives the values (rows, n) of the n scored tokens of a batch.

        Raises:
            UsageError: window, stride or batch size out of range.
            DataError: no documents.
        """
        groups = group_windows(documents, self.window, self.stride, self.batch_size)
        collected = _TokenValues(name, rows, documents, groups, self.saved)
        left = collected.left()
        world = self.accelerator.num_processes if self.accelerator else 1
        timer = _SaveTimer(-(-len(left) // world))
        for number, counts in self._share(left):
            batch = collate(groups[number], documents)
            found = compute(batch).cpu()
            if counts:
                collected.add(number, batch.places_N, found)
            if timer.due():
                collected.save()
        if left:
            collected.save()
        return collected.total(self.accelerator)

    def _share(self, left: Sequence[int]) -> Iterator[tuple[int, bool]]:
        """Give this process's batches, each with whether its result counts.

        Where they do not divide evenly, a process repeats the first batch without counting it, since sharded models
        need the same number of forward passes everywhere.
        """
        one = self.accelerator
        rank, world = (one.process_index, one.num_processes) if one else (0, 1)
        with progress("scoring", total=len(left)) as advance:
            for first in range(0, len(left), world):
                counts = first + rank < len(left)
                yield left[first + rank if counts else 0], counts
                advance(min(world, len(left) - first))


class _TokenValues:
    """Collects the values of all scored tokens: those of an earlier try, and those that this process adds."""

    def __init__(
        self,
        name: str,
        rows: int,
        documents: Sequence[ScoredDocument],
        groups: Sequence[Sequence[Window]],
        saved: SavedMeasurements | None,
    ) -> None:
        self._name, self._documents, self._groups, self._saved = name, documents, groups, saved
        total = sum(document.scored for document in documents)
        self._earlier = torch.zeros(rows, total)
        self._done = np.zeros(len(groups), bool)
        if saved is not None:
            values, self._done = saved.scores(name, rows, total, len(groups))
            self._earlier = torch.from_numpy(values)
        # apart from the earlier values, which every process has, so that adding up the processes counts them once
        self._added = torch.zeros_like(self._earlier)

    def left(self) -> list[int]:
        """List the numbers of the batches that are not scored yet."""
        numbers: list[int] = np.flatnonzero(~self._done).tolist()
        return numbers

    def add(self, number: int, places_N: Tensor, values: Tensor) -> None:
        """Add the values of one batch."""
        self._added[:, places_N] = values
        self._done[number] = True

    def save(self) -> None:
        """Save all values that this process has."""
        if self._saved is None or not self._done.any():
            return
        offsets = offsets_of(self._documents)
        windows = [made for number in np.flatnonzero(self._done).tolist() for made in self._groups[number]]
        places = np.concatenate([places_of(made, offsets) for made in windows])
        self._saved.save_scores(self._name, places, (self._earlier + self._added).numpy()[:, places], self._done)

    def total(self, accelerator: Accelerator | None) -> Tensor:
        """Put together the values of all processes."""
        added = self._added
        if accelerator is not None:
            # each token was scored by one process and is zero on the others, so the sum is exact
            added = accelerator.reduce(added.to(accelerator.device), reduction="sum").cpu()
        return self._earlier + added


class _SaveTimer:
    """Tells when to save, and then logs the progress of a long run where no bar shows it."""

    # A save is small, and a run that is killed repeats what was not saved.
    EVERY_SECONDS = 20.0

    def __init__(self, batches: int) -> None:
        self._batches, self._done = batches, 0
        self._began = self._last = time.monotonic()

    def due(self) -> bool:
        """Count one more batch, and tell whether enough time has passed since the last save."""
        self._done += 1
        now = time.monotonic()
        if now - self._last < self.EVERY_SECONDS:
            return False
        self._last = now
        if not talk.is_terminal:
            left = (now - self._began) / self._done * (self._batches - self._done)
            info(f"scored {self._done} of {self._batches} batches, about {human_seconds(left)} left")
        return True
