"""Stop cleanly on SIGTERM and SIGINT: the first asks, the second insists."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_STOPPING = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """True once a signal asked the run to stop."""

    def __init__(self) -> None:
        self.asked = False

    def __bool__(self) -> bool:
        return self.asked


@contextmanager
def stop_on_signal() -> Iterator[StopRequest]:
    """Note the first SIGTERM or SIGINT instead of dying; the second has its usual effect.

    Outside the main thread Python cannot catch signals, and they keep their usual effect.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.getsignal(number) for number in _STOPPING}

    def ask(number: int, frame: FrameType | None) -> None:
        request.asked = True
        for caught in _STOPPING:
            signal.signal(caught, before[caught] or signal.SIG_DFL)

    for number in _STOPPING:
        signal.signal(number, ask)
    try:
        yield request
    finally:
        for number in _STOPPING:
            signal.signal(number, before[number] or signal.SIG_DFL)
