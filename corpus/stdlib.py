"""The standard library of this Python as a corpus that every machine has."""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from ..errors import UsageError
from .document import Corpus, Document

TRAIN, HELDOUT = "train", "heldout"
_HELDOUT_SHARE = 10  # one module in ten
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def open_stdlib(split: str) -> Corpus:
    """Open one of its splits, ``train`` or ``heldout``.

    Raises:
        UsageError: there is no such split.
    """
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
