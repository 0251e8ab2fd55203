"""Hash whole files, and remember the hashes, so that each version of a file is read once.

A digest guards numbers: a saved score, a statistic or an unfinished run belongs to one checkpoint. A sample of each
tensor would not do, since fine-tunes may differ in a few rows of the vocabulary.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ..console import Advance, progress
from ..errors import CheckpointError
from ..working_folder import read_json, write_json

VERSION = "sha256 of all bytes: "
"""Begins every digest. Those of older versions begin otherwise: they saw 4 KiB of each tensor."""
_CHUNK = 8 * 2**20
_THREADS = 4  # hashing lets go of Python's lock, and more threads than this outrun most disks
_YOUNG_SECONDS = 2.0
"""A file changed so lately may change again without a new time stamp, so its hash is not remembered."""


@dataclass(frozen=True)
class _Stamp:
    """What the file system says about one version of a file. ctime sees edits whose mtime was set back."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int

    @classmethod
    def of(cls, file: Path) -> _Stamp:
        found = file.stat()
        return cls(found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev)

    def is_settled(self, now: float) -> bool:
        return max(self.mtime_ns, self.ctime_ns) / 1e9 < now - _YOUNG_SECONDS


class Stopped(Exception):
    """The hash is not wanted any more."""


def combined(parts: Iterable[str]) -> str:
    """Make one digest of several parts, in their order."""
    state = hashlib.sha256()
    for part in parts:
        encoded = part.encode("utf-8", "surrogateescape")
        state.update(len(encoded).to_bytes(8, "little") + encoded)
    return VERSION + state.hexdigest()


def hash_files(
    files: Sequence[Path], description: str, *, quiet: bool = False, stop: threading.Event | None = None
) -> list[str]:
    """Compute the sha256 of every file, in hex, or look it up where the same version was hashed before.

    Args:
        description: for the progress bar, which appears where a file has to be read.
        quiet: show no bar.
        stop: set it from another thread to make this one give up.

    Raises:
        CheckpointError: a file cannot be read, or changes meanwhile.
        Stopped: ``stop`` was set.
    """
    try:
        known = {file: _remembered(file) for file in files}
        unread = [file for file in known if known[file] is None]
        total = sum(file.stat().st_size for file in unread)
        bar = nullcontext(_no_advance) if quiet or not unread else progress(description, total)
        with bar as advance, ThreadPoolExecutor(_THREADS) as threads:
            found = dict(zip(unread, threads.map(lambda file: _hash(file, advance, stop), unread), strict=True))
    except OSError as problem:
        raise CheckpointError(f"{problem.filename} cannot be read: {problem.strerror or problem}.") from problem
    return [found.get(file) or known[file] or "" for file in files]


@contextmanager
def in_background(digest: Callable[..., str]) -> Iterator[Callable[[], str]]:
    """Compute a digest in a thread while the block does something else, and yield the function that waits for it.

    A block that raises does not wait.

    Args:
        digest: takes ``quiet`` and ``stop``, as :func:`hash_files` does.
    """
    stop = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(digest, quiet=True, stop=stop)
        try:
            yield future.result
        finally:
            stop.set()


def is_comparable(digest: object) -> bool:
    """Return False for a digest of an older version of headfold, which did not see every byte."""
    return isinstance(digest, str) and digest.startswith(VERSION)


def _no_advance(amount: float = 1) -> None:
    pass


def _hash(file: Path, advance: Advance, stop: threading.Event | None) -> str:
    before, began = _Stamp.of(file), time.time()
    state = hashlib.sha256()
    with file.open("rb", buffering=0) as stream:
        while chunk := stream.read(_CHUNK):
            if stop is not None and stop.is_set():
                raise Stopped
            state.update(chunk)
            advance(len(chunk))
    if _Stamp.of(file) != before:
        raise CheckpointError(f"{file} changed while it was read.", "Run the command again when nothing writes to it.")
    if before.is_settled(began):
        _remember(file, before, state.hexdigest())
    return state.hexdigest()


def _remembered(file: Path) -> str | None:
    """Look up the hash of this very version of a file."""
    try:
        entry = read_json(_place(file))
        same = entry["stamp"] == asdict(_Stamp.of(file))
    except (OSError, ValueError, KeyError):  # never hashed, or a damaged entry
        return None
    return str(entry["sha256"]) if same else None


def _remember(file: Path, stamp: _Stamp, sha256: str) -> None:
    # A full disk or a home without write access costs the next command a hash, and nothing else.
    with suppress(OSError):
        place = _place(file)
        place.parent.mkdir(parents=True, exist_ok=True)
        write_json(place, {"file": os.fsdecode(os.path.realpath(file)), "stamp": asdict(stamp), "sha256": sha256})


def _place(file: Path) -> Path:
    """Find the entry of a file in the user's cache folder. ``HEADFOLD_CACHE`` names another folder."""
    named = os.environ.get("HEADFOLD_CACHE")
    users = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(named) if named else Path(users) / "headfold"
    return folder / "digests" / f"{hashlib.sha256(os.fsencode(os.path.realpath(file))).hexdigest()[:32]}.json"
