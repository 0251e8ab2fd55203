"""Metrics of a run as JSON lines, and the stopwatch that measures its speed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Metrics:
    """Appends lines to a ``.jsonl`` file. First it drops lines of steps that a resumed run will do again.

    Args:
        file: the file; None on processes that do not write.
        step: the step from which the run continues. Zero begins an empty file.
        track: called with the numbers of each line, by name, and the step.
    """

    def __init__(self, file: Path | None, step: int, track: Callable[[dict[str, float], int], None]) -> None:
        self._file, self._track = file, track
        self.lines: list[dict[str, Any]] = []
        if file is None:
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        if step and file.exists():
            self.lines = [line for line in _read_whole_lines(file) if line["step"] <= step]
        # rewritten without the lines that the resumed run makes again
        file.write_text("".join(json.dumps(line) + "\n" for line in self.lines))

    @property
    def writes(self) -> bool:
        """Tell whether this process writes, which alone has the lines from before a resume."""
        return self._file is not None

    def add(self, kind: str, **values: Any) -> None:
        line = {"kind": kind, **values}
        self.lines.append(line)
        if self._file is not None:
            # opened for every line, so that a killed run has lost none
            with self._file.open("a") as stream:
                stream.write(json.dumps(line) + "\n")
        # trackers draw numbers and nothing else
        numbers = {f"{kind}/{name}": value for name, value in values.items() if isinstance(value, int | float)}
        self._track(numbers, values["step"])


def _read_whole_lines(file: Path) -> list[dict[str, Any]]:
    """Read the lines up to the first broken one: a process that is killed while it writes leaves part of a line."""
    lines = []
    for text in file.read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines


class Stopwatch:
    """Measures tokens per second since the last lap, and the time left at the pace of the whole run."""

    def __init__(self, steps_left: int) -> None:
        self._began = self._last = time.perf_counter()
        self._steps_left = steps_left
        self._steps_done = 0

    def lap(self, steps: int, tokens: int) -> tuple[float, float]:
        """End a lap, and return (tokens per second in it, seconds left)."""
        now = time.perf_counter()
        # two laps may fall on the same tick of the clock
        rate = tokens / max(now - self._last, 1e-9)
        self._last = now
        self._steps_done += steps
        pace = (now - self._began) / max(self._steps_done, 1)
        return rate, pace * (self._steps_left - self._steps_done)
