"""Stop cleanly on SIGTERM and SIGINT: the first signal asks, a later one ends the process."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_STOPPING = (signal.SIGTERM, signal.SIGINT)
_ECHO_SECONDS = 2.0
"""A terminal or Slurm signals launcher and processes alike, and the launcher passes it on: that is one request."""


class StopSignal:
    """Becomes true when a signal asks the run to stop."""

    def __init__(self) -> None:
        self.received = False

    def __bool__(self) -> bool:
        return self.received


@contextmanager
def stop_on_signal() -> Iterator[StopSignal]:
    """Note the first SIGTERM or SIGINT instead of dying. A second one, at least two seconds later, ends the process.

    Outside the main thread Python cannot catch signals, and they keep their usual effect.
    """
    stop = StopSignal()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in _STOPPING}
    received_at = 0.0

    def restore() -> None:
        for caught in _STOPPING:
            # None stands for a handler that was not set from Python and cannot be set again
            signal.signal(caught, before[caught] or signal.SIG_DFL)

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal received_at
        now = time.monotonic()
        if not stop.received:
            stop.received, received_at = True, now
        elif now - received_at >= _ECHO_SECONDS:
            restore()
            # the handler from before ends the process
            signal.raise_signal(number)

    for number in _STOPPING:
        signal.signal(number, note)
    try:
        yield stop
    finally:
        restore()
