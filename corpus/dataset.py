"""A ``datasets`` id as a corpus, streamed."""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import DataError, UsageError
from .document import Columns, Corpus, Document, make_document
from .stdlib import HELDOUT


def open_dataset(name: str, split: str, columns: Columns) -> Corpus:
    """Stream a ``datasets`` id, whose validation split is called ``heldout`` here."""
    # imported here: it takes seconds, and only this kind of corpus needs it
    import datasets

    path, _, revision = name.partition("@")
    path, _, config = path.partition(":")
    wanted = "validation" if split == HELDOUT else split
    try:
        stream = datasets.load_dataset(path, config or None, split=wanted, revision=revision or None, streaming=True)
    except Exception as problem:  # the library raises many kinds, and each means that there is no such data set
        raise UsageError(
            f"{name!r} is neither a file nor a data set that can be opened: {type(problem).__name__}: {problem}",
            "Give the path of a text file, 'stdlib', or a datasets id like 'org/name:config#split'.",
        ) from problem

    def read() -> Iterator[Document]:
        try:
            for number, record in enumerate(stream):
                yield make_document(f"{path}#{number}", record, columns, f"record {number} of {name}")
        except OSError as problem:
            raise DataError(f"The data set {name} broke off: {problem}", "Check the network; try again.") from problem

    return Corpus(f"{name}#{split}", revision or f"datasets {datasets.__version__}, default revision", read, True)
