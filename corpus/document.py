"""A document, and the columns of a record that it is made of."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..errors import DataError, UsageError


@dataclass(frozen=True)
class Document:
    """One text that stands alone: a module, an article, a record. ``target`` is what a model is to write for it."""

    name: str
    text: str
    target: str | None = None

    def add_to(self, digest: hashlib._Hash) -> None:
        """Add name and texts to a hash."""
        for part in (self.name, self.text, *([] if self.target is None else [self.target])):
            # lone surrogates occur in real text and must not stop the hash
            encoded = part.encode("utf-8", "surrogatepass")
            # the length in front tells "ab" + "c" from "a" + "bc"
            digest.update(len(encoded).to_bytes(8, "little") + encoded)


@dataclass(frozen=True)
class Columns:
    """Fields of a record: its text, and its target if it has one. A dot leads into a field: ``translation.en``."""

    text: str = "text"
    target: str | None = None


TEXT = Columns()
"""The column ``text`` alone."""


@dataclass(frozen=True)
class Corpus:
    """Named documents, read anew on each pass.

    Attributes:
        spec: name that opens the same corpus again, with its split.
        revision: version of the text, for example ``CPython 3.11.7`` or a commit.
        read: opens a fresh iterator over the documents, always in the same order.
        streamed: the text comes over the network and may not end, so it is identified by name and revision alone.
        plain: the text has no records, so it has no columns.
    """

    spec: str
    revision: str
    read: Callable[[], Iterator[Document]]
    streamed: bool = False
    plain: bool = False

    def __iter__(self) -> Iterator[Document]:
        return self.read()

    @cached_property
    def sha256(self) -> str:
        """Hash of names and texts, in order. Reads the corpus once."""
        digest = hashlib.sha256()
        for document in self:
            document.add_to(digest)
        return digest.hexdigest()

    def describe(self) -> dict[str, str]:
        """Describe the text so that it can be found again."""
        known = {"corpus": self.spec, "revision": self.revision}
        return known if self.streamed else {**known, "sha256": self.sha256}


def make_document(name: str, record: Any, columns: Columns, where: str) -> Document:
    """Make a document of one record. A text that is null counts as empty.

    Args:
        where: the place of the record, for the message: ``line 4 of FILE``.

    Raises:
        DataError: the record has no such column, or something else than text in it.
    """
    target = None if columns.target is None else _field(record, columns.target, where)
    return Document(name, _field(record, columns.text, where), target)


def _field(record: Any, column: str, where: str) -> str:
    """Read the string in a column. A column of this very name counts before one that its dots lead to."""
    if isinstance(record, dict) and column in record:
        found = record[column]
    else:
        found = record
        for part in column.split("."):
            found = found.get(part, _ABSENT) if isinstance(found, dict) else (None if found is None else _ABSENT)
    if found is None:
        return ""  # skipped and counted like an empty text
    if not isinstance(found, str):
        there = f" Its fields are {', '.join(map(str, record))}." if isinstance(record, dict) else ""
        raise DataError(
            f"There is no text in {where}.{there}",
            f"Each record needs a field {column!r} that holds a string; --text-column names another one.",
        )
    # half a surrogate pair is legal in JSON, but tokenizers fail on it
    return found.encode("utf-8", "replace").decode("utf-8")


_ABSENT = object()


def refuse_idle_column(corpora: Sequence[Corpus], columns: Columns) -> None:
    """Refuse a column of the text if no corpus has columns.

    Raises:
        UsageError: the column would have no effect.
    """
    if columns.text != TEXT.text and all(corpus.plain for corpus in corpora):
        raise _no_columns(" and ".join(corpus.spec for corpus in corpora))


def refuse_target(name: str, columns: Columns) -> None:
    """Refuse a target column for plain text.

    Raises:
        UsageError: there are no records to take it from.
    """
    if columns.target is not None:
        raise _no_columns(name)


def _no_columns(name: str) -> UsageError:
    return UsageError(
        f"{name} is plain text and has no columns.",
        "Name columns of a file of records (.jsonl, .csv, .parquet, …), or of a datasets id.",
    )
