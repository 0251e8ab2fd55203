"""Memory: the most that a computation holds at once, and what fits into a device of a given size."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
    with _LiveTensors() as live:
        compute()
    return int(live.peak)


class _LiveTensors(TorchDispatchMode):
    """Adds up the storage that operations allocate while it is active, until it is freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak: int = 0
        self._now: int = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if _counts(leaf)}
        for made in tree_leaves(result):
            if _counts(made) and made.untyped_storage().data_ptr() not in given:  # no view of an argument
                self._count(made.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        size = storage.nbytes()
        self._now += size
        self.peak = max(self.peak, self._now)
        weakref.finalize(storage, self._freed, size)

    def _freed(self, size: int) -> None:
        self._now -= size


def _counts(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.device.type != "meta"


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
