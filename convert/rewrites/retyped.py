"""Sources that present themselves as checkpoints of their target type. A tensor is computed when it is read."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ...checkpoint.digest import combined
from ...checkpoint.header import Header, TensorInfo
from ...checkpoint.source import Checkpoint
from .lazy import LazyTensor, require_finite


@dataclass(frozen=True)
class RetypedCheckpoint(Checkpoint):
    """A source as another type: config.json describes the target type, folder and side files are the source's.

    Attributes:
        original: the source as it is on disk.
        source_type, model_type: type of the source, and the target type.
        class_name: class of the target type.
        runs, fails: where the result runs and where it does not, a sentence each.
    """

    original: Checkpoint | None = None
    source_type: str = ""
    model_type: str = ""
    class_name: str = ""
    runs: str = ""
    fails: str = ""

    @property
    def unchanged_kind(self) -> str:
        """The kind of action for tensors outside the changed attention."""
        return "copy"

    def describe(self) -> dict[str, str]:
        """Return what headfold.json says about it."""
        return {
            "from": self.source_type,
            "to": self.model_type,
            "class": self.class_name,
            "runs": self.runs,
            "fails": self.fails,
        }


@dataclass(frozen=True)
class RewrittenCheckpoint(RetypedCheckpoint):
    """A source whose names, shapes and dtypes are those of the target type, too.

    Attributes:
        states_of: the type whose layers read the same hidden states; statistics of the one fit the other.
        lazies: name → the tensor.
        scratch: a folder for the whole checkpoint where it has to be run.
    """

    states_of: str = ""
    lazies: dict[str, LazyTensor] = field(default_factory=dict)
    scratch: Path | None = None

    @property
    def unchanged_kind(self) -> str:
        return "compute"

    def read(self, name: str) -> torch.Tensor:
        """Compute one tensor, in the dtype it is stored in or wider.

        Raises:
            CheckpointError: its values do not fit into the dtype it is stored in.
        """
        lazy = self.lazies[name]
        tensor = lazy.compute()
        # Folding a norm into weights can leave the range of float16.
        require_finite(name, tensor, lazy.dtype)
        return tensor

    def digest(self, *, quiet: bool = False, stop: threading.Event | None = None) -> str:
        """Hash the digest of the source together with ``states_of``."""
        assert self.original is not None
        return combined([self.original.digest(quiet=quiet, stop=stop), self.states_of])


def headers_of(lazies: dict[str, LazyTensor], files: list[Path]) -> tuple[dict[Path, Header], dict[str, TensorInfo]]:
    """Make headers as they would be: every tensor in the file that it comes from, without a byte range there."""
    tensors = {name: TensorInfo(name, lazy.dtype, lazy.shape, lazy.file, 0, 0) for name, lazy in lazies.items()}
    headers = {}
    for file in files:
        inside = tuple(info for info in tensors.values() if info.file == file)
        if inside:
            headers[file] = Header(inside, {})
    return headers, tensors
