"""Tensors of a rewritten checkpoint: known by shape and dtype, computed when they are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...checkpoint.header import torch_dtype
from ...errors import CheckpointError


@dataclass(frozen=True)
class Lazy:
    """One tensor.

    Attributes:
        dtype: in which it is stored, as safetensors spells it.
        file: the weight file of the source that it comes from, so that shards keep their sizes.
        compute: gives the values, in ``dtype`` or wider.
    """

    shape: tuple[int, ...]
    dtype: str
    file: Path
    compute: Callable[[], Tensor]

    def then(self, change: Callable[[Tensor], Tensor]) -> Lazy:
        """``change`` applied to this tensor."""
        return combined(change, self)

    def filled(self, shape: tuple[int, ...], value: float) -> Lazy:
        """A tensor of one value that lies beside this one, in its dtype."""
        return Lazy(shape, self.dtype, self.file, lambda: torch.full(shape, value, dtype=torch_dtype(self.dtype)))


def combined(change: Callable[..., Tensor], *parts: Lazy) -> Lazy:
    """``change`` of several tensors; the first gives dtype and file.

    The shape is found by running ``change`` on the meta device, where it costs nothing.
    """
    sketch = change(*(torch.empty(part.shape, dtype=torch_dtype(part.dtype), device="meta") for part in parts))
    first = parts[0]
    return Lazy(tuple(sketch.shape), first.dtype, first.file, lambda: change(*(part.compute() for part in parts)))


def wide(tensor: Tensor) -> Tensor:
    """At least float32, in which sums and products of weights are computed."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def require_finite(name: str, tensor: Tensor, dtype: str) -> None:
    """Refuse a tensor whose values do not fit into the dtype that it will be stored in.

    Raises:
        CheckpointError: they do not.
    """
    if tensor.dtype != torch_dtype(dtype) and not torch.isfinite(tensor.to(torch_dtype(dtype))).all():
        raise CheckpointError(
            f"{name} has values that do not fit into {dtype}, or that are no numbers.",
            "Save the source in bf16 or float32 and convert that.",
        )
