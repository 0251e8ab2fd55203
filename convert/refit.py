"""Refine a converted checkpoint on disk: load it beside its source, fit, and write the fitted tensors back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.header import TensorInfo, torch_dtype
from ..checkpoint.load import load_causal_lm
from ..checkpoint.source import Checkpoint
from .blocks import Block
from .refine import LayerFit, RefineSettings, output_projection, refine_layers


def refine_folder(
    source: Path,
    folder: Path,
    blocks: Sequence[Block],
    text_NT: Tensor,
    settings: RefineSettings,
    *,
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
) -> list[LayerFit]:
    """Fit the attention of the checkpoint in ``folder`` to ``source``, in place.

    Args:
        source: the checkpoint that ``folder`` was converted from.
        folder: the converted checkpoint, not yet published: a run that stops half-way leaves it as it was.
        blocks: its attention blocks, by the names of their tensors on disk.
        text_NT: calibration text as token ids, see :func:`headfold.convert.calibration.token_blocks`.

    Raises:
        DataError: too little text.
        UnsupportedError: the model's layers are no plain chain.
        CheckpointError: one of the two cannot be loaded.
    """
    teacher, model = (load_causal_lm(place, trust_remote_code=trust_remote_code).eval() for place in (source, folder))
    fits = refine_layers(teacher, model, text_NT, settings, modules=[block.module for block in blocks], device=device)
    places = Checkpoint.open(folder).tensors
    for block in blocks:
        for name, tensor in _fitted(model, block).items():
            _overwrite(places[name], tensor)
    return fits


def _fitted(model: Any, block: Block) -> dict[str, Tensor]:
    """The tensors of one block that refinement may have changed, by disk name."""
    attention = model.get_submodule(block.module)
    found = {block.o: output_projection(attention).weight}
    sides = {"q_proj": (block.q, block.q_bias), "k_proj": (block.k, block.k_bias), "v_proj": (block.v, block.v_bias)}
    for side, (weight, bias) in sides.items():
        for parameter in getattr(attention, side).parameters():
            found[weight if parameter.dim() == 2 else bias] = parameter
    return {name: parameter.detach() for name, parameter in found.items() if name is not None}


def _overwrite(place: TensorInfo, tensor: Tensor) -> None:
    """Put a tensor where one of the same name, shape and dtype lies."""
    stored = tensor.to(torch_dtype(place.dtype)).contiguous()
    if tuple(stored.shape) != place.shape:
        raise AssertionError(f"{place.name}: fitted {tuple(stored.shape)}, stored {place.shape}")
    with place.file.open("r+b") as stream:
        stream.seek(place.begin)
        stream.write(stored.reshape(-1).view(torch.uint8).numpy().data)
