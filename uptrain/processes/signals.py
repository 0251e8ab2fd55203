"""Stop cleanly on SIGTERM and SIGINT: the first asks, the second insists."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_STOPPING = (signal.SIGTERM, signal.SIGINT)
_ECHO_SECONDS = 2.0
"""A terminal or Slurm signals launcher and processes alike, and the launcher passes it on: that is one wish."""


class StopRequest:
    """True once a signal asked the run to stop."""

    def __init__(self) -> None:
        self.asked = False

    def __bool__(self) -> bool:
        return self.asked


@contextmanager
def stop_on_signal() -> Iterator[StopRequest]:
    """Note the first SIGTERM or SIGINT instead of dying; a second one, two seconds later or more, ends the process.

    Outside the main thread Python cannot catch signals, and they keep their usual effect.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.getsignal(number) for number in _STOPPING}
    asked_at = 0.0

    def restore() -> None:
        for caught in _STOPPING:
            signal.signal(caught, before[caught] or signal.SIG_DFL)

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked_at
        now = time.monotonic()
        if not request.asked:
            request.asked, asked_at = True, now
        elif now - asked_at >= _ECHO_SECONDS:
            restore()
            signal.raise_signal(number)

    for number in _STOPPING:
        signal.signal(number, ask)
    try:
        yield request
    finally:
        restore()
