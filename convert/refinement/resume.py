"""A refinement in progress, on disk: a killed one continues after the last layer that it finished."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ...checkpoint.write import require_space
from ...errors import UsageError
from ...working_folder import WorkingFolder, changes, flush, read_json, write_json

_PROGRESS = "progress.json"
_STATES_AT_ONCE = 5
"""States of the source and of the converted model before and after a layer, and the layer's targets."""


@dataclass(frozen=True)
class LayerFit:
    """The fit of one layer: mean squared error to the target on held-out text, per unit of its variance."""

    layer: int
    error_before: float
    error_after: float


class RefinementFolder:
    """The folder of one refinement: its identity, the fitted layers, and the states before the next layer.

    States are (B, T, C) float32 files that are mapped, so that the text may be larger than memory.

    Args:
        folder: created with the first states; ``RefinementFolder.beside`` names it for an output.
        identity: everything that the result depends on, or the part of it that is known so far.

    Attributes:
        layer: the next layer to fit; None where nothing is there yet.
        fits: the fits of the layers before it.

    Raises:
        UsageError: the folder holds a refinement of another identity.
    """

    def __init__(self, folder: Path, identity: dict[str, Any]) -> None:
        self.folder = folder
        self._work = WorkingFolder(folder, identity)
        self.layer: int | None = None
        self.fits: list[LayerFit] = []
        if (folder / _PROGRESS).exists():
            self._resume()

    @staticmethod
    def beside(out: Path) -> Path:
        """Name the folder of the refinement of ``out``, which is there until ``out`` is published."""
        return out.parent / f"{out.name}.refinement"

    def _resume(self) -> None:
        try:
            found = self._work.found() or {}
            progress = read_json(self.folder / _PROGRESS)
            self.fits = [LayerFit(**fit) for fit in progress["fits"]]
            self.layer = progress["layer"]
        except (OSError, ValueError, KeyError, TypeError) as problem:
            raise UsageError(
                f"{self.folder} should hold an unfinished refinement, but cannot be read: {problem}.",
                "Remove the folder to start anew.",
            ) from problem
        # Only the names given: before the conversion, its result is not part of the identity yet.
        changed = changes(found, self._work.identity, self._work.identity)
        if changed:
            raise UsageError(
                f"{self.folder} holds an unfinished refinement with another {' and '.join(changed)}.",
                "Repeat the earlier settings to continue it, or remove the folder to start anew.",
            )

    def require_place(self, sequences: int, tokens: int, hidden: int) -> None:
        """Raise before anything is computed where the refinement could not be started or continued.

        Raises:
            UsageError: a folder of that name holds something else.
            HeadfoldError: the file system has too little room.
        """
        if self._work.is_foreign:
            raise UsageError(
                f"{self.folder}, where refinement keeps its work, holds something else.",
                "Move it away, or choose another output path.",
            )
        if self.layer is None:
            require_space(self.folder, 4 * sequences * tokens * hidden * _STATES_AT_ONCE)

    def start(self, sequences: int, tokens: int, hidden: int) -> None:
        """Create the folder; raises the errors of :meth:`require_place`."""
        self.require_place(sequences, tokens, hidden)
        self._work.begin()

    def states(self, kind: str, layer: int, shape: tuple[int, int, int]) -> Tensor:
        """Map the file of (B, T, C) states before ``layer``, and create it where it is missing."""
        file = self.folder / f"{kind}-{layer:04d}"
        count = shape[0] * shape[1] * shape[2]
        if not file.exists() and hasattr(os, "posix_fallocate"):
            # A full disk raises an error here. Once the file is mapped, it would kill the process with SIGBUS.
            with file.open("wb") as stream:
                os.posix_fallocate(stream.fileno(), 0, 4 * count)
        return torch.from_file(str(file), shared=True, size=count).view(shape)

    def finish(self, layer: int, fit: LayerFit | None = None, tensors: dict[str, Tensor] | None = None) -> None:
        """Record that ``layer`` is finished, and remove the states before it.

        Args:
            layer: the states before ``layer + 1`` are written already.
            fit: None for a layer without attention.
            tensors: the fitted tensors, by name in the attention module.
        """
        if fit is not None and tensors is not None:
            save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, self._file(layer))
            self.fits.append(fit)
        next_states = set(self.folder.glob(f"*-{layer + 1:04d}"))
        # Everything that the progress file promises must be on the disk before it is.
        for file in (*next_states, *self.folder.glob(self._file(layer).name)):
            flush(file)
        write_json(self.folder / _PROGRESS, {"layer": layer + 1, "fits": [asdict(fit) for fit in self.fits]})
        self.layer = layer + 1
        for file in set(self.folder.glob("*-[0-9]*")) - next_states:
            if not file.suffix:  # fitted tensors have one and stay
                file.unlink()

    def fitted(self, layer: int) -> dict[str, Tensor]:
        """Read the fitted tensors of a finished layer, by their names in the attention module."""
        return load_file(self._file(layer))

    def _file(self, layer: int) -> Path:
        return self.folder / f"layer-{layer:04d}.safetensors"


def remove_refinement_folder(folder: Path) -> None:
    """Remove the folder of a refinement, but not a folder that holds something else."""
    WorkingFolder(folder, {}).remove()
