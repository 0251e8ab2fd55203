"""Saves that a killed run resumes from. Each is numbered, marked as complete last, and removed when it is old."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import SafetensorError

from ..console import warn
from ..errors import HeadfoldError, UsageError
from ..libraries.accelerate_internals import quiet_about_tied_weights
from ..working_folder import Changes, changes, describe, flush, read_json, write_json
from .data.mixture import MixturePosition
from .settings import ADJUSTABLE, FREE_ON_RESUME, UptrainSettings

quiet_about_tied_weights()

_MARKER = "complete.json"
_PREFIX = "step-"
_SAVE = re.compile(_PREFIX + "([0-9]+)")  # this leaves out a save that is being written, and a user's copy of one
_RENAMED = {
    "block": "sequence_length",
    "clip": "max_grad_norm",
    "keep": "save_total_limit",
    "source_column": "text_column",
}
"""Settings by their names in saves of version 0.1.0 and before → their names now."""


@dataclass(frozen=True)
class Progress:
    """Progress of a run.

    Attributes:
        step: number of optimizer steps done.
        positions: in the text, one per corpus.
        losses: the last ones that were not spikes.
        adjusted: settings that were changed on the way, each time with the step:
            ``{"step": 9, "max_grad_norm": [1.0, 0.5]}``.
    """

    step: int
    positions: list[MixturePosition]
    losses: list[float] = field(default_factory=list)
    adjusted: list[dict[str, Any]] = field(default_factory=list)


class TrainingSaves:
    """The folder ``OUT.training`` beside the output, with numbered saves and the metrics so far.

    Args:
        identity: of checkpoint, text and teacher. A run with another identity does not continue the saves.
    """

    def __init__(self, out: Path, settings: UptrainSettings, identity: dict[str, Any]) -> None:
        self.folder = out.parent / f"{out.name}.training"
        self.metrics = self.folder / "metrics.jsonl"
        self._settings, self._identity = settings, identity

    def complete(self) -> Iterator[Path]:
        """Find complete saves, newest first, and warn about each broken one."""
        named = {save: _SAVE.fullmatch(save.name) for save in self.folder.glob(f"{_PREFIX}*")}
        numbers = {save: int(found[1]) for save, found in named.items() if found}
        for save in sorted(numbers, key=numbers.__getitem__, reverse=True):
            if _is_complete(save):
                yield save
            else:
                warn(f"The save {save} is incomplete and is not used.")

    def write(self, accelerator: Accelerator, progress: Progress) -> None:
        """Save model, optimizer, random state and position. Every process must call this."""
        final = self.folder / f"{_PREFIX}{progress.step:08d}"
        # another name until it is whole, so that a crash leaves no save that looks complete
        temporary = final.with_suffix(".tmp")
        if accelerator.is_main_process:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        accelerator.wait_for_everyone()
        try:
            accelerator.save_state(str(temporary))
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                identity = {**self._identity, _SHARING: _sharing(accelerator)}
                _mark_complete(temporary, progress, self._settings, identity)
                shutil.rmtree(final, ignore_errors=True)
                temporary.rename(final)
        except (OSError, RuntimeError, SafetensorError) as problem:  # torch raises RuntimeError if a disk is full
            shutil.rmtree(temporary, ignore_errors=True)
            raise HeadfoldError(
                f"The save at step {progress.step} failed: {problem}.",
                "Free some space; the same command continues from the save before.",
            ) from problem
        if accelerator.is_main_process:
            # only now: the older saves are the way back if writing fails
            for old in list(self.complete())[self._settings.save_total_limit :]:
                shutil.rmtree(old, ignore_errors=True)
        accelerator.wait_for_everyone()

    def load_newest(self, accelerator: Accelerator, adjusting: bool = False) -> Progress | None:
        """Restore the newest complete save. Every process must call this.

        Args:
            adjusting: settings that are ``ADJUSTABLE`` may have changed.

        Returns:
            None if there is no save.

        Raises:
            UsageError: the save is of a run with other settings, checkpoint or text, or the processes do not see the
                same saves.
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
        changed = _changed(_with_new_names(content["settings"]), self._settings)
        _refuse_other_settings(changed, adjusting, self.folder)
        _refuse_other_sharing(content["identity"], _sharing(accelerator), self.folder)
        _refuse_other_run(content["identity"], self._identity, self.folder)
        accelerator.load_state(str(save))
        positions = [MixturePosition.from_json(one) for one in content["positions"]]
        adjusted = [_with_new_names(one) for one in content.get("adjusted", [])]
        if changed:
            adjusted.append({"step": content["step"], **changed})
        return Progress(content["step"], positions, content.get("losses", []), adjusted)

    def set_aside(self, accelerator: Accelerator, step: int) -> None:
        """Rename the saves of ``step`` and later, whose weights may have spoilt the loss, if there is an older save."""
        saves = list(self.complete()) if accelerator.is_main_process else []
        suspects = [save for save in saves if int(save.name.removeprefix(_PREFIX)) >= step]
        if len(suspects) < len(saves):
            for save in suspects:
                save.rename(save.with_name(f"suspect-{save.name}"))
                warn(f"The weights of {save.name} may have spoilt the loss. It is set aside as suspect-{save.name}.")

    def require_one(self) -> None:
        """Check that there is a run to continue.

        Raises:
            UsageError: there is no complete save.
        """
        if not any(_is_complete(save) for save in self.folder.glob(f"{_PREFIX}*") if _SAVE.fullmatch(save.name)):
            raise UsageError(
                f"There is no run to continue: {self.folder} has no complete save.",
                "Begin one without --resume always, or check the output path.",
            )

    def clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def _mark_complete(save: Path, progress: Progress, settings: UptrainSettings, identity: dict[str, Any]) -> None:
    """Write the marker, after all other files. It lists their sizes, so that a truncated file is noticed."""
    sizes = {}
    for file in sorted(path for path in save.rglob("*") if path.is_file()):
        flush(file)
        sizes[file.relative_to(save).as_posix()] = file.stat().st_size
    content: dict[str, Any] = {
        "step": progress.step,
        "positions": [asdict(position) for position in progress.positions],
        "losses": progress.losses,
        "adjusted": progress.adjusted,
        "settings": settings.model_dump(mode="json"),
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
    known = [name for name in wanted if name in saved]  # older saves have no teacher in their identity
    changed = changes(saved, wanted, known)
    if changed:
        raise UsageError(
            f"{folder} holds a run whose {' and '.join(changed)} had other contents than now.",
            "Bring the old files back to continue it, or throw it away with --resume never.",
        )


_SHARING = "way of sharing weights"


def _sharing(accelerator: Accelerator) -> str:
    """Tell how processes share weights: saves are not portable between FSDP2 and DDP."""
    return "FSDP2" if accelerator.is_fsdp2 else "none"


def _refuse_other_sharing(saved: dict[str, Any], now: str, folder: Path) -> None:
    before = saved.get(_SHARING, now)  # older saves do not say
    if before != now:
        raise UsageError(
            f"{folder} holds a run whose {_SHARING} was {before} and is now {now}, and saves are not portable between "
            "the two.",
            "Continue with the same --launch as before, or throw the run away with --resume never.",
        )


def _with_new_names(saved: dict[str, Any]) -> dict[str, Any]:
    """Rename settings that have other names in an older save."""
    return {_RENAMED.get(name, name): value for name, value in saved.items()}


def _changed(saved: dict[str, Any], wanted: UptrainSettings) -> Changes:
    """Find settings that determine the weights and differ from those of the save."""
    names = [name for name in UptrainSettings.model_fields if name not in FREE_ON_RESUME]
    # settings that are younger than the save had no effect on it, as their defaults have none
    before = {**UptrainSettings().model_dump(mode="json"), **saved}
    return changes(before, wanted.model_dump(mode="json"), names)


def _refuse_other_settings(changed: Changes, adjusting: bool, folder: Path) -> None:
    if not changed or (adjusting and changed.keys() <= ADJUSTABLE):
        return
    going_on = "--resume always to continue with these, " if changed.keys() <= ADJUSTABLE else ""
    raise UsageError(
        f"{folder} holds a run with other settings: {describe(changed)}.",
        f"Use the old settings to continue it, {going_on}or --resume never to throw it away.",
    )
