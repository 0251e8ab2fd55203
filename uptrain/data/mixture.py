"""Draw batches from one corpus or from a mixture of several, with a position that can be saved."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...corpus import TEXT, TRAIN, Columns, Corpus, open_corpus, refuse_idle_column
from ...errors import UsageError
from ...local_paths import expanded
from .batches import TrainingBatch
from .objective import TrainingObjective
from .packed import Position

_WEIGHTED = re.compile(r"(?P<name>.+)=(?P<weight>[0-9]+(\.[0-9]*)?)")


@dataclass(frozen=True)
class WeightedCorpus:
    """One corpus of a mixture. Its ``weight`` is its share of the items, relative to the other weights."""

    corpus: Corpus
    weight: float


def open_mixture(specs: Sequence[str], columns: Columns = TEXT) -> list[WeightedCorpus]:
    """Open corpora named ``NAME`` or ``NAME=WEIGHT``, where the default weight is 1.

    Args:
        columns: of their records.

    Raises:
        UsageError: no name, a weight of zero, the same corpus twice, or a corpus that :func:`open_corpus` refuses.
    """
    if not specs:
        raise UsageError("There is no corpus to train on.", "Name stdlib, or the path of a text file.")
    parts = []
    for spec in specs:
        name, weight = _name_and_weight(spec)
        if weight <= 0:
            raise UsageError(f"The corpus {name} has the weight {weight:g}.", "Leave it out, or give it more than 0.")
        parts.append(WeightedCorpus(open_corpus(name, TRAIN, columns), weight))
    refuse_idle_column([part.corpus for part in parts], columns)
    names = [part.corpus.spec for part in parts]
    if len(set(names)) < len(names):
        raise UsageError(f"A corpus is named twice: {', '.join(names)}.", "Name it once, with the weight of both.")
    return parts


def name_of(spec: str) -> str:
    """Drop the weight from ``NAME=WEIGHT``."""
    return _name_and_weight(spec)[0]


def _name_and_weight(spec: str) -> tuple[str, float]:
    # a file whose own name has a "=" in it is not split
    found = None if expanded(spec).exists() else _WEIGHTED.fullmatch(spec)
    return (found["name"], float(found["weight"])) if found else (spec, 1.0)


def describe_mixture(parts: Sequence[WeightedCorpus]) -> list[dict[str, Any]]:
    """Describe a mixture for the record, so that the same text can be found again."""
    return [{**part.corpus.describe(), "weight": part.weight} for part in parts]


@dataclass(frozen=True)
class MixturePosition:
    """Position of one stream of a mixture: items drawn from it, its own position, and the tokens read of it."""

    drawn: int = 0
    stream: Position | None = None
    read: int = 0

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> MixturePosition:
        """Restore a position that was saved as ``dataclasses.asdict`` gives it."""
        return cls(content["drawn"], Position(**content["stream"]), content.get("read", 0))  # older saves do not count


class Mixture:
    """Draws items from several streams in the proportion of their weights, the same on every process.

    Every next item comes from the stream that lags most behind its share, so the proportion holds in any stretch of
    the run and not only on average. Every process walks all streams and takes its own items of each step: reading text
    costs little beside a forward pass, and the batches are then the same for any number of processes.

    Args:
        objective: makes items of the text.
        positions: from :meth:`positions` of an earlier mixture, one per stream, to continue there.
    """

    def __init__(
        self,
        parts: Sequence[WeightedCorpus],
        objective: TrainingObjective,
        positions: Sequence[MixturePosition] | None = None,
    ) -> None:
        starts = positions or [MixturePosition() for _ in parts]
        self._objective = objective
        self._weights = [part.weight for part in parts]
        self._drawn = [start.drawn for start in starts]
        self._read = [start.read for start in starts]
        self._streams = [objective.stream(part.corpus, start.stream) for part, start in zip(parts, starts, strict=True)]

    def positions(self) -> list[MixturePosition]:
        streams = zip(self._drawn, self._streams, self._read, strict=True)
        return [MixturePosition(drawn, stream.position, read) for drawn, stream, read in streams]

    @property
    def read(self) -> int:
        """Real tokens read so far, of all processes: those of sequences, or of sources without their targets."""
        return sum(self._read)

    def epochs(self) -> list[int]:
        """Count the complete passes over each corpus."""
        return [stream.position.epoch for stream in self._streams]

    def __next__(self) -> Any:
        # the time at which each stream is due for its next item, if it gave items at an even pace
        due = [(drawn + 1) / weight for drawn, weight in zip(self._drawn, self._weights, strict=True)]
        chosen = due.index(min(due))
        self._drawn[chosen] += 1
        item = next(self._streams[chosen])
        self._read[chosen] += len(item[0])  # the ids of a sequence or of a source come first
        return item

    def next_batch(self, items: int, *, rank: int, processes: int) -> TrainingBatch:
        """Draw ``items`` items. Every ``processes``-th of them, counted from ``rank``, is for this process."""
        return self._objective.batch([next(self) for _ in range(items)], rank, processes)
