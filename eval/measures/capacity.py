"""Measure the peak memory of a computation, and compute what fits into a device of a given size."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...libraries.torch_internals import LiveTensors
from ..results import CapacityBatch, ServingCapacity

SHARE = 0.9
"""Share of a device's memory for weights and cache. Activations and the allocator need the rest."""
_ENDLESS = 10**12
"""A number of tokens that only a cache with a sliding window in every layer can hold."""


def peak_bytes(device: torch.device, compute: Callable[[], Any]) -> int:
    """Measure the most bytes of tensors that ``compute`` holds at once, beyond those that existed before.

    On CUDA this is the allocator's own count. Elsewhere every tensor is counted from the operation that makes it until
    it is freed, so memory that a kernel uses inside one operation is not counted.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)  # else an earlier peak would be counted
        before = torch.cuda.memory_allocated(device)
        compute()
        return int(torch.cuda.max_memory_allocated(device) - before)
    with LiveTensors() as live:
        compute()
    return int(live.peak)


@dataclass(frozen=True)
class CacheSize:
    """Size of a model's KV cache. Lists have one entry per layer with a cache.

    Attributes:
        layer_bytes: growth per token of one sequence.
        kv_heads: heads in the cache.
        windows: most tokens that a layer with a sliding window stores, None where it stores all.
    """

    layer_bytes: list[float]
    kv_heads: list[int]
    windows: list[int | None]

    @property
    def bytes_per_token(self) -> float:
        """Add up the growth per token of one sequence, while no sliding window is full."""
        return sum(self.layer_bytes)

    def total(self, context: int) -> float:
        """Compute the bytes of one sequence of ``context`` tokens."""
        pairs = zip(self.layer_bytes, self.windows, strict=True)
        return sum(size * (context if window is None else min(context, window)) for size, window in pairs)


def capacity(memory: int, weights: int, cache: CacheSize, contexts: Sequence[int]) -> ServingCapacity:
    """Compute what fits into ``memory`` bytes: ``weights + batch × cache(context) ≤ 0.9 × memory``.

    Args:
        weights: bytes of the weights.
        cache: at the dtype that will be served.
        contexts: lengths of a sequence, each to be answered with the largest batch.
    """
    free = SHARE * memory - weights
    batches = [CapacityBatch(context=context, batch=max(0, int(free // cache.total(context)))) for context in contexts]
    return ServingCapacity(memory_bytes=memory, batches=batches, tokens=_longest(max(free, 0.0), cache))


def _longest(free: float, cache: CacheSize) -> int | None:
    """Find the largest context whose cache fits. A layer with a sliding window stops growing once it is full."""
    if cache.total(_ENDLESS) <= free:
        return None
    # bisection, since windows that fill up at different lengths leave no formula to invert
    return bisect_right(range(_ENDLESS), free, key=cache.total) - 1
