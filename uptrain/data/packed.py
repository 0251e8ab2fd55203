"""Text as an endless stream of packed blocks, the same on every process, with a position that can be saved.

Every process walks the whole stream and takes its own blocks of each step. Reading and tokenising text costs little
beside a forward pass, and in return the global batch is the same for any number of processes, so a run on two
processes follows the one on a single process, and a run can resume on another number of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any, NamedTuple

from ...corpus import Corpus, Document
from ...errors import DataError
from ...pairs import Pair, PairEncoder

_SHUFFLE_BUFFER = 10_000  # documents
_CHUNK_TOKENS = 2**20

Encode = Callable[[str], list[int]]
"""Text to token ids."""


@dataclass
class Position:
    """Where the stream stands: enough to continue it exactly.

    Text is packed in chunks whose blocks are then shuffled, so the position is the start of the current chunk and how
    many of its blocks have left.

    Attributes:
        epoch: passes over the corpus complete at the start of the chunk.
        documents: documents of that pass consumed before the chunk.
        carry: token ids of those documents that did not fit into an earlier block.
        openings: places in ``carry`` at which a document opens.
        chunk: chunks before this one.
        drawn: blocks of this chunk that have left.
    """

    epoch: int = 0
    documents: int = 0
    carry: list[int] = field(default_factory=list)
    openings: list[int] = field(default_factory=list)
    chunk: int = 0
    drawn: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class PackedBlock(NamedTuple):
    """Token ids, and the places among them at which a document opens."""

    ids: list[int]
    openings: list[int]


def shuffled(documents: Iterator[Document], seed: str) -> Iterator[Document]:
    """Shuffle through a bounded buffer: a full shuffle below 10,000 documents, and memory stays bounded above."""
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
    """Documents one after the other, cut into blocks; the remainder is carried over, also to the next pass."""

    def __init__(self, corpus: Corpus, encode: Encode, sequence_length: int, seed: int, start: Position) -> None:
        self._corpus, self._encode, self._block, self._seed = corpus, encode, sequence_length, seed
        self.epoch, self.documents = start.epoch, start.documents
        self._tokens, self._opened = list(start.carry), list(start.openings)
        self._taken = 0  # of the tokens; they are thrown away once a chunk, since a document may have millions
        self._open_pass()

    @property
    def carry(self) -> list[int]:
        """Token ids that are in no block yet."""
        return self._tokens[self._taken :]

    @property
    def openings(self) -> list[int]:
        """Places in ``carry`` at which a document opens."""
        return [place - self._taken for place in self._opened]

    def _open_pass(self) -> None:
        """Start, or go on with, the pass number ``epoch``."""
        self._blocks_of_pass = 0
        self._whole_pass = self.documents == 0
        documents = shuffled(iter(self._corpus), f"{self._seed}:{self.epoch}")
        self._pass = islice(documents, self.documents, None)

    def chunk(self, blocks: int) -> list[PackedBlock]:
        """The next ``blocks`` blocks, or fewer when the pass ends, but at least one."""
        del self._tokens[: self._taken]
        self._opened, self._taken = self.openings, 0
        found: list[PackedBlock] = []
        while len(found) < blocks:
            if len(self._tokens) - self._taken >= self._block:
                found.append(self._cut())
            elif not self._read_document() and found:
                break
        return found

    def _cut(self) -> PackedBlock:
        """Take one block off the carried tokens."""
        first, end = self._taken, self._taken + self._block
        cut = PackedBlock(self._tokens[first:end], [place - first for place in self._opened if place < end])
        self._taken = end
        self._opened = [place for place in self._opened if place >= end]
        self._blocks_of_pass += 1
        return cut

    def _read_document(self) -> bool:
        """Take in one document; False when the pass was over and a new one has been opened."""
        document = next(self._pass, None)
        if document is not None:
            self.documents += 1
            ids = self._encode(document.text)
            if ids:
                self._opened.append(len(self._tokens))
            self._tokens.extend(ids)
            return True
        if self._whole_pass and not self._blocks_of_pass:
            raise DataError(
                f"{self._corpus.spec} gives {len(self._tokens)} tokens, fewer than one block of {self._block}.",
                "Give more text, or a smaller --sequence-length.",
            )
        self.epoch, self.documents = self.epoch + 1, 0
        self._open_pass()
        return False


class BlockStream:
    """Endless blocks of ``block`` token ids, shuffled within chunks of about a million tokens.

    Documents are shuffled, packed one after the other, and the blocks of a chunk are shuffled again, since the blocks
    of one long document would otherwise fill many steps in a row.

    Args:
        position: where to continue, from :attr:`position` of an earlier stream; the default is the beginning.

    Raises (on iteration):
        DataError: one whole pass over the corpus gives fewer tokens than one block.
    """

    def __init__(
        self, corpus: Corpus, encode: Encode, *, sequence_length: int, seed: int, position: Position | None = None
    ) -> None:
        self._seed = seed
        self._blocks_per_chunk = max(1, _CHUNK_TOKENS // sequence_length)
        self.position = replace(position) if position else Position()
        self._packer = _Packer(corpus, encode, sequence_length, seed, self.position)
        self._chunk: list[PackedBlock] = []

    def _pack_chunk(self) -> list[PackedBlock]:
        blocks = self._packer.chunk(self._blocks_per_chunk)
        random.Random(f"{self._seed}:chunk {self.position.chunk}").shuffle(blocks)
        return blocks

    def __iter__(self) -> BlockStream:
        return self

    def __next__(self) -> PackedBlock:
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


class PairStream:
    """Endless pairs of a corpus with targets, in another order on each pass.

    Args:
        position: where to continue, from :attr:`position` of an earlier stream; the default is the beginning.

    Raises (on iteration):
        DataError: one whole pass over the corpus gives no pair.
    """

    def __init__(self, corpus: Corpus, encode: PairEncoder, *, seed: int, position: Position | None = None) -> None:
        self._corpus, self._encode, self._seed = corpus, encode, seed
        self.position = replace(position) if position else Position()
        self._open_pass()

    def _open_pass(self) -> None:
        """Start, or go on with, the pass that the position is in."""
        self._found = self.position.documents > 0
        documents = shuffled(iter(self._corpus), f"{self._seed}:{self.position.epoch}")
        self._pass = islice(documents, self.position.documents, None)

    def __iter__(self) -> PairStream:
        return self

    def __next__(self) -> Pair:
        while True:
            document = next(self._pass, None)
            if document is None:
                if not self._found:
                    raise DataError(f"{self._corpus.spec} holds no pair of texts.", "Give columns that are not empty.")
                self.position = Position(self.position.epoch + 1)
                self._open_pass()
                continue
            self.position = replace(self.position, documents=self.position.documents + 1)
            if document.text.strip() and document.target and document.target.strip():
                self._found = True
                return self._encode(document.text, document.target)
