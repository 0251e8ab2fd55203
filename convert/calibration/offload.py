"""Load a model for forward passes, with its weights left on disk if they do not fit into memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import torch

from ...checkpoint.load import load_language_model

_IN_MEMORY_SHARE = 0.5
"""Weights stay on disk where they would take more than this share of the memory that is free."""


def load_or_offload(
    folder: Path,
    weight_bytes: int,
    scratch: Path,
    *,
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
) -> Any:
    """Load a model for forward passes on ``device``.

    Where its weights stay on disk, accelerate maps those of a module from the safetensors files just before it runs,
    and drops them after. So memory holds one module's weights and the activations of a batch. With a GPU accelerate
    keeps there what fits.

    Args:
        weight_bytes: size of all weights.
        scratch: an empty folder for weights that the class stores in another form than the files.
    """
    if weight_bytes < psutil.virtual_memory().available * _IN_MEMORY_SHARE:
        return load_language_model(folder, trust_remote_code=trust_remote_code).to(device)
    # On a CPU "auto" would fill main memory, which must stay free for activations.
    places = {"": "disk"} if torch.device(device).type == "cpu" else "auto"
    return load_language_model(folder, device_map=places, offload_folder=scratch, trust_remote_code=trust_remote_code)
