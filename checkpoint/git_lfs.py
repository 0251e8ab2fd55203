"""Recognise Git LFS pointers: a clone without `git lfs pull` holds a few lines of text in place of each large file.

https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..errors import CheckpointError

_BEGINNINGS = (b"version https://git-lfs", b"version https://hawser")  # its name before version 1
_LONGEST = 1024  # a limit of the format


def is_pointer(file: Path) -> bool:
    """Return True if the file is a pointer."""
    return file.stat().st_size < _LONGEST and file.read_bytes().startswith(_BEGINNINGS)


def pointer_error(folder: Path, files: Sequence[Path]) -> CheckpointError:
    """Make the error for pointers in a folder.

    Args:
        files: the pointers, at least one.
    """
    named = ", ".join(map(str, files[:4])) + (f" and {len(files) - 4} more" if len(files) > 4 else "")
    what = "is a Git LFS pointer, not the file itself" if len(files) == 1 else "are Git LFS pointers, not the files"
    return CheckpointError(f"{named} in {folder} {what}.", f"Run `git lfs pull` in {folder}.")
