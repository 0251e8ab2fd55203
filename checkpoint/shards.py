"""Distribute tensors over shards of a wanted size."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import split_state_dict_into_shards_factory

from ..errors import UsageError
from .write import OutFile, OutTensor

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def shard_bytes(text: str) -> int:
    """``5GB`` → 5,000,000,000.

    Raises:
        UsageError: that is no size, or no room for anything.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text, re.IGNORECASE)
    size = int(float(match[1]) * _UNITS.get(match[2].upper(), 0)) if match else 0
    if size < 1:
        raise UsageError(f"{text!r} is no size of a shard.", "Write it as 5GB, 500MB or 2GiB.")
    return size


def resharded(files: Sequence[OutFile], max_bytes: int) -> list[OutFile]:
    """The same tensors in files of at most ``max_bytes``; a larger tensor gets one of its own.

    The shards are those that ``save_pretrained`` would make; header metadata of all files comes along.
    """
    tensors = {tensor.name: tensor for file in files for tensor in file.tensors}
    metadata = {key: value for file in files for key, value in file.metadata.items()}
    split = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=_nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_bytes,
    )
    return [
        OutFile(Path(name), tuple(tensors[tensor] for tensor in names), metadata)
        for name, names in split.filename_to_tensors.items()
    ]


def _nbytes(tensor: OutTensor) -> int:
    return tensor.nbytes
