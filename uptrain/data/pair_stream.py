"""Make a corpus with targets an endless stream of pairs, with a position that can be saved."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

from ...corpus import Corpus
from ...errors import DataError
from ...pairs import Pair, PairEncoder
from .packed import Position, shuffled


class PairStream:
    """Endless pairs of a corpus with targets, in another order on each pass.

    Args:
        position: from :attr:`position` of an earlier stream, to continue there. The default is the beginning.

    Raises (on iteration):
        DataError: one whole pass over the corpus gives no pair.
    """

    def __init__(self, corpus: Corpus, encode: PairEncoder, *, seed: int, position: Position | None = None) -> None:
        self._corpus, self._encode, self._seed = corpus, encode, seed
        self.position = replace(position) if position else Position()
        self._open_pass()

    def _open_pass(self) -> None:
        """Begin or continue the pass of the position."""
        # a pass that is continued may have had its pairs before
        self._found = self.position.documents > 0
        documents = shuffled(iter(self._corpus), f"{self._seed}:{self.position.epoch}")
        self._pass = islice(documents, self.position.documents, None)

    def __iter__(self) -> PairStream:
        return self

    def __next__(self) -> Pair:
        while True:
            document = next(self._pass, None)
            if document is None:
                # without this check a corpus without pairs would be read for ever
                if not self._found:
                    raise DataError(f"{self._corpus.spec} has no pair of texts.", "Give columns that are not empty.")
                self.position = Position(self.position.epoch + 1)
                self._open_pass()
                continue
            self.position = replace(self.position, documents=self.position.documents + 1)
            if document.text.strip() and document.target and document.target.strip():
                self._found = True
                return self._encode(document.text, document.target)
