from __future__ import annotations

import time

import pytest
from headfold import console
from headfold.console import human_bytes, human_seconds, parse_bytes
from headfold.errors import UsageError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("5GB", 5 * 10**9),
        ("500MB", 500 * 10**6),
        ("2GiB", 2**31),
        ("1.5 kb", 1500),
        ("200", 200),
        ("24GB", 24 * 10**9),
        ("1.5 GiB", 3 * 2**29),
        ("512m", 512 * 10**6),
        ("100", 100),
        (" 1 tib ", 2**40),
        ("3B", 3),
    ],
)
def test_sizes(text, size):
    assert parse_bytes(text, "memory") == size


@pytest.mark.parametrize(
    "text", ["", "GB", "5 parsecs", "-5GB", "0", "0.1", "1e9", "24 bananas", "-3GB", "0GB", "12x", "iB", "1 i"]
)
def test_text_that_is_not_a_size_is_refused(text):
    with pytest.raises(UsageError, match="is not a valid shard size"):
        parse_bytes(text, "shard")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.50 KiB"),
        (-1536, "-1.50 KiB"),
        (2.5 * 2**40, "2.50 TiB"),
        (2**51, "2048.00 TiB"),
    ],
)
def test_bytes_for_people(count, text):
    assert human_bytes(count) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0s"), (59.6, "1m00s"), (75, "1m15s"), (3700, "1h01m")])
def test_seconds_for_people(seconds, text):
    assert human_seconds(seconds) == text


@pytest.mark.parametrize(
    ("number", "noun", "shown"),
    [
        (1, "document", "1 document"),
        (0, "token", "0 tokens"),
        (2, "KV head", "2 KV heads"),
        (1234, "row", "1,234 rows"),
    ],
)
def test_one_thing_is_not_called_things(number, noun, shown):
    assert console.counted(number, noun) == shown


@pytest.mark.parametrize(
    ("done", "total", "seconds", "shown"),
    [
        (35, 100, 130, "refinement: 35 % · 2m10s so far · about 4m01s left"),
        (0, 100, 30, "refinement: 0 % · 30s so far"),
        (7, None, 61, "refinement: 1m01s so far"),
        (100, 100, 90, "refinement: 100 % · 1m30s so far"),
    ],
)
def test_a_line_of_progress_says_share_and_time_left(done, total, seconds, shown):
    assert console.progress_line("refinement", done, total, seconds) == shown


def test_without_a_terminal_a_long_step_prints_lines_even_within_one_unit(capfd, monkeypatch):
    """A log showed nothing for an hour, and nobody knew whether the run was alive."""
    monkeypatch.setattr(console, "_LINE_SECONDS", 0.05)
    with console.progress("copying", 4) as advance:
        advance()
        time.sleep(0.3)
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) >= 2
    assert lines[0].startswith("copying: 25 % · ")
    assert "left" in lines[0]
    time.sleep(0.15)
    assert capfd.readouterr().err == ""


def test_a_short_step_prints_nothing(capfd):
    with console.progress("copying", 4) as advance:
        advance(4)
    assert capfd.readouterr().err == ""


def test_only_the_first_process_prints_lines(capfd, monkeypatch):
    monkeypatch.setattr(console, "_LINE_SECONDS", 0.01)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with console.progress("copying", 4) as advance:
        advance()
        time.sleep(0.1)
    assert capfd.readouterr().err == ""
