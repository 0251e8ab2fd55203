"""Batches drawn from one corpus or from a mixture of several, with a position that can be saved.

Letters of shapes: B blocks, T tokens of a block.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..corpus import TRAIN, Corpus, Encoder, open_corpus
from ..errors import UsageError
from .data import Block, BlockStream, Position

_WEIGHTED = re.compile(r"(?P<name>.+)=(?P<weight>[0-9]+(\.[0-9]*)?)")


@dataclass(frozen=True)
class Batch:
    """One process's blocks of one step.

    Attributes:
        ids_BT: token ids.
        opens_BT: True where a document opens.
        targets: tokens of the whole step, over all processes, that have a predecessor in their block.
        inner_openings: those of them that open a document.
    """

    ids_BT: Tensor
    opens_BT: Tensor
    targets: int
    inner_openings: int

    def split(self, blocks: int) -> Iterator[Batch]:
        """Micro-batches; what is counted stays that of the whole step."""
        for ids_MT, opens_MT in zip(self.ids_BT.split(blocks), self.opens_BT.split(blocks), strict=True):
            yield replace(self, ids_BT=ids_MT, opens_BT=opens_MT)

    def to(self, device: torch.device) -> Batch:
        return replace(self, ids_BT=self.ids_BT.to(device), opens_BT=self.opens_BT.to(device))


@dataclass(frozen=True)
class Part:
    """One corpus of a mixture; ``weight`` is its share of the blocks, relative to the others'."""

    corpus: Corpus
    weight: float


def open_mixture(specs: Sequence[str]) -> list[Part]:
    """Open ``NAME`` or ``NAME=WEIGHT``, the weight being 1 where none is given.

    Raises:
        UsageError: no name, a weight of zero, the same corpus twice, or what :func:`open_corpus` refuses.
    """
    if not specs:
        raise UsageError("There is no corpus to train on.", "Try --data stdlib, or the path of a text file.")
    parts = []
    for spec in specs:
        found = None if Path(spec).exists() else _WEIGHTED.fullmatch(spec)
        name, weight = (found["name"], float(found["weight"])) if found else (spec, 1.0)
        if weight <= 0:
            raise UsageError(f"The corpus {name} has the weight {weight:g}.", "Leave it out, or give it more than 0.")
        parts.append(Part(open_corpus(name, TRAIN), weight))
    names = [part.corpus.spec for part in parts]
    if len(set(names)) < len(names):
        raise UsageError(f"A corpus is named twice: {', '.join(names)}.", "Name it once, with the weight of both.")
    return parts


def describe(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """What a record must hold to find the same text again."""
    return [{**part.corpus.describe(), "weight": part.weight} for part in parts]


@dataclass(frozen=True)
class MixturePosition:
    """Where one stream of a mixture stands: blocks it has given, and its own position."""

    drawn: int = 0
    stream: Position | None = None

    def to_json(self) -> dict[str, Any]:
        return {"drawn": self.drawn, "stream": self.stream.to_json() if self.stream else None}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> MixturePosition:
        return cls(content["drawn"], Position(**content["stream"]))


class Mixture:
    """Blocks from several streams in the proportion of their weights, the same on every process.

    Every next block comes from the stream that lags most behind its share, so the proportion holds in any stretch of
    the run, not only in the mean. Every process walks all streams and takes its own blocks of each step: reading text
    costs little beside a forward pass, and the batches are then the same for any number of processes.

    Args:
        positions: where the streams continue, one each, from :meth:`positions` of an earlier mixture.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        encode: Encoder,
        *,
        block: int,
        seed: int,
        positions: Sequence[MixturePosition] | None = None,
    ) -> None:
        starts = positions or [MixturePosition() for _ in parts]
        self._weights = [part.weight for part in parts]
        self._drawn = [start.drawn for start in starts]
        self._streams = [
            BlockStream(part.corpus, encode, block=block, seed=seed, position=start.stream)
            for part, start in zip(parts, starts, strict=True)
        ]

    def positions(self) -> list[MixturePosition]:
        return [
            MixturePosition(drawn, stream.position) for drawn, stream in zip(self._drawn, self._streams, strict=True)
        ]

    def epochs(self) -> list[int]:
        """Complete passes over each corpus."""
        return [stream.position.epoch for stream in self._streams]

    def __next__(self) -> Block:
        owed = [(drawn + 1) / weight for drawn, weight in zip(self._drawn, self._weights, strict=True)]
        chosen = owed.index(min(owed))
        self._drawn[chosen] += 1
        return next(self._streams[chosen])

    def next_batch(self, blocks: int, *, rank: int, processes: int) -> Batch:
        """The next ``blocks`` blocks; every ``processes``-th of them, counted from ``rank``, is this process's."""
        step = [next(self) for _ in range(blocks)]
        mine = step[rank::processes]
        ids_BT = torch.tensor([block.ids for block in mine], dtype=torch.long)
        opens_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
        for row, block in enumerate(mine):
            opens_BT[row, block.openings] = True
        inner = sum(place > 0 for block in step for place in block.openings)
        return Batch(ids_BT, opens_BT, blocks * (ids_BT.shape[1] - 1), inner)
