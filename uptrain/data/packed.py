"""Make text an endless stream of packed sequences, the same on every process, with a position that can be saved.

Every process walks the whole stream and takes its own sequences of each step. Reading and tokenising text costs little
beside a forward pass, and in return the global batch is the same for any number of processes. So a run on two processes
follows the one on a single process, and a run can resume on another number of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import NamedTuple

from ...console import counted
from ...corpus import Corpus, Document
from ...errors import DataError

_SHUFFLE_BUFFER = 10_000  # documents
_CHUNK_TOKENS = 2**20
"""Sequences are shuffled within chunks of about this many tokens: enough to mix, and little enough to
be packed again when a run resumes."""

Encode = Callable[[str], list[int]]
"""A function from a text to its token ids."""


@dataclass
class Position:
    """Position of a stream, enough to continue it exactly.

    Text is packed in chunks whose sequences are then shuffled, so the position is the start of the current chunk and
    the number of its sequences that were drawn.

    Attributes:
        epoch: passes over the corpus that were complete at the start of the chunk.
        documents: documents of that pass that were read before the chunk.
        carry: token ids of those documents that did not fit into an earlier sequence.
        openings: places in ``carry`` at which a document begins.
        chunk: number of chunks before this one.
        drawn: sequences of this chunk that were drawn.
    """

    epoch: int = 0
    documents: int = 0
    carry: list[int] = field(default_factory=list)
    openings: list[int] = field(default_factory=list)
    chunk: int = 0
    drawn: int = 0


class PackedTokens(NamedTuple):
    """One sequence: its token ids, and the places among them at which a document begins."""

    ids: list[int]
    openings: list[int]


def shuffled(documents: Iterator[Document], seed: str) -> Iterator[Document]:
    """Shuffle through a buffer: up to 10,000 documents are shuffled fully, and for more the memory stays bounded."""
    draw = random.Random(seed)
    buffer: list[Document] = []
    for document in documents:
        if len(buffer) < _SHUFFLE_BUFFER:
            buffer.append(document)
            continue
        index = draw.randrange(_SHUFFLE_BUFFER)
        buffer[index], document = document, buffer[index]
        yield document
    draw.shuffle(buffer)
    yield from buffer


class _Packer:
    """Joins documents and cuts them into sequences. The remainder is carried over, also to the next pass."""

    def __init__(self, corpus: Corpus, encode: Encode, sequence_length: int, seed: int, start: Position) -> None:
        self._corpus, self._encode, self._sequence_length, self._seed = corpus, encode, sequence_length, seed
        self.epoch, self.documents = start.epoch, start.documents
        self._tokens, self._opened = list(start.carry), list(start.openings)
        # tokens that were cut off already. They are deleted only once per chunk, since a document may have millions
        self._taken = 0
        self._open_pass()

    @property
    def carry(self) -> list[int]:
        """Token ids that are not in a sequence yet."""
        return self._tokens[self._taken :]

    @property
    def openings(self) -> list[int]:
        """Places in ``carry`` at which a document begins."""
        return [place - self._taken for place in self._opened]

    def _open_pass(self) -> None:
        """Begin or continue the pass number ``epoch``."""
        self._cut_in_pass = 0
        self._whole_pass = self.documents == 0
        # each pass has another order, and a continued pass the same one
        documents = shuffled(iter(self._corpus), f"{self._seed}:{self.epoch}")
        self._pass = islice(documents, self.documents, None)

    def chunk(self, sequences: int) -> list[PackedTokens]:
        """Cut the next ``sequences`` sequences, or fewer if the pass ends, but at least one."""
        del self._tokens[: self._taken]
        self._opened, self._taken = self.openings, 0
        found: list[PackedTokens] = []
        while len(found) < sequences:
            if len(self._tokens) - self._taken >= self._sequence_length:
                found.append(self._cut())
            elif not self._read_document() and found:
                break
        return found

    def _cut(self) -> PackedTokens:
        """Cut one sequence off the carried tokens."""
        first, end = self._taken, self._taken + self._sequence_length
        cut = PackedTokens(self._tokens[first:end], [place - first for place in self._opened if place < end])
        self._taken = end
        self._opened = [place for place in self._opened if place >= end]
        self._cut_in_pass += 1
        return cut

    def _read_document(self) -> bool:
        """Read one document. If the pass is over, begin a new one and return False."""
        document = next(self._pass, None)
        if document is not None:
            self.documents += 1
            ids = self._encode(document.text)
            if ids:
                self._opened.append(len(self._tokens))
            self._tokens.extend(ids)
            return True
        if self._whole_pass and not self._cut_in_pass:
            raise DataError(
                f"{self._corpus.spec} gives {counted(len(self._tokens), 'token')}, fewer than one sequence of "
                f"{self._sequence_length}.",
                "Give more text, or a smaller --sequence-length.",
            )
        self.epoch, self.documents = self.epoch + 1, 0
        self._open_pass()
        return False


class SequenceStream:
    """Endless sequences of ``sequence_length`` token ids, shuffled within chunks of about a million tokens.

    Documents are shuffled and packed one after the other. The sequences of a chunk are shuffled again, because those
    of one long document would otherwise fill many steps in a row.

    Args:
        position: from :attr:`position` of an earlier stream, to continue there. The default is the beginning.

    Raises (on iteration):
        DataError: one whole pass over the corpus gives fewer tokens than one sequence.
    """

    def __init__(
        self, corpus: Corpus, encode: Encode, *, sequence_length: int, seed: int, position: Position | None = None
    ) -> None:
        self._seed = seed
        self._sequences_per_chunk = max(1, _CHUNK_TOKENS // sequence_length)
        self.position = replace(position) if position else Position()
        self._packer = _Packer(corpus, encode, sequence_length, seed, self.position)
        # packed on the first draw, so that an unused stream reads no text
        self._chunk: list[PackedTokens] = []

    def _pack_chunk(self) -> list[PackedTokens]:
        sequences = self._packer.chunk(self._sequences_per_chunk)
        random.Random(f"{self._seed}:chunk {self.position.chunk}").shuffle(sequences)
        return sequences

    def __iter__(self) -> SequenceStream:
        return self

    def __next__(self) -> PackedTokens:
        if not self._chunk:
            self._chunk = self._pack_chunk()
        if self.position.drawn == len(self._chunk):
            packer = self._packer
            self.position = Position(
                packer.epoch, packer.documents, packer.carry, packer.openings, self.position.chunk + 1
            )
            self._chunk = self._pack_chunk()
        # a new object each time: the one handed out earlier may be part of a save
        self.position = replace(self.position, drawn=self.position.drawn + 1)
        return self._chunk[self.position.drawn - 1]
