"""Let one run at a time write an output: a second one is refused, and a dead one blocks nobody.

The lock is a hidden file beside the output, locked by the system (``flock``), which lets go when the process dies. The
file is removed at the end; what a killed run leaves is taken over by the next. It is not filelock's: that one leaves
its file behind and cannot say who holds it.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path

from .console import is_main_process, warn
from .errors import UsageError

try:
    import fcntl
except ImportError:  # a system without flock
    fcntl = None  # type: ignore[assignment]

_HELD: set[tuple[str, int, int]] = set()
"""Locks of this process: (file, process, thread). A forked process inherits the set, but not its entries' meaning."""
_TAKEN = {errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES}


@contextmanager
def only_run(out: Path) -> Iterator[None]:
    """Hold the lock of an output. A call within it, for the same output, holds it already.

    Of several processes the main one takes the lock, for all of them.

    Raises:
        UsageError: another run holds it.
    """
    # through links, so that every path to one output has one lock
    place = Path(os.path.realpath(out))
    file = place.with_name(f".{place.name}.lock")
    key = (str(file), os.getpid(), threading.get_ident())
    if not is_main_process() or key in _HELD:
        yield
        return
    made = _make_parents(file.parent)
    descriptor = _acquire(file, out)
    try:
        _HELD.add(key)
        yield
    finally:
        _HELD.discard(key)
        if descriptor is not None:
            # while it is locked: the next run must find no file, or a new one
            file.unlink(missing_ok=True)
            os.close(descriptor)
        for folder in made:  # a run that was refused leaves no folders
            with suppress(OSError):
                folder.rmdir()


def _make_parents(folder: Path) -> list[Path]:
    """Make a folder, and list those that were missing, the deepest first."""
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    with suppress(OSError):  # whoever writes the output says it better
        folder.mkdir(parents=True, exist_ok=True)
    return missing


def _acquire(file: Path, out: Path) -> int | None:
    """Open and lock the file. Return None where this place has no locks."""
    while True:
        try:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as problem:
            _warn_without_lock(out, problem)
            return None
        try:
            _lock(descriptor)
        except OSError as problem:
            holder = _describe(descriptor)
            os.close(descriptor)
            if problem.errno in _TAKEN:
                raise UsageError(
                    f"{out} is being written by another run{holder}.",
                    "Wait until it ends, or choose another output path.",
                ) from problem
            file.unlink(missing_ok=True)
            _warn_without_lock(out, problem)
            return None
        if _is_still(file, descriptor):
            _sign(descriptor)
            return descriptor
        os.close(descriptor)  # its holder removed the file in between


def _lock(descriptor: int) -> None:
    if fcntl is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _warn_without_lock(out: Path, problem: OSError) -> None:
    # a folder that cannot be written is an error of its own, and soon
    if problem.errno not in (errno.EACCES, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
        warn(f"{out} cannot be locked ({problem.strerror}): start no second run with this output.")


def _is_still(file: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(file.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _sign(descriptor: int) -> None:
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    holder = {"process": os.getpid(), "host": socket.gethostname(), "since": now}
    with suppress(OSError):  # a full disk has its own error, and the lock holds without the words
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(holder).encode(), 0)


def _describe(descriptor: int) -> str:
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
        return f" (process {holder['process']} on {holder['host']}, since {holder['since']})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""
