"""The tensors that a trained model is saved as: names, shapes and dtypes of its source, known before it is trained.

Names on disk may lack the prefix of the class (``layers.0…`` for ``model.layers.0…``), as official embedding models
have it. transformers loads them, and saves the names of its class.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ...checkpoint.folder.weights import INDEX_NAME
from ...checkpoint.header import FLOATS, dtype_name, torch_dtype
from ...checkpoint.source import Checkpoint
from ...checkpoint.write import OutFile, OutTensor, ShardWriter
from ...errors import UnsupportedError
from ...libraries.transformers_internals import names_in_class, saved_tensors

Layout = dict[str, tuple[str, tuple[int, ...]]]
"""Name on disk → dtype as safetensors spells it, and shape."""


def layout_of(checkpoint: Checkpoint) -> Layout:
    """List the tensors of a checkpoint."""
    return {name: (info.dtype, tuple(info.shape)) for name, info in checkpoint.tensors.items()}


def dtypes_in_memory(model: Any, source: Checkpoint) -> dict[str, torch.dtype]:
    """Find the dtype in which each parameter is stored, by its name in memory.

    A parameter that several tensors on disk make up, such as stacked experts, has the dtype of the last of them.
    """
    stored: dict[str, torch.dtype] = {}
    for disk, names in names_in_class(model, list(source.tensors)).items():
        if source.tensors[disk].dtype in FLOATS:
            stored |= dict.fromkeys(names, torch_dtype(source.tensors[disk].dtype))
    return stored


def disk_names(saved: Iterable[str], source: Collection[str], prefix: str) -> dict[str, str]:
    """Match the names that transformers saves with those of the source: the same, without the prefix, or with it.

    Args:
        prefix: of the class's base model.

    Returns:
        saved name → name in the source, or the saved name where no such tensor is there.
    """
    found = {}
    for name in saved:
        others = (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}")
        found[name] = next((one for one in others if one in source), name)
    return found


def refuse_unpublishable(model: Any, source: Checkpoint) -> None:
    """Make the check of publishing before a step is trained: the result would have the tensors of its source.

    Args:
        model: as it is trained, or without weights.

    Raises:
        UnsupportedError: it would be saved with other names, shapes or dtypes.
    """
    stored, default = dtypes_in_memory(model, source), source.config_dtype
    weights = {
        name: tensor.to("meta", stored.get(name, default)) if tensor.is_floating_point() else tensor
        for name, tensor in saved_tensors(model, untied_only=True).items()
    }
    saved = saved_tensors(model, weights)
    names = disk_names(saved, source.tensors, model.base_model_prefix)
    refuse_other_tensors(
        {names[name]: (dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in saved.items()}, source
    )


def refuse_other_tensors(saved: Mapping[str, tuple[str, tuple[int, ...]]], source: Checkpoint) -> None:
    """Compare what is saved, by names on disk, with the source.

    Raises:
        UnsupportedError: a name, shape or dtype differs.
    """
    wanted = layout_of(source)
    differing = sorted(name for name in saved if saved[name] != wanted.get(name))
    if differing:
        first = differing[0]
        raise UnsupportedError(
            f"The trained model would be saved with {len(differing)} tensors unlike those of its source: {first} as "
            f"{_shown(saved[first])}, and the source has {_shown(wanted.get(first))}.",
            "Load the source in transformers, save it with save_pretrained, and train that.",
        )


def _shown(tensor: tuple[str, tuple[int, ...]] | None) -> str:
    return "none of this name" if tensor is None else f"{tensor[0]} of shape {list(tensor[1])}"


def rename_as_source(folder: Path, source: Checkpoint, prefix: str) -> None:
    """Give the tensors of a saved checkpoint the names that they have in the source. Bytes and files stay."""
    saved = Checkpoint.open(folder)
    names = disk_names(saved.tensors, source.tensors, prefix)
    if all(old == new for old, new in names.items()):
        return
    for file, header in saved.headers.items():
        renamed = file.with_name(f"renamed-{file.name}")
        tensors = tuple(OutTensor(names[info.name], info.dtype, info.shape, info) for info in header.tensors)
        with ShardWriter(folder, [OutFile(renamed.relative_to(folder), tensors, header.metadata)]) as writer:
            writer.create()
            writer.start_copying()
            writer.finish(_not_shown)
        renamed.replace(file)
    index = folder / INDEX_NAME
    if index.is_file():
        content = json.loads(index.read_text(encoding="utf-8"))
        content["weight_map"] = {names.get(name, name): file for name, file in content["weight_map"].items()}
        index.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _not_shown(amount: float = 1) -> None:
    """Take the place of a progress bar."""
