"""Metrics of a run as JSON lines, and the same as one dense line for a person."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...console import human_seconds, info


class Metrics:
    """Appends to a ``.jsonl`` file; lines of steps that a resumed run does again are dropped first.

    Args:
        file: where the lines go; None on processes that do not write.
        step: the step from which the run goes on; zero starts the file afresh.
        track: also gets the numbers of each line, by name, and the step.
    """

    def __init__(self, file: Path | None, step: int, track: Callable[[dict[str, float], int], None]) -> None:
        self._file, self._track = file, track
        self.lines: list[dict[str, Any]] = []
        if file is None:
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        if step and file.exists():
            self.lines = [line for line in _read_whole_lines(file) if line["step"] <= step]
        file.write_text("".join(json.dumps(line) + "\n" for line in self.lines))

    @property
    def writes(self) -> bool:
        """True on the process that has the lines from before a resume."""
        return self._file is not None

    def add(self, kind: str, **values: Any) -> None:
        line = {"kind": kind, **values}
        self.lines.append(line)
        if self._file is not None:
            with self._file.open("a") as stream:
                stream.write(json.dumps(line) + "\n")
        numbers = {f"{kind}/{name}": value for name, value in values.items() if isinstance(value, int | float)}
        self._track(numbers, values["step"])


def _read_whole_lines(file: Path) -> list[dict[str, Any]]:
    """A process killed in the middle of a write leaves a last line that is no JSON."""
    lines = []
    for text in file.read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines


class Clock:
    """Tokens per second of the last interval, and the time left at the pace of the whole run."""

    def __init__(self, steps_left: int) -> None:
        self._began = self._last = time.perf_counter()
        self._steps_left = steps_left
        self._steps_done = 0

    def lap(self, steps: int, tokens: int) -> tuple[float, float]:
        """(tokens per second since the last lap, seconds left)."""
        now = time.perf_counter()
        rate = tokens / max(now - self._last, 1e-9)
        self._last = now
        self._steps_done += steps
        pace = (now - self._began) / max(self._steps_done, 1)
        return rate, pace * (self._steps_left - self._steps_done)


# What stands in the line of a person, where it is known, and how.
_SHOWN: dict[str, Callable[[float], str]] = {
    "loss": lambda value: f"loss {value:.4f}",
    "divergence": lambda value: f"KL {value:.4f}",
    "hidden": lambda value: f"hidden {value:.4f}",
    "learning_rate": lambda value: f"lr {value:.2e}",
    "gradient_norm": lambda value: f"|g| {value:.2f}",
    "tokens_per_second": lambda value: f"{value:,.0f} tok/s",
    "mfu": lambda value: f"MFU {100 * value:.0f} %",
    "recovered": lambda value: f"recovered {100 * value:.0f} %",
}


def say_progress(line: dict[str, Any], steps: int, seconds_left: float) -> None:
    """``step 120/3500 · 3 % · loss 3.214 · KL 0.31 · lr 1.9e-03 · |g| 0.61 · 6,100 tok/s · ETA 8m12s``."""
    parts = [f"step {line['step']}/{steps}", f"{100 * line['step'] / steps:.0f} %"]
    parts += [show(line[name]) for name, show in _SHOWN.items() if line.get(name) is not None]
    info(" · ".join([*parts, f"ETA {human_seconds(seconds_left)}"]))
