"""Turn an out-of-memory error into a message with a remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ...errors import HeadfoldError

_OF_THE_CPU = "DefaultCPUAllocator"
"""Start of messages of torch's allocator for main memory, for which torch has no exception of its own."""


@contextmanager
def reporting_out_of_memory(device: torch.device | str, doing: str, needs: Callable[[], str]) -> Iterator[None]:
    """Turn "out of memory" inside the block into an error that a user can act on.

    Args:
        doing: name of the step, such as ``Refinement``.
        needs: returns a sentence, without its full stop, about the memory that the step takes; called only when memory
            ran out.

    Raises:
        HeadfoldError: instead of the allocator's error.
    """
    try:
        yield
    except RuntimeError as problem:
        # Any other RuntimeError is a fault, whose traceback is needed.
        if not isinstance(problem, torch.OutOfMemoryError) and _OF_THE_CPU not in str(problem):
            raise
        on_cpu = torch.device(device).type == "cpu"
        raise HeadfoldError(
            f"{doing} ran out of memory on {device}: {needs()}.",
            "Give a smaller --sequence-length."
            if on_cpu
            else "Give --device cpu, which takes longer, or a smaller --sequence-length.",
        ) from problem
