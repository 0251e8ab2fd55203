"""Tensors of a rewritten checkpoint: shape and dtype are known at once, the values are computed when they are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...checkpoint.header import torch_dtype
from ...errors import CheckpointError


@dataclass(frozen=True)
class LazyTensor:
    """One tensor whose values are computed on demand.

    Attributes:
        dtype: dtype in which it is stored, as safetensors spells it.
        file: weight file of the source that it comes from. The result has the same shards.
        compute: returns the values, in ``dtype`` or wider.
    """

    shape: tuple[int, ...]
    dtype: str
    file: Path
    compute: Callable[[], Tensor]

    def then(self, change: Callable[[Tensor], Tensor]) -> LazyTensor:
        """Apply ``change`` to this tensor."""
        return combined(change, self)

    def filled(self, shape: tuple[int, ...], value: float) -> LazyTensor:
        """Make a tensor of one repeated value, in the dtype and file of this one."""
        return LazyTensor(shape, self.dtype, self.file, lambda: torch.full(shape, value, dtype=torch_dtype(self.dtype)))


def combined(change: Callable[..., Tensor], *parts: LazyTensor) -> LazyTensor:
    """Apply ``change`` to several tensors. The first one determines dtype and file of the result."""
    # On the meta device `change` computes shapes alone, so the result's shape costs nothing.
    sketch = change(*(torch.empty(part.shape, dtype=torch_dtype(part.dtype), device="meta") for part in parts))
    first = parts[0]
    return LazyTensor(tuple(sketch.shape), first.dtype, first.file, lambda: change(*(part.compute() for part in parts)))


def at_least_float32(tensor: Tensor) -> Tensor:
    """Widen 16-bit weights, so that sums and products of them are rounded once, when they are stored."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def require_finite(name: str, tensor: Tensor, dtype: str) -> None:
    """Refuse a tensor whose values do not fit into the dtype that it is stored in.

    Raises:
        CheckpointError: a value overflows.
    """
    if tensor.dtype != torch_dtype(dtype) and not torch.isfinite(tensor.to(torch_dtype(dtype))).all():
        raise CheckpointError(
            f"{name} has values that are not finite, or do not fit into {dtype}.",
            "Save the source in bf16 or float32 and convert that.",
        )
