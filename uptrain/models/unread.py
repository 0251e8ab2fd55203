"""Carry over the tensors that a class drops on loading, such as layers of multi-token prediction."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ...checkpoint.folder.weights import INDEX_NAME
from ...checkpoint.source import Checkpoint
from ...checkpoint.write import OutFile, OutTensor, ShardWriter
from ...libraries.transformers_internals import unread_names

_CONSTANT = re.compile(r"(^|\.)(inv_freq|position_ids|masked_bias|attn\.bias|attention\.bias)$")
"""Buffers that old checkpoints hold although every class computes them."""


def unread_tensors(model: Any, source: Checkpoint) -> list[str]:
    """Find the tensors of the source that its class drops on loading, so that training does not change them.

    Constants that old checkpoints hold are left out.
    """
    return [name for name in unread_names(model, list(source.tensors)) if not _CONSTANT.search(name)]


def describe_unread(names: list[str]) -> str:
    """Say what the class does not load, in one sentence."""
    return (
        f"{len(names)} tensors of the source are not loaded by its class (multi-token prediction, for example), "
        f"{names[0]} for one."
    )


def copy_unread(source: Checkpoint, names: list[str], folder: Path) -> None:
    """Copy tensors byte for byte into a saved checkpoint, as one more weight file."""
    if not names:
        return
    saved = Checkpoint.open(folder)
    count = len(saved.weight_files) + 1
    weight_map: dict[str, str] = {}
    for number, file in enumerate(saved.weight_files, 1):
        new = file.with_name(_shard(number, count))
        file.rename(new)
        weight_map |= {info.name: new.name for info in saved.headers[file].tensors}
    name = _shard(count, count)
    tensors = [OutTensor(info.name, info.dtype, info.shape, info) for info in map(source.tensors.__getitem__, names)]
    with ShardWriter(folder, [OutFile(Path(name), tuple(tensors), {})]) as writer:
        writer.create()
        writer.start_copying()
        writer.finish(_not_shown)
    weight_map |= dict.fromkeys(names, name)
    totals = {
        "total_parameters": saved.elements + sum(source.tensors[one].elements for one in names),
        "total_size": saved.weight_bytes + sum(tensor.nbytes for tensor in tensors),
    }
    index = {"metadata": totals, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _not_shown(amount: float = 1) -> None:
    """Take the place of a progress bar."""


def _shard(number: int, count: int) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"
