"""The tensors of a source by the names of its model class, whatever they are called on disk."""

from __future__ import annotations

import math
from typing import Any

from transformers import PreTrainedModel

from ...checkpoint.header import FLOATS
from ...checkpoint.source import Checkpoint
from ...errors import CheckpointError, UnsupportedError
from ...libraries.transformers_internals import memory_names
from ..family.meta_model import build, model_class
from .decoder import Linear, Norm
from .lazy import Lazy


class Reader:
    """Hands out the tensors of a checkpoint and remembers which were asked for."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        model: PreTrainedModel = build(model_class(checkpoint.config), checkpoint.config)
        self.checkpoint = checkpoint
        self.config: Any = model.config
        self._prefix = model.base_model_prefix
        self._expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self._on_disk = {memory: disk for disk, memory in memory_names(model, list(checkpoint.tensors)).items()}
        self._read: set[str] = set()

    def tensor(self, name: str) -> Lazy:
        """The tensor that the model class calls ``name`` inside its decoder (``h.0.ln_1.weight``) or its head.

        Raises:
            CheckpointError: it is missing or has another shape than config.json asks for.
            UnsupportedError: it is stored as codes.
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
            raise UnsupportedError(f"{disk} is stored as {info.dtype}, which cannot be computed with.")
        self._read.add(disk)
        return Lazy(info.shape, info.dtype, info.file, lambda: self.checkpoint.read(disk))

    def optional(self, name: str) -> Lazy | None:
        """The same, or None where its class has no such tensor."""
        return self.tensor(name) if self._full(name) in self._expected else None

    def norm(self, name: str) -> Norm:
        """A LayerNorm."""
        return Norm(self.optional(f"{name}.weight"), self.optional(f"{name}.bias"))

    def linear(self, name: str) -> Linear:
        """A ``torch.nn.Linear``."""
        return Linear(self.tensor(f"{name}.weight"), self.optional(f"{name}.bias"))

    def head(self, name: str = "lm_head") -> Linear | None:
        """The output head, or None where config.json ties it to the embedding and the file has none of its own."""
        if self.config.tie_word_embeddings and name + ".weight" not in self._on_disk:
            return None
        return self.linear(name)

    def unused(self) -> list[str]:
        """Tensors on disk that nothing asked for: buffers of old versions, for example causal masks."""
        return [name for name in self.checkpoint.tensors if name not in self._read]

    def _full(self, name: str) -> str:
        inside = f"{self._prefix}.{name}"
        return inside if inside in self._expected else name


def by_side(linear: Linear, change: Any) -> Linear:
    """``change`` applied to the rows of weight and bias alike."""
    return Linear(linear.weight.then(change), None if linear.bias is None else linear.bias.then(change))


def even_rotary_dim(head_dim: int, factor: Any) -> int:
    """How many rows of a head are rotated.

    Raises:
        CheckpointError: ``factor`` is no share.
        UnsupportedError: the number is odd, so that rows have no partner.
    """
    if not isinstance(factor, (int, float)) or not 0 <= factor <= 1:
        raise CheckpointError(f"config.json rotates {factor} of every head.", "Repair config.json.")
    dim = int(head_dim * factor)
    if dim % 2:
        raise UnsupportedError(f"Its rotary position embedding turns an odd number of rows ({dim} of {head_dim}).")
    return dim


def factor_for(head_dim: int, rotary_dim: int) -> float:
    """The share of a head that is rotated, such that ``int(head_dim * share)`` is ``rotary_dim`` again."""
    share = rotary_dim / head_dim
    return share if int(head_dim * share) == rotary_dim else math.nextafter(share, 1)
