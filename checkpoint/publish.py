"""Make an output folder appear whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path

from safetensors import SafetensorError

from ..errors import HeadfoldError, UsageError
from ..output_lock import only_run
from ..working_folder import flush

_UNFINISHED, _REPLACED = ".unfinished-", ".replaced-"


def refuse_occupied(out: Path, overwrite: bool) -> None:
    """Refuse an output path that cannot become the result.

    Raises:
        UsageError: ``out`` holds something and ``overwrite`` is false. Or it is a file or link, which is never
            replaced, or the working folder or a mount point, which cannot be. Or its path is not UTF-8.
    """
    try:
        str(out).encode("utf-8")
    except UnicodeEncodeError as problem:  # safetensors opens no such file
        raise UsageError(f"The path of the output {out} is not UTF-8.", "Choose another output path.") from problem
    if out.resolve() in (Path.cwd(), *Path.cwd().parents) or out.is_mount():
        raise UsageError(f"The output {out} is a folder that cannot be replaced.", "Name a folder inside it.")
    if not out.exists() and not out.is_symlink():
        return
    if out.is_symlink() or not out.is_dir():
        raise UsageError(f"The output {out} exists and is not a folder.", "Choose another path for the output.")
    if any(out.iterdir()) and not overwrite:
        raise UsageError(
            f"The output folder {out} exists and is not empty.",
            "Choose another path, remove the folder, or pass --overwrite to replace it.",
        )


def refuse_overlap(source: Path, out: Path) -> None:
    """Refuse an output that is the source, lies inside it or contains it.

    Raises:
        UsageError: the two overlap.
    """
    here, there = source.resolve(), out.resolve()
    if here == there or here in there.parents or there in here.parents:
        raise UsageError(f"The output {out} and the source {source} overlap.", "Choose an output path elsewhere.")


@contextmanager
def claiming(out: Path, *, overwrite: bool = False) -> Iterator[None]:
    """Hold an output for one run, from before its work begins until it is published.

    Raises:
        UsageError: ``out`` is in the way, see :func:`refuse_occupied`, or another run holds it.
    """
    refuse_occupied(out, overwrite)
    with only_run(out):
        refuse_occupied(out, overwrite)  # the run that held it may just have ended
        yield


@contextmanager
def publishing(out: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary sibling of ``out`` to write to, and rename it to ``out`` when the block ends well.

    A sibling is on the same file system, so the rename is one atomic step. If the block raises, the temporary folder
    is removed. If the process is killed, the folder stays behind under a name that looks unfinished, and the next call
    for the same ``out`` removes it.

    Raises:
        UsageError: ``out`` is in the way, see :func:`refuse_occupied`, or another run holds it.
        HeadfoldError: the disk is full or not writable.
    """
    with claiming(out, overwrite=overwrite), _unfinished(out) as folder:
        yield folder


@contextmanager
def _unfinished(out: Path) -> Iterator[Path]:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        remove_siblings(out, _UNFINISHED)
        folder = Path(tempfile.mkdtemp(prefix=f".{out.name}{_UNFINISHED}", dir=out.parent))
        folder.chmod(0o777 & ~_umask())
    except OSError as problem:
        raise HeadfoldError(
            f"{out} cannot be written: {problem.strerror}.", "Check the path and its permissions."
        ) from problem
    try:
        yield folder
        _swap_in(folder, out)
    except (OSError, SafetensorError) as problem:
        raise HeadfoldError(
            f"Writing {out} failed: {getattr(problem, 'strerror', None) or problem}.",
            "Nothing was left behind; free some space and run it again.",
        ) from problem
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _swap_in(folder: Path, out: Path) -> None:
    """Rename ``folder`` to ``out``. An old ``out`` is renamed first, and removed only after that."""
    for file in folder.rglob("*"):
        if file.is_file():
            # some writers make private files, which others who may read the folder could not read
            file.chmod(file.stat().st_mode | 0o444 & ~_umask())
            flush(file)
    # POSIX renames onto an empty folder only, so an old result must go aside first.
    if not out.exists():
        folder.rename(out)
        remove_siblings(out, _REPLACED)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{out.name}{_REPLACED}", dir=out.parent))
    try:
        out.rename(old / out.name)
    except OSError:
        old.rmdir()
        raise
    try:
        folder.rename(out)
    except OSError:
        # Put the old result back, so that a failure changes nothing.
        (old / out.name).rename(out)
        raise
    remove_siblings(out, _REPLACED)  # also what a killed run left


def remove_siblings(out: Path, kind: str) -> None:
    """Remove the hidden folders beside ``out`` that are named after it and ``kind``."""
    for found in out.parent.glob(f".{escape(out.name)}{kind}*"):
        shutil.rmtree(found, ignore_errors=True)


def _umask() -> int:
    """Read the user's umask: mkdtemp makes private folders, and the published one gets the usual permissions."""
    current = os.umask(0)  # the only way to read it is to set it
    os.umask(current)
    return current
