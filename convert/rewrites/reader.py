"""Read the tensors of a source by the names of its model class, whatever they are called on disk."""

from __future__ import annotations

from typing import Any

from ...checkpoint.header import FLOATS
from ...checkpoint.source import Checkpoint
from ...errors import CheckpointError, UnsupportedError
from ...libraries.transformers_internals import memory_names
from ..family.model_type import ModelType
from .decoder import LinearWeights, NormWeights
from .lazy import LazyTensor


class TensorReader:
    """Hands out the tensors of a checkpoint, and knows which of them have been read."""

    def __init__(self, checkpoint: Checkpoint, model_type: ModelType) -> None:
        model = model_type.on_meta()
        self.checkpoint = checkpoint
        self.config: Any = model.config
        self._prefix = model.base_model_prefix
        self._expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self._on_disk = {memory: disk for disk, memory in memory_names(model, list(checkpoint.tensors)).items()}
        self._read: set[str] = set()

    def tensor(self, name: str) -> LazyTensor:
        """Return one tensor by its name inside the class's decoder (``h.0.ln_1.weight``), or in its head.

        Raises:
            CheckpointError: it is missing, or its shape is not the one that config.json implies.
            UnsupportedError: it is stored as integers.
        """
        full = self._full(name)
        disk, expected = self._on_disk.get(full), self._expected.get(full)
        if disk is None:
            raise CheckpointError(
                f"The tensor {full} is missing.", "The checkpoint is incomplete, or config.json belongs to another one."
            )
        info = self.checkpoint.tensors[disk]
        if expected is not None and info.shape != expected:
            raise CheckpointError(
                f"{disk} has shape {list(info.shape)}, but config.json asks for {list(expected)}.",
                "The config.json belongs to another checkpoint.",
            )
        if info.dtype not in FLOATS:
            raise UnsupportedError(f"{disk} is stored as {info.dtype}. headfold computes with floating-point weights.")
        self._read.add(disk)
        return LazyTensor(info.shape, info.dtype, info.file, lambda: self.checkpoint.read(disk))

    def optional(self, name: str) -> LazyTensor | None:
        """Return one tensor, or None if the class has no such tensor."""
        return self.tensor(name) if self._full(name) in self._expected else None

    def norm(self, name: str) -> NormWeights:
        """Return a LayerNorm."""
        return NormWeights(self.optional(f"{name}.weight"), self.optional(f"{name}.bias"))

    def linear(self, name: str) -> LinearWeights:
        """Return a linear layer."""
        return LinearWeights(self.tensor(f"{name}.weight"), self.optional(f"{name}.bias"))

    def head(self, name: str) -> LinearWeights | None:
        """Return the output head, or None if config.json ties it to the embedding and the file has no other."""
        if self.config.tie_word_embeddings and name + ".weight" not in self._on_disk:
            return None
        return self.linear(name)

    def unused(self) -> list[str]:
        """List the tensors on disk that were not read, for example causal masks that old versions saved."""
        return [name for name in self.checkpoint.tensors if name not in self._read]

    def _full(self, name: str) -> str:
        inside = f"{self._prefix}.{name}"
        return inside if inside in self._expected else name
