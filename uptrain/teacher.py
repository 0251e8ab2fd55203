"""The teacher: which checkpoint it is, and the frozen model on its device, sharded where the student is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from ..checkpoint.load import load_causal_lm, load_tokenizer
from ..checkpoint.record import last_entry
from ..checkpoint.source import Checkpoint
from ..console import info, warn
from ..errors import HeadfoldError, UsageError
from .settings import UptrainSettings
from .split import Split, divert


def converted_from(checkpoint: Checkpoint) -> str | None:
    """The source that the conversion record names, where it is at hand and still the same; None otherwise."""
    entry = last_entry(checkpoint.folder, "convert")
    if entry is None:
        return None
    for place in (entry.get("source_folder"), entry.get("source")):
        if place and Path(place).is_dir():
            try:
                same = Checkpoint.open(place).digest() == entry.get("source_digest")
            except HeadfoldError:
                continue
            if same:
                return str(place)
            warn(f"{place} is no longer the checkpoint that {checkpoint.folder} was converted from.")
    return None


def resolve_teacher(settings: UptrainSettings, checkpoint: Checkpoint) -> UptrainSettings:
    """Replace ``auto`` and ``source`` by the checkpoint they mean, and say which it is.

    Raises:
        UsageError: ``source`` was asked for and nothing says what it is.
    """
    teacher = settings.teacher
    if teacher == "auto":
        teacher = converted_from(checkpoint)
        if teacher is None and last_entry(checkpoint.folder, "convert"):
            warn("The source of the conversion is not at hand, so the run learns from the text alone (--teacher).")
    elif teacher == "source":
        entry = last_entry(checkpoint.folder, "convert")
        if entry is None:
            raise UsageError(
                f"{checkpoint.folder} has no conversion record that says what its source is.",
                "Name the teacher: --teacher CHECKPOINT.",
            )
        teacher = converted_from(checkpoint) or str(entry["source"])
    if teacher is not None:
        info(f"Teacher: {teacher} (--no-teacher trains on the text alone).")
    return settings.model_copy(update={"teacher": teacher})


def digest_of(teacher: str | None) -> str | None:
    """That of the teacher's files, so that a resumed run learns from the same one; None where it has no safetensors."""
    try:
        return Checkpoint.open(teacher).digest() if teacher else None
    except HeadfoldError:
        return None


class Teacher:
    """A frozen model that is asked for its logits a chunk of positions at a time.

    Args:
        model: as loaded, on its device.
    """

    def __init__(self, accelerator: Accelerator, model: Any) -> None:
        self.model, self._accelerator = model, accelerator
        self.split = Split(model)
        # through the model's own call, since a sharded model has its whole weights only there
        divert(model, "features", lambda *, features, **inputs: self.split.features(**inputs))
        if accelerator.is_fsdp2:
            _shard(model)

    def features(self, **inputs: Any) -> Tensor:
        """What ``split.logits`` takes, for these inputs."""
        with torch.no_grad(), self._accelerator.autocast():
            states: Tensor = self.model(features=True, use_cache=False, **inputs)
        return states


def load_teacher(
    place: str, accelerator: Accelerator, student: Any, tokenizer: Any, trust_remote_code: bool
) -> Teacher:
    """The frozen teacher in evaluation mode and in its own dtype; on a CPU without bf16 in float32, which is faster.

    Raises:
        UsageError: its tokens are not the student's.
    """
    slow = accelerator.device.type == "cpu" and accelerator.mixed_precision == "no"
    dtype = torch.float32 if slow else "auto"
    model = load_causal_lm(place, dtype=dtype, trust_remote_code=trust_remote_code)
    vocabulary = load_tokenizer(place, trust_remote_code=trust_remote_code).get_vocab()
    widths = [one.get_output_embeddings().weight.shape[0] for one in (model, student)]
    if vocabulary != tokenizer.get_vocab() or widths[0] != widths[1]:
        raise UsageError(
            f"The teacher {place} has another vocabulary than the checkpoint, so it cannot be followed.",
            "Distil from the checkpoint's own source, or pass --no-teacher.",
        )
    return Teacher(accelerator, model.to(accelerator.device).eval().requires_grad_(False))


def _shard(model: Any) -> None:
    """Every decoder layer sharded by itself; embedding and head stay whole after a pass, for the head's chunks."""
    from torch.distributed.fsdp import fully_shard

    layers = set(getattr(model, "_no_split_modules", None) or [])
    for module in list(model.modules()):
        if type(module).__name__ in layers:
            fully_shard(module)
    fully_shard(model, reshard_after_forward=False)
