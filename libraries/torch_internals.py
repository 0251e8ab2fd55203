"""Parts of torch that headfold relies on although they are private (tested with 2.13).

tests/libraries/test_torch_internals.py fails if one of them changes.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def offset_in_file(tensor: torch.Tensor) -> int | None:
    """Find the byte at which a tensor's storage begins in the file that ``torch.load`` read onto the meta device.

    None for files in the format of torch before 1.6.
    """
    return getattr(tensor.untyped_storage(), "_checkpoint_offset", None)


class LiveTensors(TorchDispatchMode):
    """Adds up the storage that operations allocate while it is active, until that storage is freed.

    torch reports the most memory in use for CUDA alone. Only a dispatch mode sees every tensor that an operation makes.

    Attributes:
        peak: the most bytes that were alive at once.
    """

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
