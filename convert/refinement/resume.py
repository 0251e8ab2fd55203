"""A refinement in progress, on disk: a killed one continues after the last layer that it finished.

Letters of shapes: N blocks of text, T tokens of a block, C hidden size.
"""

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
"""Source and converted model before and after a layer, and the layer's targets."""


@dataclass(frozen=True)
class LayerFit:
    """What refinement did to one layer: mean squared error of the target on held-out text, per unit of its variance."""

    layer: int
    error_before: float
    error_after: float


class RefineWork:
    """The folder of one refinement: its identity, the fitted layers, and the states before the next layer.

    States are (N, T, C) float32 files that are mapped, so that text may be larger than memory.

    Args:
        folder: made when the first states are written; ``RefineWork.beside`` names it for an output.
        identity: what determines the result, or the part of it that is known so far.

    Attributes:
        layer: the next layer to fit; None when nothing is there yet.
        fits: of the layers before it.

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
        """Where the work on ``out`` lies until ``out`` is published."""
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
                "Give what you gave then to continue it, or remove the folder to start anew.",
            )

    def require_place(self, blocks: int, tokens: int, hidden: int) -> None:
        """Refuse, before anything is computed, where the work could not be started or gone on with.

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
            require_space(self.folder, 4 * blocks * tokens * hidden * _STATES_AT_ONCE)

    def start(self, blocks: int, tokens: int, hidden: int) -> None:
        """Make the folder; the errors are those of :meth:`require_place`."""
        self.require_place(blocks, tokens, hidden)
        self._work.begin()

    def states(self, kind: str, layer: int, shape: tuple[int, int, int]) -> Tensor:
        """The mapped file of (N, T, C) states before ``layer``, made when it is not there."""
        file = self.folder / f"{kind}-{layer:04d}"
        count = shape[0] * shape[1] * shape[2]
        if not file.exists() and hasattr(os, "posix_fallocate"):
            with file.open("wb") as stream:  # a full disk is an error here, and a crash once the file is mapped
                os.posix_fallocate(stream.fileno(), 0, 4 * count)
        return torch.from_file(str(file), shared=True, size=count).view(shape)

    def finish(self, layer: int, fit: LayerFit | None = None, tensors: dict[str, Tensor] | None = None) -> None:
        """Say that ``layer`` is done, and forget the states before it.

        Args:
            layer: the states before ``layer + 1`` stand already.
            fit: None for a layer without attention.
            tensors: what was fitted, by name in the attention module.
        """
        if fit is not None and tensors is not None:
            save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, self._file(layer))
            self.fits.append(fit)
        kept = set(self.folder.glob(f"*-{layer + 1:04d}"))
        for file in (*kept, *self.folder.glob(self._file(layer).name)):
            flush(file)
        write_json(self.folder / _PROGRESS, {"layer": layer + 1, "fits": [asdict(fit) for fit in self.fits]})
        self.layer = layer + 1
        for file in set(self.folder.glob("*-[0-9]*")) - kept:
            if not file.suffix:
                file.unlink()

    def fitted(self, layer: int) -> dict[str, Tensor]:
        """The fitted tensors of a finished layer, by their names in the attention module."""
        return load_file(self._file(layer))

    def _file(self, layer: int) -> Path:
        return self.folder / f"layer-{layer:04d}.safetensors"


def remove_work(folder: Path) -> None:
    """Remove the work of a refinement; a folder that holds something else stays."""
    WorkingFolder(folder, {}).remove()
