"""Read text by name, as documents, for calibration, uptraining and evaluation alike.

A corpus is named ``NAME`` or ``NAME#SPLIT``:

- ``stdlib``: the standard library of this Python; splits ``train`` and ``heldout``;
- a ``.txt``, ``.jsonl``/``.json`` or ``.parquet`` file (``text`` column), or a folder of them;
- any other name is a ``datasets`` id, ``org/name`` or ``org/name:config``, its revision after ``@``.

Local JSON lines and parquet are not read through ``datasets``: it names no line of a broken file, refuses half a
surrogate pair, and reads a whole row group of parquet into memory.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from .console import warn
from .errors import DataError, UsageError
from .local_paths import expanded

TRAIN, HELDOUT = "train", "heldout"
_HELDOUT_SHARE = 10  # one module in ten
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_TEXT_SUFFIXES = {".txt", ".md", ".jsonl", ".json", ".parquet"}
# WikiText marks the title of an article as " = Title = ", its sections with more equal signs.
_WIKITEXT_TITLE = re.compile(r"^ = [^=].*[^=] = *$", re.MULTILINE)


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


def open_corpus(spec: str, default_split: str = TRAIN, columns: Columns = TEXT) -> Corpus:
    """Open a corpus by name.

    Args:
        spec: ``NAME`` or ``NAME#SPLIT``, see the top of this module.
        default_split: used if ``spec`` names none. Files have no splits and are read whole.
        columns: columns of its records. Plain text has none and is read whole.

    Raises:
        UsageError: there is no such file, split or data set, or a target column is named for plain text.
        DataError: the corpus holds no text.
    """
    name, _, split = spec.partition("#")
    if not name:
        raise UsageError(f"The corpus name {spec!r} is empty.", "Try --data stdlib, or the path of a text file.")
    path = expanded(name)
    if name == "stdlib":
        _refuse_target(name, columns)
        corpus = _open_stdlib(split or default_split)
    elif path.exists():
        if split:
            raise UsageError(
                f"{name} is a file or folder, which has no split {split!r}.",
                "Keep evaluation text in a file of its own and name that file.",
            )
        corpus = _open_files(path, columns)
    elif is_local(spec):
        raise UsageError(f"There is no text file at {name}.", "Check the path.")
    else:
        corpus = _open_dataset(name, split or default_split, columns)
    # stops at the first document with text
    if not any(document.text.strip() for document in corpus):
        raise DataError(
            f"The corpus {spec} holds no text.", "Give --data a file or data set with at least one document."
        )
    return corpus


def is_local(spec: str) -> bool:
    """Tell whether the name means text on this machine, missing or not, and not a ``datasets`` id."""
    name = spec.partition("#")[0]
    path = expanded(name)
    return name in ("", "stdlib") or path.exists() or path.suffix in _TEXT_SUFFIXES or name.startswith((".", "/", "~"))


def refuse_idle_column(corpora: Sequence[Corpus], columns: Columns) -> None:
    """Refuse a column of the text if no corpus has columns.

    Raises:
        UsageError: the column would have no effect.
    """
    if columns.text != TEXT.text and all(corpus.plain for corpus in corpora):
        raise _no_columns(" and ".join(corpus.spec for corpus in corpora))


def _refuse_target(name: str, columns: Columns) -> None:
    if columns.target is not None:
        raise _no_columns(name)


def _no_columns(name: str) -> UsageError:
    return UsageError(
        f"{name} is plain text and has no columns.",
        "Name columns of a .jsonl or .parquet file, or of a datasets id.",
    )


def _open_stdlib(split: str) -> Corpus:
    if split not in (TRAIN, HELDOUT):
        raise UsageError(f"The corpus stdlib has no split {split!r}.", f"Its splits are {TRAIN} and {HELDOUT}.")
    root = Path(sysconfig.get_paths()["stdlib"])
    modules = [path for path in _stdlib_modules(root) if _stdlib_split(path) == split]

    def read() -> Iterator[Document]:
        for module in modules:
            yield Document(module, (root / module).read_text(encoding="utf-8", errors="replace"))

    version = ".".join(map(str, sys.version_info[:3]))
    return Corpus(f"stdlib#{split}", f"CPython {version}", read, plain=True)


def _stdlib_modules(root: Path) -> list[str]:
    """List relative paths of the modules, ordered by hash so that any first part is a fair sample."""
    found = []
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        folders = relative.parts[:-1]
        # Build settings differ from one machine to the next.
        if any(part in _SKIPPED_FOLDERS or part.startswith("config-") for part in folders):
            continue
        if relative.name.startswith("_sysconfigdata"):
            continue
        found.append(relative.as_posix())
    return sorted(found, key=_path_hash)


def _path_hash(module: str) -> str:
    return hashlib.sha256(module.encode()).hexdigest()


def _stdlib_split(module: str) -> str:
    """Choose the split by the module's path alone, so that it is the same on every Python."""
    return HELDOUT if int(_path_hash(module)[-8:], 16) % _HELDOUT_SHARE == 0 else TRAIN


def _open_files(path: Path, columns: Columns) -> Corpus:
    files = [path]
    if path.is_dir():
        # sorted, because the order of a folder differs between file systems
        files = sorted(file for file in path.rglob("*") if file.suffix in _TEXT_SUFFIXES and file.is_file())
        if not files:
            raise DataError(
                f"The folder {path} holds no text file.", f"Known endings: {', '.join(sorted(_TEXT_SUFFIXES))}."
            )
    for file in files:
        if file.suffix not in _RECORDS:
            _refuse_target(str(file), columns)

    def read() -> Iterator[Document]:
        for file in files:
            yield from _read_file(file, columns)

    plain = not any(file.suffix in _RECORDS for file in files)
    return Corpus(str(path), "local file" if path.is_file() else "local folder", read, plain=plain)


def _read_file(file: Path, columns: Columns) -> Iterator[Document]:
    try:
        if file.suffix in _RECORDS:
            yield from _RECORDS[file.suffix](file, columns)
        else:
            yield from _read_plain(file)
    except (OSError, UnicodeDecodeError) as problem:
        raise DataError(f"{file} cannot be read as UTF-8 text: {problem}.", "Re-save it as UTF-8.") from problem


def _read_plain(file: Path) -> Iterator[Document]:
    """Read one document per article from a WikiText file, and any other file as one document."""
    text = file.read_text(encoding="utf-8")
    starts = [match.start() for match in _WIKITEXT_TITLE.finditer(text)]
    if not starts:
        yield Document(file.name, text)
        return
    for index, (start, end) in enumerate(zip(starts, [*starts[1:], len(text)], strict=True)):
        yield Document(f"{file.name}#{index}", text[start:end])


def _read_json_lines(file: Path, columns: Columns) -> Iterator[Document]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as problem:
                raise DataError(
                    f"Line {number} of {file} is not JSON: {problem.msg}.", "Each line must be one JSON object."
                ) from problem
            yield _document(f"{file.name}#{number}", record, columns, f"line {number} of {file}")


def _read_parquet(file: Path, columns: Columns) -> Iterator[Document]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file)
    except pyarrow.ArrowException as problem:
        raise DataError(f"{file} is not a readable parquet file: {problem}.") from problem
    number = 0
    # in small batches, since a row group may not fit into memory
    for batch in table.iter_batches(batch_size=1024):
        for record in batch.to_pylist():
            yield _document(f"{file.name}#{number}", record, columns, f"row {number} of {file}")
            number += 1


_RECORDS: dict[str, Callable[[Path, Columns], Iterator[Document]]] = {
    ".jsonl": _read_json_lines,
    ".json": _read_json_lines,
    ".parquet": _read_parquet,
}


def _document(name: str, record: Any, columns: Columns, where: str) -> Document:
    target = None if columns.target is None else _field(record, columns.target, where)
    return Document(name, _field(record, columns.text, where), target)


def _field(record: Any, column: str, where: str) -> str:
    """Read the string in a column. A column of this very name counts before one that its dots lead to."""
    found = record.get(column) if isinstance(record, dict) else None
    if found is None:
        found = record
        for part in column.split("."):
            found = found.get(part) if isinstance(found, dict) else None
    if not isinstance(found, str):
        raise DataError(f"There is no text in {where}.", f"Each record needs a field {column!r} that holds a string.")
    # half a surrogate pair is legal in JSON, but tokenizers fail on it
    return found.encode("utf-8", "replace").decode("utf-8")


def _open_dataset(name: str, split: str, columns: Columns) -> Corpus:
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
                yield _document(f"{path}#{number}", record, columns, f"record {number} of {name}")
        except OSError as problem:
            raise DataError(f"The data set {name} broke off: {problem}", "Check the network; try again.") from problem

    return Corpus(f"{name}#{split}", revision or f"datasets {datasets.__version__}, default revision", read, True)


class Encoder:
    """Turns a document into token ids as its tokenizer does, and separates it from the next one.

    The separator is EOS at the end, or BOS in front if there is no EOS. Without either, documents are joined without a
    separator, with a warning. No token is ever added to the vocabulary.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._eos, self._bos = tokenizer.eos_token_id, tokenizer.bos_token_id
        if self._eos is None and self._bos is None:
            warn("The tokenizer has neither eos nor bos; documents are packed without a separator.")

    def __call__(self, text: str) -> list[int]:
        # verbose=False: a document longer than the model's context is fine here, it will be cut into blocks
        ids = list(self._tokenizer(text, verbose=False)["input_ids"])
        if not ids:
            return ids
        if self._eos is not None:
            return ids if ids[-1] == self._eos else [*ids, self._eos]
        if self._bos is not None and ids[0] != self._bos:
            return [self._bos, *ids]
        return ids
