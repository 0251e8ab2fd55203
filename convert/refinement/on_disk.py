"""Refine a converted checkpoint on disk: load it beside its source, fit it, and write the fitted tensors back."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...checkpoint.header import TensorInfo, torch_dtype
from ...checkpoint.source import Checkpoint
from ...errors import UnsupportedError
from ...libraries.transformers_internals import memory_names
from ..calibration.collect import reading_modules
from ..calibration.offload import load_or_offload
from ..family.attention_layer import AttentionLayer
from .fit import RefineSettings
from .layer_runner import decoder_layers, layer_index
from .refine import drop_incomplete_batch, projections, refine_layers
from .resume import LayerFit, RefinementFolder

_PROBE_TOKENS = 8
"""Tokens of each of two sequences that show how a model calls its layers."""


def refine_folder(
    source: Path,
    folder: Path,
    layers: Sequence[AttentionLayer],
    text_BT: Tensor,
    settings: RefineSettings,
    *,
    work: Path | None = None,
    conversion: Mapping[str, Any] | None = None,
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
) -> list[LayerFit]:
    """Fit the attention of the checkpoint in ``folder`` to ``source``, in place.

    Where both models do not fit into memory together, both stay on disk and one layer of one of them is in memory.

    Args:
        source: the checkpoint that ``folder`` was converted from.
        folder: the converted checkpoint, not yet published; it is changed when all layers are fitted.
        layers: its attention layers.
        text_BT: calibration text as token ids, see :func:`headfold.convert.calibration.text.token_blocks`.
        work: a folder that stays, from which a killed refinement continues; None: a temporary one.
        conversion: how ``folder`` was made, by the names of the options; part of the identity of the work.

    Raises:
        DataError: too little text.
        UnsupportedError: the model's layers are not a plain chain, or its projections are stored in another form.
        UsageError: ``work`` holds another refinement.
        CheckpointError: one of the two checkpoints cannot be loaded.
    """
    converted, original = Checkpoint.open(folder), Checkpoint.open(source)
    with tempfile.TemporaryDirectory(prefix="headfold-") as name:
        scratch = Path(name)
        identity = identity_of(original, text_BT, settings, conversion or {})
        # The same method can give other bits with another version of a library, so its result is part of the identity.
        progress = RefinementFolder(work or scratch / "work", {**identity, "result of the method": converted.digest()})
        models: list[Any] = []
        for side, checkpoint in (("source", original), ("converted", converted)):
            (scratch / side).mkdir()
            size = original.weight_bytes + converted.weight_bytes  # both models are loaded at once
            model = load_or_offload(checkpoint.folder, size, scratch / side, trust_remote_code=trust_remote_code)
            models.append(model.eval())
        readers = reading_modules(layers)
        # Before the fit, so that a model whose tensors cannot be written back is refused before hours of work.
        places = {reader: _places_on_disk(models[1], reader, converted) for reader in readers}
        fits = refine_layers(models[0], models[1], text_BT, settings, progress, readers=readers, device=device)
        for reader, names in places.items():
            for name, tensor in progress.fitted(layer_index(reader)).items():
                _overwrite(names[name], tensor)
    return fits


def identity_of(
    source: Checkpoint, text_BT: Tensor, settings: RefineSettings, conversion: Mapping[str, Any]
) -> dict[str, Any]:
    """Describe everything that the result of a refinement depends on, by the names of the options."""
    return {
        "source": source.digest(),
        **conversion,
        "calibration text": hashlib.sha256(text_BT.numpy().tobytes()).hexdigest(),
        **{name.replace("_", " "): value for name, value in asdict(settings).items()},
    }


def require_refinable(
    load: Callable[[], Any],
    source: Checkpoint,
    layers: Sequence[AttentionLayer],
    text_BT: Tensor,
    settings: RefineSettings,
    work: RefinementFolder,
    *,
    device: torch.device | str = "cpu",
) -> None:
    """Raise before the conversion what refinement would raise after it. The source runs once, on a few tokens.

    Args:
        load: gives the source as a model on ``device``.
        work: where the state of the refinement will be.

    Raises:
        DataError: too little text.
        UnsupportedError: the layers are not a plain chain, or the projections are stored in another form.
        UsageError: ``work`` holds something else.
        HeadfoldError: there is too little room on disk for the states between layers.
    """
    text_BT, _ = drop_incomplete_batch(text_BT, settings)
    model, readers = load(), reading_modules(layers)
    for reader in readers:
        _places_on_disk(model, reader, source)
    first = decoder_layers(model, readers, text_BT[:2, :_PROBE_TOKENS].to(device))[0]
    count, length = text_BT.shape
    work.require_place(count, length, first.hidden)


def _places_on_disk(model: Any, reader: str, checkpoint: Checkpoint) -> dict[str, TensorInfo]:
    """Find the projections of one attention module on disk, by their names in the module.

    Raises:
        UnsupportedError: the files hold them in another form than the model class.
    """
    module, _, reads = reader.rpartition(".")
    disk_names = {memory: disk for disk, memory in memory_names(model, list(checkpoint.tensors)).items()}
    found = {}
    for name, parameter in projections(model.get_submodule(module), reads).items():
        place = checkpoint.tensors.get(disk_names.get(f"{module}.{name}", ""))
        if place is None or place.shape != tuple(parameter.shape):
            raise UnsupportedError(
                f"The checkpoint holds {module}.{name} in another form than its model class, so it cannot be refined.",
                "Convert with --refine 0; uptraining works with every model.",
            )
        found[name] = place
    return found


def _overwrite(place: TensorInfo, tensor: Tensor) -> None:
    """Overwrite a tensor in its file with another of the same shape, in the dtype on disk."""
    stored = tensor.to(torch_dtype(place.dtype)).contiguous()
    with place.file.open("r+b") as stream:
        # Shape and dtype are those of the file's header, which stays valid.
        stream.seek(place.begin)
        stream.write(stored.reshape(-1).view(torch.uint8).numpy().data)
