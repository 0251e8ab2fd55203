"""A local text file, or a folder of them, as a corpus."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from ..console import info
from ..errors import DataError, UsageError
from .document import Columns, Corpus, Document, refuse_target
from .readers import KNOWN_ENDINGS, Reader, reader_of
from .streams import kind_of

# What lies beside the text of a cloned data set and describes it.
_ABOUT = ("readme*", "license*", "licence*", "changelog*", "citation*", "contributing*", "notice*")
_METADATA = (
    "dataset_info*.json",
    "dataset_dict.json",
    "state.json",
    "*metadata.json",
    "*metadata.jsonl",
    "package.json",
)


def open_files(path: Path, columns: Columns) -> Corpus:
    """Open a file, or all text files of a folder in the order of their paths.

    Raises:
        UsageError: the ending of a file is not known, or a target column is named for plain text.
        DataError: the folder holds no text file.
    """
    files = _text_files(path) if path.is_dir() else [(path, _known_reader(path))]
    for file, reader in files:
        if not reader.records:
            refuse_target(str(file), columns)

    def read() -> Iterator[Document]:
        for file, reader in files:
            yield from reader.read(file, columns)

    plain = not any(reader.records for _, reader in files)
    return Corpus(str(path), "local file" if path.is_file() else "local folder", read, plain=plain)


def _known_reader(file: Path) -> Reader:
    found = reader_of(file)
    # a name without any ending is plain text, as Unix has it
    if found is None and not file.suffix:
        found = reader_of(file.with_name(f"{file.name}.txt"))
    if found is None:
        raise UsageError(
            f"{file} has an ending that is not known, so it could be misread.",
            f"Known endings: {KNOWN_ENDINGS}. Rename plain text to .txt.",
        )
    return found


def _text_files(folder: Path) -> list[tuple[Path, Reader]]:
    """List the text files below a folder, and say what was found and what was passed over."""
    found: list[tuple[Path, Reader]] = []
    passed: list[Path] = []
    # sorted, because the order of a folder differs between file systems
    for file in sorted(_visible(folder)):
        reader = None if _is_about(file.name) else reader_of(file)
        if reader is None:
            passed.append(file)
        else:
            found.append((file, reader))
    if any(reader.records for _, reader in found):
        # beside records, a page of Markdown describes them
        passed += [file for file, _ in found if kind_of(file) == ".md"]
        found = [(file, reader) for file, reader in found if kind_of(file) != ".md"]
    if not found:
        raise DataError(f"The folder {folder} holds no text file.", f"Known endings: {KNOWN_ENDINGS}.")
    kinds = Counter(kind_of(file) for file, _ in found)
    if passed or len(kinds) > 1:
        counted = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        named = ", ".join(sorted(file.relative_to(folder).as_posix() for file in passed)[:5])
        rest = f"; passed over: {named}{' …' if len(passed) > 5 else ''}" if passed else ""
        info(f"Text files of {folder}: {counted}{rest}.")
    return found


def _visible(folder: Path) -> Iterator[Path]:
    """Walk the files of a folder, without hidden ones (.git, .ipynb_checkpoints, …)."""
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith((".", "__"))]
        yield from (Path(place) / name for name in names if not name.startswith("."))


def _is_about(name: str) -> bool:
    lower = name.lower()
    stem = lower.split(".")[0]
    return any(fnmatch(stem, form) for form in _ABOUT) or any(fnmatch(lower, form) for form in _METADATA)
