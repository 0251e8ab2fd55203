"""Memory: the most that a computation holds at once, and what fits into a device of a given size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...libraries.torch_internals import LiveTensors

SHARE = 0.9
"""Of a device's memory that weights and cache may take; the rest is for activations and the allocator."""
_ENDLESS = 10**12  # tokens; only a cache of nothing but sliding windows fits at that length


def peak_bytes(device: torch.device, compute: Callable[[], Any]) -> int:
    """Bytes of tensors that ``compute`` holds at most at once, beyond those that were there before.

    The allocator's own count on CUDA. Elsewhere every tensor is counted from the operation that makes it until it
    is freed; what a kernel takes for itself inside one operation is not seen there.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        compute()
        return int(torch.cuda.max_memory_allocated(device) - before)
    with LiveTensors() as live:
        compute()
    return int(live.peak)


@dataclass(frozen=True)
class CacheSize:
    """The KV cache as a model fills it, by layer that has one.

    Attributes:
        layer_bytes: growth per token of one sequence.
        kv_heads: heads in the cache.
        windows: tokens that a layer keeps at most (sliding windows), None where it keeps all.
    """

    layer_bytes: list[float]
    kv_heads: list[int]
    windows: list[int | None]

    @property
    def bytes_per_token(self) -> float:
        """Growth per token of one sequence while no sliding window is full."""
        return sum(self.layer_bytes)

    def total(self, context: int) -> float:
        """Bytes of one sequence of ``context`` tokens."""
        pairs = zip(self.layer_bytes, self.windows, strict=True)
        return sum(size * (context if window is None else min(context, window)) for size, window in pairs)


def capacity(memory: int, weights: int, cache: CacheSize, contexts: Sequence[int]) -> dict[str, Any]:
    """What fits into ``memory`` bytes: ``weights + batch × cache(context) ≤ 0.9 × memory``.

    Args:
        weights: bytes of the weights.
        cache: at the dtype that will be served.
        contexts: tokens of a sequence, each to be answered with the largest batch.

    Returns:
        ``memory_bytes``, ``batches`` (context and largest batch, 0 where not even the weights fit) and ``tokens``,
        the longest single sequence that fits (None where the cache stops growing before it is full).
    """
    free = SHARE * memory - weights
    batches = [{"context": context, "batch": max(0, int(free // cache.total(context)))} for context in contexts]
    return {"memory_bytes": memory, "batches": batches, "tokens": _longest(max(free, 0.0), cache)}


def _longest(free: float, cache: CacheSize) -> int | None:
    """The largest context whose cache fits; a layer with a window stops growing once it is full."""
    if cache.total(_ENDLESS) <= free:
        return None
    low, high = 0, _ENDLESS
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if cache.total(middle) <= free else (low, middle - 1)
    return low
