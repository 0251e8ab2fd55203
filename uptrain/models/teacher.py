"""The teacher: which checkpoint it is, and the frozen model on its device, sharded where the student is."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from ...checkpoint.load import load_language_model, load_tokenizer
from ...checkpoint.record import last_entry
from ...checkpoint.source import Checkpoint
from ...console import info, warn
from ...errors import HeadfoldError, UsageError
from ..loss.head import Split, divert
from ..loss.hidden_states import LayerOutputs
from ..settings import DISTILLATION, UptrainSettings
from .isolation import refuse_leaks


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
        UsageError: ``source`` was asked for and nothing says what it is, or the settings say how to learn from a
            teacher and there is none.
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
    resolved = settings.model_copy(update={"teacher": teacher})
    if teacher is None:
        resolved.refuse_without_effect(
            [name for name in DISTILLATION if getattr(settings, name) != getattr(_PLAIN, name)]
        )
    else:
        info(f"Teacher: {teacher} (--no-teacher trains on the text alone).")
    return resolved


_PLAIN = UptrainSettings()
"""Every setting at its default."""


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
        tapped: its layers' hidden states are asked for, too.
    """

    def __init__(self, accelerator: Accelerator, model: Any, tapped: bool = False) -> None:
        self.model, self._accelerator = model, accelerator
        self.split = Split(model)
        self.taps = LayerOutputs(model) if tapped else None  # before it is sharded, which renames its layers' classes
        # through the model's own call, since a sharded model has its whole weights only there
        divert(model, "features", lambda *, features, **inputs: self.split.features(**inputs))
        if accelerator.is_fsdp2:
            _shard(model)

    def features(self, **inputs: Any) -> tuple[Tensor, list[Tensor] | None]:
        """What ``split.logits`` takes, for these inputs, and what each layer put out where it is tapped."""
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(self._accelerator.autocast())
            layers_BTC = stack.enter_context(self.taps.watching()) if self.taps else None
            states_BTX: Tensor = self.model(features=True, use_cache=False, **inputs)
        return states_BTX, layers_BTC


def load_teacher(
    place: str,
    accelerator: Accelerator,
    student: Any,
    tokenizer: Any,
    trust_remote_code: bool,
    tapped: bool = False,
    isolated: bool = False,
) -> Teacher:
    """The frozen teacher in evaluation mode and in its own dtype; on a CPU without bf16 in float32, which is faster.

    Args:
        tapped: see :class:`Teacher`.
        isolated: documents of a block must not see each other.

    Raises:
        UsageError: its tokens are not the student's. UnsupportedError: its documents see each other.
    """
    slow = accelerator.device.type == "cpu" and accelerator.mixed_precision == "no"
    dtype = torch.float32 if slow else "auto"
    model = load_language_model(place, dtype=dtype, trust_remote_code=trust_remote_code)
    vocabulary = load_tokenizer(place, trust_remote_code=trust_remote_code).get_vocab()
    heads = [one.get_output_embeddings() or one.get_input_embeddings() for one in (model, student)]
    widths = [head.weight.shape[0] for head in heads]
    if vocabulary != tokenizer.get_vocab() or widths[0] != widths[1]:
        raise other_vocabulary(place)
    if isolated:  # before it moves: what is tried lies on the CPU
        refuse_leaks(model)
    if not accelerator.is_fsdp2:  # sharding moves one layer after the other, so that none needs room for all
        model = model.to(accelerator.device)
    return Teacher(accelerator, model.eval().requires_grad_(False), tapped)


def other_vocabulary(place: str) -> UsageError:
    return UsageError(
        f"The teacher {place} has another vocabulary than the checkpoint, so it cannot be followed.",
        "Distil from the checkpoint's own source, or pass --no-teacher.",
    )


def _shard(model: Any) -> None:
    """Every decoder layer sharded by itself; embedding and head stay whole after a pass, for the head's chunks."""
    from torch.distributed.fsdp import fully_shard

    layers = set(getattr(model, "_no_split_modules", None) or [])
    for module in list(model.modules()):
        if type(module).__name__ in layers:
            fully_shard(module)
    fully_shard(model, reshard_after_forward=False)
