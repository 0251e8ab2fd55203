"""Read a text with models, batch by batch: shared over processes, written down as it goes, resumed where it was.

Letters of shapes: R values per token, N scored tokens.
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
from .resume import Kept
from .windows import ScoredDocument, Window

if TYPE_CHECKING:
    from accelerate import Accelerator

DEFAULT_WINDOW = 512
DEFAULT_BATCH = 8


@dataclass(frozen=True)
class Reading:
    """How a text goes through a model.

    Attributes:
        window, stride: see :func:`headfold.eval.scoring.windows.make_windows`.
        batch_size: windows in one forward pass.
        accelerator: its processes share the batches and each gets the whole result; None for a single process.
        kept: where results are written down as they come, so that a run that was stopped goes on.
    """

    window: int = DEFAULT_WINDOW
    stride: int | None = None
    batch_size: int = DEFAULT_BATCH
    accelerator: Accelerator | None = None
    kept: Kept | None = None

    def values(
        self, name: str, rows: int, documents: Sequence[ScoredDocument], compute: Callable[[AnyBatch], Tensor]
    ) -> Tensor:
        """Float32 values (R, N) for all scored tokens of the documents.

        Args:
            name: of this measurement, for ``kept``.
            rows: values per token, R.
            compute: values (R, n) for the n scored tokens of a batch.

        Raises:
            UsageError: window, stride or batch size out of range.
            DataError: no documents.
        """
        groups = group_windows(documents, self.window, self.stride, self.batch_size)
        tally = _Tally(name, rows, documents, groups, self.kept)
        left = tally.left()
        world = self.accelerator.num_processes if self.accelerator else 1
        pace = _Pace(-(-len(left) // world))
        for number, counts in self._share(left):
            batch = collate(groups[number], documents)
            found_RN = compute(batch).cpu()
            if counts:
                tally.add(number, batch.places_N, found_RN)
            if pace.due():
                tally.keep()
        if left:
            tally.keep()
        return tally.total(self.accelerator)

    def _share(self, left: Sequence[int]) -> Iterator[tuple[int, bool]]:
        """This process's batches, each with whether its result counts.

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


class _Tally:
    """Values of all scored tokens as they come in: those of an earlier try, and those that this process adds."""

    def __init__(
        self,
        name: str,
        rows: int,
        documents: Sequence[ScoredDocument],
        groups: Sequence[Sequence[Window]],
        kept: Kept | None,
    ) -> None:
        self._name, self._documents, self._groups, self._kept = name, documents, groups, kept
        total = sum(document.scored for document in documents)
        self._known_RN = torch.zeros(rows, total)
        self._done = np.zeros(len(groups), bool)
        if kept is not None:
            values, self._done = kept.scores(name, rows, total, len(groups))
            self._known_RN = torch.from_numpy(values)
        self._fresh_RN = torch.zeros_like(self._known_RN)

    def left(self) -> list[int]:
        """Numbers of the batches that nobody has scored."""
        numbers: list[int] = np.flatnonzero(~self._done).tolist()
        return numbers

    def add(self, number: int, places_N: Tensor, values_RN: Tensor) -> None:
        self._fresh_RN[:, places_N] = values_RN
        self._done[number] = True

    def keep(self) -> None:
        """Write down what this process knows."""
        if self._kept is None or not self._done.any():
            return
        offsets = offsets_of(self._documents)
        windows = [made for number in np.flatnonzero(self._done).tolist() for made in self._groups[number]]
        places = np.concatenate([places_of(made, offsets) for made in windows])
        values = (self._known_RN + self._fresh_RN).numpy()[:, places]
        self._kept.keep_scores(self._name, places, values, self._done)

    def total(self, accelerator: Accelerator | None) -> Tensor:
        """The values (R, N) of all processes."""
        fresh_RN = self._fresh_RN
        if accelerator is not None:
            # Each token was scored by one process and is zero on the others, so the sum is exact.
            fresh_RN = accelerator.reduce(fresh_RN.to(accelerator.device), reduction="sum").cpu()
        return self._known_RN + fresh_RN


class _Pace:
    """Says now and then how far a long run is, where no bar shows it, and when it is time to write results down."""

    EVERY_SECONDS = 20.0

    def __init__(self, batches: int) -> None:
        self._batches, self._done = batches, 0
        self._began = self._last = time.monotonic()

    def due(self) -> bool:
        """Count one more batch; true where enough time has passed since it was last true."""
        self._done += 1
        now = time.monotonic()
        if now - self._last < self.EVERY_SECONDS:
            return False
        self._last = now
        if not talk.is_terminal:
            left = (now - self._began) / self._done * (self._batches - self._done)
            info(f"scored {self._done} of {self._batches} batches, about {human_seconds(left)} left")
        return True
