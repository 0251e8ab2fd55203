"""Write the trained weights as an ordinary checkpoint: files, dtypes and config of the source, with new numbers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import GenerationConfig

from ...checkpoint.card import write_card
from ...checkpoint.load import load_language_model
from ...checkpoint.publish import publishing
from ...checkpoint.record import METRICS_NAME, last_entry, write_record
from ...checkpoint.source import CONFIG_NAME, Checkpoint
from ...checkpoint.write import copy_side_files
from .disk_layout import dtypes_in_memory, layout_of, refuse_other_tensors, rename_as_source
from .unread import copy_unread, unread_tensors


def whole_weights(accelerator: Accelerator, model: Any) -> dict[str, torch.Tensor]:
    """Gather the full state dict of a model that may be sharded. Every process must call this.

    Returns:
        tensors by their names in memory; on processes other than the main one it may be empty.
    """
    weights: dict[str, torch.Tensor] = dict(accelerator.get_state_dict(model))
    # gathering made copies of tied tensors, and as one tensor again they are saved once
    tied = getattr(accelerator.unwrap_model(model), "all_tied_weights_keys", None) or {}
    for name, original in tied.items():
        if name in weights and original in weights and torch.equal(weights[name], weights[original]):
            weights[name] = weights[original]
    return weights


def write_trained(
    model: Any,
    weights: dict[str, torch.Tensor],
    source: Checkpoint,
    out: Path,
    entry: dict[str, Any],
    metrics: Path,
    *,
    overwrite: bool,
    trust_remote_code: bool,
) -> None:
    """Publish ``out`` as a whole, after its tensors were checked against the source's.

    Args:
        model: the unwrapped model; it knows how names in memory become names on disk.
        weights: its full state dict, float32.
        source: gives side files, dtypes and shapes. Without weights (training from scratch) the dtype comes from its
            config.json.
        entry: of this run, for the record.
    """
    config_dtype, stored = source.config_dtype, dtypes_in_memory(model, source)
    cast = _cast(weights, lambda name: stored.get(name, config_dtype))
    # transformers refuses to save some generation configs that it loads. The file is copied instead, below
    model.generation_config = GenerationConfig()
    with publishing(out, overwrite=overwrite) as folder:
        model.save_pretrained(folder, state_dict=cast)
        (folder / "generation_config.json").unlink(missing_ok=True)
        (folder / CONFIG_NAME).write_text(source.config_text, encoding="utf-8", newline="")
        copy_side_files(source, folder)
        left_out = _take_names_of(source, folder, model) if source.tensors else []
        # with a name that the class does load, such a tensor is a second copy of a tied head
        unread = [name for name in unread_tensors(model, source) if name in left_out]
        copy_unread(source, unread, folder)
        # a model on the meta device shows that the checkpoint loads, and costs no memory
        load_language_model(folder, device_map="meta", trust_remote_code=trust_remote_code)
        if metrics.exists():
            shutil.copyfile(metrics, folder / METRICS_NAME)
        write_record(
            folder,
            source.folder,
            {**entry, "tensors_left_out": sorted({*left_out} - {*unread}), "tensors_copied": unread},
        )
        if last_entry(folder, "convert") is not None:
            write_card(folder)


def _cast(weights: dict[str, torch.Tensor], dtype_of: Callable[[str], torch.dtype]) -> dict[str, torch.Tensor]:
    """Cast weights to their stored dtypes. Tied tensors stay one, or the head would be saved as a weight of its own."""
    cast: dict[int, torch.Tensor] = {}
    return {
        name: cast.setdefault(tensor.data_ptr(), tensor.to(dtype_of(name)).contiguous())
        for name, tensor in weights.items()
    }


def _take_names_of(source: Checkpoint, folder: Path, model: Any) -> list[str]:
    """Name the saved tensors as in the source, and find those that the class neither uses nor saves (old buffers).

    Raises:
        UnsupportedError: a saved tensor differs from the source's in name, shape or dtype. A run is refused for that
            before its first step.
    """
    rename_as_source(folder, source, model.base_model_prefix)
    saved = layout_of(Checkpoint.open(folder))
    refuse_other_tensors(saved, source)
    return sorted(source.tensors.keys() - saved.keys())
