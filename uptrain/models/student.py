"""The model that is trained: read or drawn, checked, and made faster."""

from __future__ import annotations

from typing import Any

import torch

from ...checkpoint.load import blank_language_model, load_language_model
from ...checkpoint.source import Checkpoint
from ...errors import UnsupportedError, UsageError
from ..settings import UptrainSettings


def build_student(source: Checkpoint, from_scratch: bool, trust_remote_code: bool) -> Any:
    """The model with float32 master weights; updates smaller than bf16's step size would be lost otherwise."""
    if not from_scratch:
        return load_language_model(source.folder, dtype=torch.float32, trust_remote_code=trust_remote_code)
    return blank_language_model(source.folder, dtype=torch.float32, trust_remote_code=trust_remote_code)


def refuse_long_blocks(sequence_length: int, config: Any) -> None:
    """Raise where a block is longer than the positions that the model has.

    Raises:
        UsageError: it is.
    """
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and sequence_length > longest:
        raise UsageError(
            f"Blocks of {sequence_length} tokens are longer than the {longest} that the model can take.",
            f"Give --sequence-length {longest}.",
        )


def speed_up(model: Any, settings: UptrainSettings) -> None:
    """Options that change speed and memory, not what is learnt.

    Raises:
        UnsupportedError: the class cannot compute its activations again, or does not name the layers to compile.
    """
    if settings.gradient_checkpointing:
        if not model.supports_gradient_checkpointing:
            raise UnsupportedError(
                f"{type(model).__name__} cannot compute its activations again.", "Leave --gradient-checkpointing out."
            )
        model.activation_checkpointing_enable({"use_reentrant": False})
    if settings.compile:
        # layer by layer: they share one graph, and the head is called from outside
        kinds = set(getattr(model, "_no_split_modules", None) or [])
        layers = [module for module in model.modules() if type(module).__name__ in kinds]
        if not layers:
            raise UnsupportedError(
                f"{type(model).__name__} does not say which of its modules are layers, so none can be compiled.",
                "Leave --compile out.",
            )
        for layer in layers:
            layer.compile()
