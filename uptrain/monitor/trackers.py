"""Trackers that get the metrics besides the run's own file, by way of accelerate."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...errors import UsageError
from ..settings import UptrainSettings

_TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow", "comet_ml", "aim", "clearml", "dvclive", "swanlab")
"""Trackers that accelerate knows and that take numbers by name. Each has the name of the module that it needs."""


def chosen_trackers(wanted: Sequence[str]) -> list[str]:
    """Turn names of ``--tracker`` into names of accelerate: ``auto`` is tensorboard if installed, ``none`` is nothing.

    Raises:
        UsageError: an unknown name, a tracker that is not installed, or ``none`` together with others.
    """
    if "none" in wanted and len(wanted) > 1:
        raise UsageError("`--tracker none` and other trackers contradict each other.", "Leave one of them out.")
    chosen = []
    for name in wanted:
        if name == "none" or (name == "auto" and find_spec("tensorboard") is None):
            continue
        tracker = "tensorboard" if name == "auto" else name
        if tracker not in _TRACKERS:
            raise UsageError(f"There is no tracker {tracker!r}.", f"Known are auto, none, {', '.join(_TRACKERS)}.")
        # looked for but not imported: an import may take seconds or ask for a login
        if find_spec(tracker) is None:
            raise UsageError(f"The tracker {tracker} is not installed.", f"pip install {tracker}")
        chosen.append(tracker)
    return chosen


def logs_folder(out: Path) -> Path:
    """Name the folder of trackers that write files. It stays when the run is over."""
    return out.parent / f"{out.name}.logs"


def as_plain_values(settings: UptrainSettings) -> dict[str, Any]:
    """Turn settings into the few types that every tracker takes."""
    return {
        name: value if isinstance(value, int | float | str | bool) else str(value)
        for name, value in settings.model_dump().items()
    }
