"""Open a text file whatever it is compressed with, and in the encoding that its byte-order mark says."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

from ..errors import DataError


def _open_zstd(file: Path) -> Any:
    # imported here: it takes a moment, and few files need it
    import pyarrow

    return pyarrow.input_stream(str(file), compression="zstd")


_OPENERS: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _open_zstd,
}
COMPRESSED = tuple(_OPENERS)
"""Endings of compressed files, in small letters."""
# UTF-32 before UTF-16, whose mark it begins with.
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


def kind_of(file: Path) -> str:
    """Return the ending that says what a file holds, in small letters: ``.jsonl`` for ``A.JSONL.gz``."""
    endings = [ending.lower() for ending in file.suffixes]
    if endings and endings[-1] in COMPRESSED:
        endings.pop()
    return endings[-1] if endings else ""


@contextmanager
def open_text(file: Path, *, newline: str | None = None) -> Iterator[TextIO]:
    """Open a file to read its text. A byte-order mark decides the encoding and is no part of the text.

    Args:
        newline: as ``open`` takes it.

    Raises:
        DataError: it cannot be unpacked or decoded, or not read at all.
    """
    opener = _OPENERS.get(file.suffix.lower(), cast("Callable[[Path], Any]", lambda path: path.open("rb")))
    try:
        with opener(file) as raw:
            stream = io.BufferedReader(raw) if not hasattr(raw, "peek") else raw
            encoding = _encoding(stream)
            with io.TextIOWrapper(cast("BinaryIO", stream), encoding=encoding, newline=newline) as text:
                yield text
    except UnicodeDecodeError as problem:
        raise DataError(
            f"{file} cannot be read as {problem.encoding.upper()} text: {problem.reason}.", _SAVE
        ) from problem
    except UnicodeError as problem:
        raise DataError(f"{file} cannot be read as text: {problem}.", _SAVE) from problem
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as problem:
        raise DataError(f"{file} is damaged: {problem}.", "Fetch or pack this file again.") from problem
    except OSError as problem:
        # bz2 says "Invalid data stream" so, without a number of the system
        damaged = problem.errno is None
        said = f"is damaged: {problem}" if damaged else f"cannot be read: {problem.strerror}"
        raise DataError(f"{file} {said}.", "Fetch or pack this file again." if damaged else None) from problem


_SAVE = "Re-save it as UTF-8."


def _encoding(stream: Any) -> str:
    """Tell the encoding by the mark at the beginning; UTF-8 without one."""
    begins = stream.peek(4)[:4]
    return next((name for mark, name in _MARKS if begins.startswith(mark)), "utf-8")
