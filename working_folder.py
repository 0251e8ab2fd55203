"""A working folder keeps unfinished work under an identity, so that a later run resumes it, refuses it or begins anew.

The identity is a dict of all that the work depends on, by names that a user knows. It lies in the folder as JSON. Each
caller decides what a difference means to its user: an error with a hint, or a fresh start.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_UNFINISHED = ".unfinished-"
Changes = dict[str, list[Any]]
"""Name → [before, now], for everything that differs between two identities."""


class WorkingFolder:
    """A folder with an identity.

    Args:
        path: need not exist.
        identity: JSON values, tuples among them.
        file: name of the file that holds the identity.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any], file: str = "identity.json") -> None:
        self.path = path
        self.identity: dict[str, Any] = json.loads(json.dumps(identity))  # as it is read back: tuples become lists
        self._file = path / file

    @property
    def is_foreign(self) -> bool:
        """True if files without an identity lie there. An empty folder is free."""
        if not self.path.exists() or self._file.is_file():
            return False
        # a run that was killed as it began may leave the unfinished identity
        return not self.path.is_dir() or any(not file.name.startswith(_UNFINISHED) for file in self.path.iterdir())

    def found(self) -> dict[str, Any] | None:
        """Read the identity that lies there, or return None.

        Raises:
            OSError, ValueError: it cannot be read.
        """
        return read_json(self._file) if self._file.is_file() else None

    def matches(self) -> bool:
        """True if the folder holds work of this very identity, and false also where the identity cannot be read."""
        try:
            return self.found() == self.identity
        except (OSError, ValueError):
            return False

    def begin(self) -> None:
        """Make the folder, with the identity and nothing else in it."""
        if self.path.exists() and any(self.path.iterdir()):
            shutil.rmtree(self.path)
        self.adopt()

    def adopt(self) -> None:
        """Give the folder this identity, and leave everything else in it as it is."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self._file, self.identity, indent=2)

    def remove(self) -> None:
        """Remove the folder, unless it is foreign. Finished work is not failed because some of it could not go."""
        if not self.is_foreign:
            shutil.rmtree(self.path, ignore_errors=True)


def changes(before: Mapping[str, Any], now: Mapping[str, Any], names: Iterable[str] | None = None) -> Changes:
    """Compare two identities.

    Args:
        names: compare only these; None means every name of either.
    """
    compared = dict.fromkeys((*now, *before)) if names is None else names
    return {name: [before.get(name), now.get(name)] for name in compared if before.get(name) != now.get(name)}


def describe(changed: Changes) -> str:
    """Tell a user what changed."""
    return ", ".join(f"{name} was {before!r} and is now {now!r}" for name, (before, now) in changed.items())


@contextmanager
def writing_whole(file: Path) -> Iterator[Path]:
    """Yield a temporary sibling to write to; it replaces ``file`` when the block ends well, and else goes away.

    The bytes are on the disk before the rename, so a crash of the machine leaves the old file or the new one.
    """
    # The process is part of the name because several may write one file; the ending stays because numpy adds its own.
    temporary = file.with_name(f"{_UNFINISHED}{os.getpid()}.{file.name}")
    try:
        yield temporary
        flush(temporary)
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(file: Path, content: Any, indent: int | None = None) -> None:
    """Write JSON whole or not at all."""
    with writing_whole(file) as temporary:
        temporary.write_text(json.dumps(content, indent=indent) + "\n", encoding="utf-8")


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        OSError, ValueError: the file cannot be read, or holds something else.
    """
    content = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError("not a JSON object")
    return content


def flush(file: Path) -> None:
    """Wait until the bytes of ``file`` are on the disk."""
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
