"""Read the documents of one file, by its ending."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TextIO

from ..errors import DataError
from .document import Columns, Document, make_document
from .streams import COMPRESSED, kind_of, open_text

# WikiText marks the title of an article as " = Title = ", its sections with more equal signs.
_WIKITEXT_TITLE = re.compile(r"^ = [^=].*[^=] = *$", re.MULTILINE)
_LONGEST_FIELD = min(sys.maxsize, 2**31 - 1)  # of a CSV file; Python's own limit is 128 KiB


@dataclass(frozen=True)
class Reader:
    """One kind of file.

    Attributes:
        records: it has columns.
        read: opens the file and gives its documents in order.
        compressed: it may be compressed as a whole.
    """

    records: bool
    read: Callable[[Path, Columns], Iterator[Document]]
    compressed: bool = True


def _read_plain(file: Path, columns: Columns) -> Iterator[Document]:
    """Read one document per article from a WikiText file, and any other file as one document."""
    with open_text(file) as stream:
        text = stream.read()
    starts = [match.start() for match in _WIKITEXT_TITLE.finditer(text)]
    if not starts:
        yield Document(file.name, text)
        return
    for index, (start, end) in enumerate(zip(starts, [*starts[1:], len(text)], strict=True)):
        yield Document(f"{file.name}#{index}", text[start:end])


def _read_json(file: Path, columns: Columns) -> Iterator[Document]:
    """Read one record a line, or one array of records, or one record over many lines."""
    with open_text(file) as stream:
        first = _first_line(stream)
        if first.lstrip().startswith("[") or not _is_json(first):
            yield from _read_whole_json(file, first + stream.read(), columns)
            return
    yield from _read_json_lines(file, columns)


def _first_line(stream: TextIO) -> str:
    return next((line for line in stream if line.strip()), "")


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _read_whole_json(file: Path, text: str, columns: Columns) -> Iterator[Document]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as problem:
        where = f" in line {problem.lineno}" if isinstance(problem, json.JSONDecodeError) else ""
        what = problem.msg if isinstance(problem, json.JSONDecodeError) else str(problem)
        raise DataError(
            f"{file} is not JSON{where}: {what}.", "Write one JSON object a line, or one array of objects."
        ) from problem
    for number, record in enumerate(content if isinstance(content, list) else [content]):
        yield make_document(f"{file.name}#{number}", record, columns, f"record {number} of {file}")


def _read_json_lines(file: Path, columns: Columns) -> Iterator[Document]:
    with open_text(file) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as problem:
                what = problem.msg if isinstance(problem, json.JSONDecodeError) else str(problem)
                raise DataError(
                    f"Line {number} of {file} is not JSON: {what}.", "Each line must be one JSON object."
                ) from problem
            yield make_document(f"{file.name}#{number}", record, columns, f"line {number} of {file}")


def _read_table(file: Path, columns: Columns, *, dialect: str) -> Iterator[Document]:
    """Read rows whose first line names the columns (RFC 4180)."""
    csv.field_size_limit(_LONGEST_FIELD)
    # newline="": line ends within quotes belong to the text
    with open_text(file, newline="") as stream:
        rows = csv.DictReader(stream, dialect=dialect, strict=True)
        try:
            for number, row in enumerate(rows):
                yield make_document(f"{file.name}#{number}", row, columns, f"line {rows.line_num} of {file}")
        except csv.Error as problem:
            raise DataError(
                f"Line {rows.reader.line_num} of {file} is not a row of a table: {problem}.",
                "Put fields with quotes, commas or line ends in double quotes.",
            ) from problem


def _read_parquet(file: Path, columns: Columns) -> Iterator[Document]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        # in small batches, since a row group may not fit into memory
        for batch in pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=1024):
            for record in batch.to_pylist():
                yield make_document(f"{file.name}#{number}", record, columns, f"row {number} of {file}")
                number += 1
    # pyarrow raises OSError and UnicodeDecodeError, too, over pages that it cannot unpack
    except (pyarrow.ArrowException, OSError, ValueError) as problem:
        said = " ".join(str(problem).split()).rstrip(".")
        raise DataError(f"{file} is damaged behind row {number}: {said}.", "Fetch this file again.") from problem


_PLAIN = Reader(records=False, read=_read_plain)
_JSON_LINES = Reader(records=True, read=_read_json_lines)
READERS: dict[str, Reader] = {
    **dict.fromkeys((".txt", ".text", ".md", ".raw", ".tokens"), _PLAIN),
    **dict.fromkeys((".jsonl", ".ndjson", ".jsonlines"), _JSON_LINES),
    ".json": Reader(records=True, read=_read_json),
    ".csv": Reader(records=True, read=partial(_read_table, dialect="excel")),
    ".tsv": Reader(records=True, read=partial(_read_table, dialect="excel-tab")),
    ".parquet": Reader(records=True, read=_read_parquet, compressed=False),
}
"""Ending, in small letters → how such a file is read."""
KNOWN_ENDINGS = f"{', '.join(READERS)}; all but .parquet also compressed ({', '.join(COMPRESSED)})"


def reader_of(file: Path) -> Reader | None:
    """Find the reader of a file by its ending; None where the ending is not known."""
    found = READERS.get(kind_of(file))
    packed = file.suffix.lower() in COMPRESSED
    return None if found is None or (packed and not found.compressed) else found


def is_text_name(name: str) -> bool:
    """Tell whether a name ends like a text file, there or not."""
    return reader_of(Path(name)) is not None
