"""Text as an endless stream of packed blocks, the same on every process, with a position that can be saved.

Every process walks the whole stream and takes its own blocks of each step. Reading and tokenising text costs little
beside a forward pass, and in return the global batch is the same for any number of processes, so a run on two
processes follows the one on a single process, and a run can resume on another number of them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ..corpus import Corpus, Document, Encoder
from ..errors import DataError

_SHUFFLE_BUFFER = 10_000  # documents
_CHUNK_TOKENS = 2**20


@dataclass
class Position:
    """Where the stream stands: enough to continue it exactly.

    Text is packed in chunks whose blocks are then shuffled, so the position is the start of the current chunk and how
    many of its blocks have left.

    Attributes:
        epoch: passes over the corpus complete at the start of the chunk.
        documents: documents of that pass consumed before the chunk.
        carry: token ids of those documents that did not fit into an earlier block.
        chunk: chunks before this one.
        drawn: blocks of this chunk that have left.
    """

    epoch: int = 0
    documents: int = 0
    carry: list[int] = field(default_factory=list)
    chunk: int = 0
    drawn: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


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

    def __init__(self, corpus: Corpus, encode: Encoder, block: int, seed: int, start: Position) -> None:
        self._corpus, self._encode, self._block, self._seed = corpus, encode, block, seed
        self.epoch, self.documents, self.carry = start.epoch, start.documents, list(start.carry)
        self._open_pass()

    def _open_pass(self) -> None:
        """Start, or go on with, the pass number ``epoch``."""
        self._blocks_of_pass = 0
        self._whole_pass = self.documents == 0
        documents = shuffled(iter(self._corpus), f"{self._seed}:{self.epoch}")
        self._pass = islice(documents, self.documents, None)

    def chunk(self, blocks: int) -> list[list[int]]:
        """The next ``blocks`` blocks, or fewer when the pass ends, but at least one."""
        found: list[list[int]] = []
        while len(found) < blocks:
            if len(self.carry) >= self._block:
                found.append(self.carry[: self._block])
                self.carry = self.carry[self._block :]
                self._blocks_of_pass += 1
            elif not self._read_document() and found:
                break
        return found

    def _read_document(self) -> bool:
        """Take in one document; False when the pass was over and a new one has been opened."""
        document = next(self._pass, None)
        if document is not None:
            self.documents += 1
            self.carry.extend(self._encode(document.text))
            return True
        if self._whole_pass and not self._blocks_of_pass:
            raise DataError(
                f"{self._corpus.spec} gives {len(self.carry)} tokens, fewer than one block of {self._block}.",
                "Give more text, or a smaller --block.",
            )
        self.epoch, self.documents = self.epoch + 1, 0
        self._open_pass()
        return False


class BlockStream:
    """Endless blocks of ``block`` token ids, shuffled within chunks of about a million tokens.

    Documents are shuffled, packed one after the other, and the blocks of a chunk are shuffled again, since the blocks
    of one long document would otherwise fill many steps in a row. Tokens attend across document boundaries inside a
    block, as in the pretraining of the models this is for.

    Args:
        position: where to continue, from :attr:`position` of an earlier stream; the default is the beginning.

    Raises (on iteration):
        DataError: one whole pass over the corpus gives fewer tokens than one block.
    """

    def __init__(
        self, corpus: Corpus, encode: Encoder, *, block: int, seed: int, position: Position | None = None
    ) -> None:
        self._seed = seed
        self._blocks_per_chunk = max(1, _CHUNK_TOKENS // block)
        self.position = replace(position) if position else Position()
        self._packer = _Packer(corpus, encode, block, seed, self.position)
        self._chunk: list[list[int]] = []

    def _pack_chunk(self) -> list[list[int]]:
        blocks = self._packer.chunk(self._blocks_per_chunk)
        random.Random(f"{self._seed}:chunk {self.position.chunk}").shuffle(blocks)
        return blocks

    def __iter__(self) -> BlockStream:
        return self

    def __next__(self) -> list[int]:
        if not self._chunk:
            self._chunk = self._pack_chunk()
        if self.position.drawn == len(self._chunk):
            packer = self._packer
            self.position = Position(packer.epoch, packer.documents, list(packer.carry), self.position.chunk + 1)
            self._chunk = self._pack_chunk()
        # a new object each time: the one handed out earlier may be part of a save
        self.position = replace(self.position, drawn=self.position.drawn + 1)
        return self._chunk[self.position.drawn - 1]

    def next_batch(self, blocks: int, *, rank: int, processes: int) -> Tensor:
        """The next ``blocks`` blocks of the stream; every ``processes``-th of them, counted from ``rank``.

        Returns:
            int64 tensor of shape (blocks / processes, block).
        """
        mine = [block for index, block in enumerate(next(self) for _ in range(blocks)) if index % processes == rank]
        return torch.tensor(mine, dtype=torch.long)
