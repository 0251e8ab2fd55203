"""Saves that a killed run resumes from: whole, marked last, numbered, rotated."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import SafetensorError

from ..console import warn
from ..errors import HeadfoldError, UsageError
from ..working_folder import Changes, changes, describe, flush, read_json, write_json
from .data.mixture import MixturePosition
from .settings import ADJUSTABLE, FREE_ON_RESUME, UptrainSettings

# accelerate warns at every save of tied weights that it stores them once, which is what we want
logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)

_MARKER = "complete.json"
_PREFIX = "step-"
_SAVE = re.compile(_PREFIX + "([0-9]+)")  # neither one that is being written nor someone's copy of one


@dataclass(frozen=True)
class Progress:
    """How far a run has come: optimizer steps done, where each corpus stands, and the last losses without spikes.

    Attributes:
        adjusted: what was changed on the way, each time with the step: ``{"step": 9, "max_grad_norm": [1.0, 0.5]}``.
    """

    step: int
    positions: list[MixturePosition]
    losses: list[float] = field(default_factory=list)
    adjusted: list[dict[str, Any]] = field(default_factory=list)


class TrainingSaves:
    """The folder ``OUT.training`` beside the output: numbered saves, and the metrics so far.

    Args:
        identity: which checkpoint is trained on which text; a save of another run is not continued.
    """

    def __init__(self, out: Path, settings: UptrainSettings, identity: dict[str, Any]) -> None:
        self.folder = out.parent / f"{out.name}.training"
        self.metrics = self.folder / "metrics.jsonl"
        self._settings, self._identity = settings, identity

    def complete(self) -> Iterator[Path]:
        """Complete saves, newest first; a broken one is named and passed over."""
        named = {save: _SAVE.fullmatch(save.name) for save in self.folder.glob(f"{_PREFIX}*")}
        numbers = {save: int(found[1]) for save, found in named.items() if found}
        for save in sorted(numbers, key=numbers.__getitem__, reverse=True):
            if _is_complete(save):
                yield save
            else:
                warn(f"The save {save} is incomplete and is passed over.")

    def write(self, accelerator: Accelerator, progress: Progress) -> None:
        """Save model, optimizer, random state and position. Every process must call this: parts are collective."""
        final = self.folder / f"{_PREFIX}{progress.step:08d}"
        temporary = final.with_suffix(".tmp")
        if accelerator.is_main_process:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        accelerator.wait_for_everyone()
        try:
            accelerator.save_state(str(temporary))
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                identity = {**self._identity, "way of sharing weights": _sharing(accelerator)}
                _mark_complete(temporary, progress, self._settings, identity)
                shutil.rmtree(final, ignore_errors=True)
                temporary.rename(final)
        except (OSError, RuntimeError, SafetensorError) as problem:  # torch says RuntimeError for a full disk
            shutil.rmtree(temporary, ignore_errors=True)
            raise HeadfoldError(
                f"The save at step {progress.step} failed: {problem}.",
                "Free some space; the same command continues from the save before.",
            ) from problem
        if accelerator.is_main_process:
            for old in list(self.complete())[self._settings.save_total_limit :]:
                shutil.rmtree(old, ignore_errors=True)
        accelerator.wait_for_everyone()

    def load_newest(self, accelerator: Accelerator, adjusting: bool = False) -> Progress | None:
        """Restore the newest complete save; None where there is none. Every process must call this.

        Args:
            adjusting: what is ``ADJUSTABLE`` may have changed.

        Raises:
            UsageError: the save belongs to a run with other settings, of another checkpoint or on other text, or the
                processes do not see the same saves.
        """
        save = next(self.complete(), None)
        content: dict[str, Any] = read_json(save / _MARKER) if save else {"step": -1}
        steps = accelerator.gather(torch.tensor([content["step"]], device=accelerator.device)).tolist()
        if len(set(steps)) > 1:
            raise UsageError(
                f"The processes see different saves in {self.folder}: steps {steps}.",
                "Put the output on a file system that all hosts share.",
            )
        if save is None:
            return None
        changed = _changed(UptrainSettings.restored(content["settings"]), self._settings)
        _refuse_other_settings(changed, adjusting, self.folder)
        _refuse_other_sharing(content["identity"], _sharing(accelerator), self.folder)
        _refuse_other_run(content["identity"], self._identity, self.folder)
        accelerator.load_state(str(save))
        positions = [MixturePosition.from_json(one) for one in content["positions"]]
        adjusted = content.get("adjusted", []) + ([{"step": content["step"], **changed}] if changed else [])
        return Progress(content["step"], positions, content.get("losses", []), adjusted)

    def set_aside(self, accelerator: Accelerator, step: int) -> None:
        """Rename the saves of ``step`` and later, which may hold what spoilt the loss, where an older one is whole."""
        saves = list(self.complete()) if accelerator.is_main_process else []
        spoilt = [save for save in saves if int(save.name.removeprefix(_PREFIX)) >= step]
        if len(spoilt) < len(saves):
            for save in spoilt:
                save.rename(save.with_name(f"suspect-{save.name}"))
                warn(f"{save.name} may hold what spoilt the loss: it is suspect-{save.name} now, out of use.")

    def require_one(self) -> None:
        """Raise where there is nothing to go on from.

        Raises:
            UsageError: no whole save.
        """
        if not any(_is_complete(save) for save in self.folder.glob(f"{_PREFIX}*") if _SAVE.fullmatch(save.name)):
            raise UsageError(
                f"There is no run to go on with: {self.folder} holds no whole save.",
                "Begin one without --resume always, or check the output path.",
            )

    def clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def _mark_complete(save: Path, progress: Progress, settings: UptrainSettings, identity: dict[str, Any]) -> None:
    """The marker holds the size of every file, so that a truncated one is seen; it is written after them."""
    sizes = {}
    for file in sorted(path for path in save.rglob("*") if path.is_file()):
        flush(file)
        sizes[file.relative_to(save).as_posix()] = file.stat().st_size
    content: dict[str, Any] = {
        "step": progress.step,
        "positions": [position.to_json() for position in progress.positions],
        "losses": progress.losses,
        "adjusted": progress.adjusted,
        "settings": settings.model_dump(),
        "identity": identity,
        "sizes": sizes,
    }
    write_json(save / _MARKER, content)


def _is_complete(save: Path) -> bool:
    try:
        sizes = read_json(save / _MARKER)["sizes"]
        return all((save / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError):
        return False


def _refuse_other_run(saved: dict[str, Any], wanted: dict[str, Any], folder: Path) -> None:
    known = [name for name in wanted if name in saved]  # older saves do not know the teacher
    changed = changes(saved, wanted, known)
    if changed:
        raise UsageError(
            f"{folder} holds a run whose {' and '.join(changed)} had other contents than now.",
            "Bring the old files back to continue it, or throw it away with --resume never.",
        )


def _sharing(accelerator: Accelerator) -> str:
    """The form of a save hangs on it."""
    return "FSDP2" if accelerator.is_fsdp2 else "none"


def _refuse_other_sharing(saved: dict[str, Any], now: str, folder: Path) -> None:
    before = saved.get("way of sharing weights", now)  # older saves do not say
    if before != now:
        raise UsageError(
            f"{folder} holds a run whose way of sharing weights was {before} and is now {now}; saves cannot follow.",
            "Go on with the --launch of before, or throw the run away with --resume never.",
        )


def _changed(saved: UptrainSettings, wanted: UptrainSettings) -> Changes:
    """Find the settings that determine the weights and are not what they were."""
    names = [name for name in UptrainSettings.model_fields if name not in FREE_ON_RESUME]
    return changes(saved.model_dump(), wanted.model_dump(), names)


def _refuse_other_settings(changed: Changes, adjusting: bool, folder: Path) -> None:
    if not changed or (adjusting and changed.keys() <= ADJUSTABLE):
        return
    going_on = "--resume always to go on with these, " if changed.keys() <= ADJUSTABLE else ""
    raise UsageError(
        f"{folder} holds a run with other settings: {describe(changed)}.",
        f"Use the old settings to continue it, {going_on}or --resume never to throw it away.",
    )
