"""What a comparison has measured so far, kept beside its output so that a run that was stopped goes on.

``OUT.partial`` holds one file per finished measurement and one per process with the scores so far. It is removed once
the report stands. Where one process of several measures something, the others get it from that one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...console import info
from ...errors import UsageError
from ...working_folder import WorkingFolder, write_json, writing_whole

if TYPE_CHECKING:
    from accelerate import Accelerator

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
        self._work = WorkingFolder(out.parent / f"{out.name}.partial", identity)
        self._folder = self._work.path
        self._accelerator = accelerator
        self._rank = 0 if accelerator is None else accelerator.process_index
        if self._rank == 0:
            self._claim()
        if accelerator is not None:
            accelerator.wait_for_everyone()

    def _claim(self) -> None:
        if self._work.is_foreign:
            raise UsageError(f"{self._folder} is in the way.", "Remove it, or choose another output folder.")
        if self._work.matches():
            info(f"Going on with what {self._folder} holds.")
            return
        if self._folder.exists():
            info(f"{self._folder} was measured otherwise and is thrown away.")
        self._work.begin()

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
        write_json(file, value)
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
        with writing_whole(file) as temporary:
            np.savez(temporary, places=places, values=values, done=done)

    def clear(self) -> None:
        """The report stands; nothing of this is needed any more."""
        if self._rank == 0:
            self._work.remove()
