from __future__ import annotations

import os
import signal
import threading

import pytest
from headfold.uptrain.processes import signals
from headfold.uptrain.processes.signals import stop_on_signal


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is set."""
    now = [100.0]
    monkeypatch.setattr(signals.time, "monotonic", lambda: now[0])
    return now


def test_the_first_signal_asks_and_its_echo_changes_nothing(clock):
    """A terminal signals all processes, and the launcher passes its own on."""
    with stop_on_signal() as stop:
        assert not stop
        os.kill(os.getpid(), signal.SIGINT)
        clock[0] += 1
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop


def test_a_second_signal_ends_the_process_at_once(clock):
    with stop_on_signal():
        os.kill(os.getpid(), signal.SIGINT)
        clock[0] += 3
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_signal_handlers_are_restored(clock):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with stop_on_signal():
        assert signal.getsignal(signal.SIGTERM) != before[0]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_outside_the_main_thread_signals_keep_their_effect():
    seen = []

    def run():
        with stop_on_signal() as stop:
            seen.append(bool(stop))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [False]
