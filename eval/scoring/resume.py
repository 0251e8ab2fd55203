"""What a comparison has measured so far, kept beside its output so that a run that was stopped goes on.

``OUT.partial`` holds one file per finished measurement and one per process with the scores so far. It is removed once
the report stands. Where one process of several measures something, the others get it from that one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...console import info
from ...errors import UsageError

if TYPE_CHECKING:
    from accelerate import Accelerator

_IDENTITY = "identity.json"
Scored = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


class Kept:
    """Measurements of one comparison, on all its processes.

    Args:
        out: the comparison's output folder.
        identity: all that the numbers depend on; what was measured under another identity is thrown away.
        accelerator: of the processes that share the work, None for a single one.

    Raises:
        UsageError: the folder's place is taken by something else.
    """

    def __init__(self, out: Path, identity: dict[str, Any], accelerator: Accelerator | None = None) -> None:
        self._folder = out.parent / f"{out.name}.partial"
        self._accelerator = accelerator
        self._rank = 0 if accelerator is None else accelerator.process_index
        if self._rank == 0:
            self._claim(identity)
        if accelerator is not None:
            accelerator.wait_for_everyone()

    def _claim(self, identity: dict[str, Any]) -> None:
        file = self._folder / _IDENTITY
        if self._folder.exists() and not file.is_file():
            raise UsageError(f"{self._folder} is in the way.", "Remove it, or choose another output folder.")
        if file.is_file():
            if file.read_text(encoding="utf-8") == json.dumps(identity):
                info(f"Going on with what {self._folder} holds.")
                return
            info(f"{self._folder} was measured otherwise and is thrown away.")
            shutil.rmtree(self._folder)
        self._folder.mkdir(parents=True)
        file.write_text(json.dumps(identity), encoding="utf-8")

    def once(self, name: str, measure: Callable[[], Any]) -> Any:
        """What ``measure`` gives (JSON values only), from the first process, measured once over all tries."""
        found = [self._read_or_measure(name, measure) if self._rank == 0 else None]
        return self.shared(found[0])

    def shared(self, value: Any) -> Any:
        """The first process's value, on every process."""
        if self._accelerator is None:
            return value
        from accelerate.utils import broadcast_object_list

        return broadcast_object_list([value])[0]

    def holds(self, name: str) -> bool:
        """The measurement of this name is there already."""
        return bool(self.shared((self._folder / f"{name}.json").is_file()))

    def _read_or_measure(self, name: str, measure: Callable[[], Any]) -> Any:
        file = self._folder / f"{name}.json"
        if file.is_file():
            return json.loads(file.read_text(encoding="utf-8"))
        value = measure()
        _replace(file, lambda made: made.write_text(json.dumps(value), encoding="utf-8"))
        return value

    def scores(self, name: str, rows: int, tokens: int, batches: int) -> Scored:
        """Values (rows, tokens) scored so far by any process, and which of the batches are done."""
        values, done = np.zeros((rows, tokens), np.float32), np.zeros(batches, bool)
        if self._rank == 0:
            for file in sorted(self._folder.glob(f"{name}-*.npz")):
                with np.load(file) as found:
                    mine = found["places"]
                    values[:, mine] = found["values"]
                    done |= found["done"]
        shared: Scored = self.shared((values, done))
        return shared

    def keep_scores(
        self, name: str, places: np.ndarray[Any, Any], values: np.ndarray[Any, Any], done: np.ndarray[Any, Any]
    ) -> None:
        """Write down what is scored so far: ``values`` (rows, places) of the scored tokens ``places``."""
        self._folder.mkdir(parents=True, exist_ok=True)  # on another host
        file = self._folder / f"{name}-{self._rank}.npz"
        _replace(file, lambda made: np.savez(made, places=places, values=values, done=done))

    def clear(self) -> None:
        """The report stands; nothing of this is needed any more."""
        if self._rank == 0:
            shutil.rmtree(self._folder, ignore_errors=True)


def _replace(file: Path, write: Callable[[Path], Any]) -> None:
    """Write a file whole or not at all."""
    half_written = file.with_name(f".{file.name}")
    write(half_written)
    half_written.replace(file)
