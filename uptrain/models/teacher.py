"""The teacher: find its checkpoint, and run it as a frozen model, sharded if the student is."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from ...checkpoint.digest import is_comparable
from ...checkpoint.load import load_language_model, load_tokenizer
from ...checkpoint.record import known_places, last_entry
from ...checkpoint.source import Checkpoint
from ...console import info, warn
from ...errors import HeadfoldError, UsageError
from ...libraries.transformers_internals import layers_within
from ..loss.head import SplitModel, route_calls
from ..loss.hidden_states import LayerOutputs
from ..settings import DISTILLATION, UptrainSettings
from .isolation import refuse_leaks


def converted_from(checkpoint: Checkpoint) -> str | None:
    """Return the source that the conversion record names, if it is at hand and unchanged."""
    entry = last_entry(checkpoint.folder, "convert")
    if entry is None:
        return None
    if not is_comparable(entry.get("source_digest")):
        warn(
            f"The record of {checkpoint.folder} is of an older version, which cannot tell whether its source is "
            "unchanged. Name the teacher: --teacher CHECKPOINT."
        )
        return None
    # the record is published, so it names no folder of this machine
    places = known_places(checkpoint.folder)
    name = str(entry.get("source") or "")
    beside = checkpoint.folder.resolve().parent / name  # where both were moved together
    for place in (places.get(str(entry.get("source_digest"))), name, beside if name else None):
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
    """Replace ``auto`` and ``source`` by the checkpoint they mean, and tell the user.

    Raises:
        UsageError: no record names the ``source`` that the user wants. Or there is no teacher, although settings
            say how to learn from one.
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
        teacher = converted_from(checkpoint) or _elsewhere(entry)
    resolved = settings.model_copy(update={"teacher": teacher})
    if teacher is None:
        # `auto` may come to no teacher only here, long after the command line was checked
        given = [name for name in DISTILLATION if getattr(settings, name) != getattr(_DEFAULTS, name)]
        resolved.refuse_without_effect(given)
    else:
        info(f"Teacher: {teacher} (--no-teacher trains on the text alone).")
    return resolved


def _elsewhere(entry: dict[str, Any]) -> str:
    """Return the id of a source that is not at hand.

    Raises:
        UsageError: it has none.
    """
    # an earlier version wrote the path or the id that it was given
    if entry.get("source_hub_id", entry["source"]) is None:
        raise UsageError(
            f"The source of the conversion, {entry['source']}, is not where it was.",
            "Say where it is: --teacher CHECKPOINT.",
        )
    return str(entry["source"])


_DEFAULTS = UptrainSettings()


def digest_of(teacher: str | None) -> str | None:
    """Compute a digest of the teacher's files, by which a resumed run knows it. Without safetensors it is None."""
    try:
        return Checkpoint.open(teacher).digest() if teacher else None
    except HeadfoldError:
        return None


class Teacher:
    """A frozen model that gives its logits for a chunk of tokens at a time.

    Args:
        model: as loaded, on its device.
        compares_layers: the run also compares hidden states, so the outputs of the layers are needed.
    """

    def __init__(self, accelerator: Accelerator, model: Any, compares_layers: bool = False) -> None:
        self.model, self._accelerator = model, accelerator
        self.split = SplitModel(model)
        # before sharding, which renames the classes by which layers are known
        self.outputs = LayerOutputs(model) if compares_layers else None
        # through the model's own call, since a sharded model has its whole weights only there
        route_calls(model, "head_inputs", lambda *, head_inputs, **inputs: self.split.head_inputs(**inputs))
        if accelerator.is_fsdp2:
            _shard(model)

    def head_inputs(self, **inputs: Any) -> tuple[Tensor, list[Tensor] | None]:
        """Run the model below its head.

        Returns:
            the input of ``split.logits``, and the output of each layer if hidden states are compared.
        """
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(self._accelerator.autocast())
            layers_BTC = stack.enter_context(self.outputs.collecting()) if self.outputs else None
            head_inputs_BT: Tensor = self.model(head_inputs=True, use_cache=False, **inputs)
        return head_inputs_BT, layers_BTC


def load_teacher(
    place: str,
    accelerator: Accelerator,
    student: Any,
    tokenizer: Any,
    trust_remote_code: bool,
    compares_layers: bool = False,
    isolates_documents: bool = False,
) -> Teacher:
    """Load the teacher in evaluation mode and in its own dtype, or in float32 on a CPU without bf16, which is faster.

    Args:
        compares_layers: see :class:`Teacher`.
        isolates_documents: documents of a sequence must not see each other.

    Raises:
        UsageError: its tokens are not the student's. UnsupportedError: its documents see each other.
    """
    slow_bf16 = accelerator.device.type == "cpu" and accelerator.mixed_precision == "no"
    dtype = torch.float32 if slow_bf16 else "auto"
    model = load_language_model(place, dtype=dtype, trust_remote_code=trust_remote_code)
    vocabulary = load_tokenizer(place, trust_remote_code=trust_remote_code).get_vocab()
    heads = [one.get_output_embeddings() or one.get_input_embeddings() for one in (model, student)]
    widths = [head.weight.shape[0] for head in heads]
    if vocabulary != tokenizer.get_vocab() or widths[0] != widths[1]:
        raise other_vocabulary(place)
    if isolates_documents:  # while the model is still on the CPU, where the trial's tensors are
        refuse_leaks(model)
    if not accelerator.is_fsdp2:  # sharding moves one layer after the other, so that no device needs room for all
        model = model.to(accelerator.device)
    return Teacher(accelerator, model.eval().requires_grad_(False), compares_layers)


def other_vocabulary(place: str) -> UsageError:
    return UsageError(
        f"The teacher {place} has another vocabulary than the checkpoint, so it cannot be followed.",
        "Distil from the checkpoint's own source, or pass --no-teacher.",
    )


def _shard(model: Any) -> None:
    """Shard every layer by itself. Embedding and head stay whole after a pass, since the head runs on chunks later."""
    from torch.distributed.fsdp import fully_shard

    for layer in layers_within(model, model):
        fully_shard(layer)
    fully_shard(model, reshard_after_forward=False)
