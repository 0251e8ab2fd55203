"""Save the measurements of a comparison beside its output, so that a run that was stopped can continue.

``OUT.partial`` holds one file per finished measurement, and one per process with the scores so far. It is removed once
the report is written. What the first process alone measures is sent to the others.
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


class SavedMeasurements:
    """Measurements of one comparison, on all its processes.

    Args:
        out: the comparison's output folder.
        identity: all that the numbers depend on. Measurements saved under another identity are deleted.
        accelerator: of the processes that share the work, None for a single one.

    Raises:
        UsageError: a file or folder that is not ours has the folder's name.
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
            info(f"Continuing with the measurements in {self._folder}.")
            return
        if self._folder.exists():
            info(f"{self._folder} holds measurements with other settings or models and is deleted.")
        self._work.begin()

    def once(self, name: str, measure: Callable[[], Any]) -> Any:
        """Measure on the first process unless an earlier try has done so, and return JSON values on every process."""
        return self.broadcast(self._read_or_measure(name, measure) if self._rank == 0 else None)

    def broadcast(self, value: Any) -> Any:
        """Send the first process's value to every process."""
        if self._accelerator is None:
            return value
        from accelerate.utils import broadcast_object_list

        return broadcast_object_list([value])[0]

    def _read_or_measure(self, name: str, measure: Callable[[], Any]) -> Any:
        file = self._folder / f"{name}.json"
        if file.is_file():
            return json.loads(file.read_text(encoding="utf-8"))
        value = measure()
        write_json(file, value)
        return value

    def scores(self, name: str, rows: int, tokens: int, batches: int) -> Scored:
        """Read the values (rows, tokens) scored so far by any process, and which of the batches are done."""
        values, done = np.zeros((rows, tokens), np.float32), np.zeros(batches, bool)
        if self._rank == 0:
            # of any number of processes, since an earlier try may have had more
            for file in sorted(self._folder.glob(f"{name}-*.npz")):
                with np.load(file) as found:
                    values[:, found["places"]] = found["values"]
                    done |= found["done"]
        shared: Scored = self.broadcast((values, done))
        return shared

    def save_scores(
        self, name: str, places: np.ndarray[Any, Any], values: np.ndarray[Any, Any], done: np.ndarray[Any, Any]
    ) -> None:
        """Save the ``values`` (rows, places) of the tokens ``places`` that this process has scored so far."""
        self._folder.mkdir(parents=True, exist_ok=True)  # on another host the first process did not make it
        file = self._folder / f"{name}-{self._rank}.npz"
        with writing_whole(file) as temporary:
            np.savez(temporary, places=places, values=values, done=done)

    def clear(self) -> None:
        """Delete all measurements, once the report is written."""
        if self._rank == 0:
            self._work.remove()
