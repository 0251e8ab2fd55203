"""Read text by name, as documents, for calibration, uptraining and evaluation alike.

A corpus is named ``NAME`` or ``NAME#SPLIT``:

- ``stdlib``: the standard library of this Python; splits ``train`` and ``heldout``;
- a file of plain text (``.txt``) or of records (``.jsonl``, ``.csv``, ``.parquet``, …; column ``text``), compressed or
  not, or a folder of such files: see :mod:`.readers`;
- any other name is a ``datasets`` id, ``org/name`` or ``org/name:config``, its revision after ``@``.

Local files are not read through ``datasets``: it names no line of a broken file, refuses half a surrogate pair, and
reads a whole row group of parquet into memory.
"""

from __future__ import annotations


from ..errors import DataError, UsageError
from ..local_paths import expanded
from .dataset import open_dataset
from .document import TEXT, Columns, Corpus, Document, refuse_idle_column, refuse_target
from .encoder import Encoder, refuse_unknown_ids
from .files import open_files
from .readers import is_text_name
from .stdlib import HELDOUT, TRAIN, open_stdlib

__all__ = [
    "HELDOUT",
    "TEXT",
    "TRAIN",
    "Columns",
    "Corpus",
    "Document",
    "Encoder",
    "is_local",
    "open_corpus",
    "refuse_idle_column",
    "refuse_unknown_ids",
]


def open_corpus(spec: str, default_split: str = TRAIN, columns: Columns = TEXT) -> Corpus:
    """Open a corpus by name.

    Args:
        spec: ``NAME`` or ``NAME#SPLIT``, see the top of this module.
        default_split: used if ``spec`` names none. Files have no splits and are read whole.
        columns: columns of its records. Plain text has none and is read whole.

    Raises:
        UsageError: there is no such file, split or data set, its ending is not known, or a target column is named for
            plain text.
        DataError: the corpus holds no text.
    """
    name, split = _name_and_split(spec)
    if not name:
        raise UsageError(f"The corpus name {spec!r} is empty.", "Name stdlib, or the path of a text file.")
    path = expanded(name)
    if name == "stdlib":
        refuse_target(name, columns)
        corpus = open_stdlib(split or default_split)
    elif path.exists():
        if split:
            raise UsageError(
                f"{name} is a file or folder, which has no split {split!r}.",
                "Keep evaluation text in a file of its own and name that file.",
            )
        corpus = open_files(path, columns)
    elif is_local(spec):
        raise UsageError(f"There is no text file at {name}.", "Check the path.")
    else:
        corpus = open_dataset(name, split or default_split, columns)
    # stops at the first document with text
    if not any(document.text.strip() for document in corpus):
        raise DataError(f"The corpus {spec} holds no text.", "Name a file or data set with at least one document.")
    return corpus


def is_local(spec: str) -> bool:
    """Tell whether the name means text on this machine, missing or not, and not a ``datasets`` id."""
    name = _name_and_split(spec)[0]
    if name in ("", "stdlib") or name.startswith((".", "/", "~")):
        return True
    return expanded(name).exists() or is_text_name(name)


def _name_and_split(spec: str) -> tuple[str, str]:
    """Split ``NAME#SPLIT``. Folders of source code are called ``C#``, so a path with the sign in it comes first."""
    name, _, split = spec.rpartition("#") if "#" in spec else (spec, "", "")
    if "/" in split or expanded(spec).exists() or is_text_name(split):
        return spec, ""
    return name, split
