"""Check that a checkpoint's config and headers agree with what its class expects, without reading a weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...checkpoint.modelling import register_own_code
from ...checkpoint.source import Checkpoint
from ...errors import CheckpointError, reason
from .model_type import ModelType, quiet_transformers


def verify(folder: Path) -> list[str]:
    """Load the checkpoint on the meta device, as transformers would load it.

    Returns:
        The names of tensors on disk that the class does not use.

    Raises:
        CheckpointError: a tensor is missing or has another shape than the config asks for.
        UnsupportedError: transformers has no class for it.
    """
    config = Checkpoint.open(folder, weights=False).config
    register_own_code(config, folder)
    cls: Any = ModelType(config).model_class
    with quiet_transformers():
        try:
            _, report = cls.from_pretrained(
                folder,
                device_map="meta",
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are listed in the report and refused below
                local_files_only=True,
                trust_remote_code=False,
            )
        except Exception as problem:  # the loader raises whatever its parts raise
            raise CheckpointError(
                f"transformers cannot load {folder}: {reason(problem)}", "Check that the source itself loads."
            ) from problem
    mismatched = sorted(report["mismatched_keys"])
    if mismatched:
        name, on_disk, expected = mismatched[0]
        raise CheckpointError(
            f"{len(mismatched)} tensors disagree with config.json, {name} for one: "
            f"the file has {_shape(on_disk)}, the config asks for {_shape(expected)}.",
            "The config.json belongs to another checkpoint.",
        )
    missing = sorted(report["missing_keys"])
    if missing:
        raise CheckpointError(
            f"{len(missing)} tensors that {cls.__name__} needs are missing, {missing[0]} for one.",
            "The checkpoint is incomplete.",
        )
    return sorted(report["unexpected_keys"])


def _shape(sides: object) -> str:
    return f"({', '.join(map(str, sides))})" if isinstance(sides, (tuple, list)) else str(sides)
