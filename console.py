"""Talk to a person on stderr (log lines, progress) and print data on stdout (tables)."""

from __future__ import annotations

import io
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.filesize import pick_unit_and_suffix
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from .errors import UsageError

talk = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False, markup=False)
"""stderr, for progress and warnings. rich honours NO_COLOR, and drops colours if stderr is not a terminal."""
data = Console(highlight=False, soft_wrap=True, emoji=False, markup=False)
"""stdout, for the result of the command. Neither reads markup: a path may look like it (``[x]``, ``run:100:x``)."""


def replace_what_a_stream_cannot_print() -> None:
    """Print "?" for signs that the terminal's encoding lacks. Cron, containers and old terminals know ASCII alone."""
    for stream in (sys.stdout, sys.stderr):
        # streams of tests and notebooks may be of another class
        if isinstance(stream, io.TextIOWrapper) and not (stream.encoding or "").lower().startswith("utf"):
            stream.reconfigure(errors="replace")


_LAUNCH = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
"""What torchrun and accelerate tell each process of a run: which one it is, and how many there are."""


def is_main_process() -> bool:
    """Return True if this process may talk: the only one, or the first of several.

    Raises:
        UsageError: the launcher's variables hold no numbers.
    """
    return process_count() == 1 or _launch_number("RANK", 0) == 0


def process_count() -> int:
    """Count the processes of this run, as the launcher says.

    Raises:
        UsageError: the launcher's variables hold no numbers.
    """
    return max(1, _launch_number("WORLD_SIZE", 1))


def drop_half_set_launch() -> None:
    """Remove launcher variables that no launcher set: job templates leave them empty, or set a rank alone.

    accelerate would wait for other processes, or fail on the empty word.
    """
    if not os.environ.get("WORLD_SIZE", "").strip():
        for variable in _LAUNCH:
            os.environ.pop(variable, None)


def _launch_number(variable: str, default: int) -> int:
    text = os.environ.get(variable, "").strip()
    if not text:
        return default
    if not text.isascii() or not text.isdigit():
        raise UsageError(
            f"The environment variable {variable} is {text!r}, which is not a number of processes.",
            f"Unset it: env -u {variable} headfold … Launchers such as accelerate launch set it themselves.",
        )
    return int(text)


def info(message: str) -> None:
    """Print one line of progress in words."""
    if is_main_process():
        talk.print(_printable(message))


def warn(message: str) -> None:
    """Print one line about something the user may not expect."""
    if is_main_process():
        talk.print(_labelled("warning:", "yellow", message))


def error(message: str, hint: str | None = None) -> None:
    """Print the sentence that ends a failed command, and its hint."""
    talk.print(_labelled("error:", "bold red", message))
    if hint:
        talk.print(_labelled("hint:", "bold cyan", hint))


def stopped(message: str, hint: str | None = None) -> None:
    """Print that a signal stopped the command, which is no error, and what the same command does next."""
    talk.print(_labelled("stopped:", "bold yellow", message))
    if hint:
        talk.print(_labelled("hint:", "bold cyan", hint))


def _labelled(label: str, style: str, message: str) -> Text:
    return Text.assemble((label, style), " ", _printable(message))


def _printable(text: str) -> str:
    """Write what no encoding has, such as a byte of a path that is not UTF-8, as ``\\udcff``."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, markdown: bool = False) -> None:
    """Print a table on stdout. The first column is left-aligned, the others hold numbers.

    Args:
        markdown: print Markdown, to be pasted into a document.
    """
    if markdown:
        lines = [columns, ["---", *["--:"] * (len(columns) - 1)], *rows]
        text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        data.print(_printable(f"{title}\n\n{text}\n"))
        return
    grid = Table(title=Text(_printable(title)), title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        grid.add_column(Text(_printable(column)), justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        grid.add_row(*(Text(_printable(cell)) for cell in row))
    data.print(grid)


class Advance(Protocol):
    """Moves a progress bar on by a number of units that were just done."""

    def __call__(self, amount: float = 1) -> None: ...


@contextmanager
def progress(description: str, total: float | None) -> Iterator[Advance]:
    """Show a bar with elapsed and remaining time on a terminal. Elsewhere print a line every half minute.

    Args:
        description: what is being done, a few words.
        total: units of work; None if their number is unknown.
    """
    if not is_main_process():
        yield _no_advance
    elif talk.is_terminal:
        with _bar(description, total) as advance:
            yield advance
    else:
        with _lines(description, total) as advance:
            yield advance


@contextmanager
def _bar(description: str, total: float | None) -> Iterator[Advance]:
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=talk, transient=True) as bars:
        task = bars.add_task(_printable(description), total=total)

        def advance(amount: float = 1) -> None:
            bars.advance(task, amount)

        yield advance


_LINE_SECONDS = 30.0


@contextmanager
def _lines(description: str, total: float | None) -> Iterator[Advance]:
    """Print the share that is done and the time that is left, also while a single unit of work takes long."""
    done, began, over = 0.0, time.monotonic(), threading.Event()

    def advance(amount: float = 1) -> None:
        nonlocal done
        done += amount

    def tell() -> None:
        while not over.wait(_LINE_SECONDS):
            info(progress_line(description, done, total, time.monotonic() - began))

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield advance
    finally:
        over.set()
        teller.join()


def progress_line(description: str, done: float, total: float | None, seconds: float) -> str:
    """Write ``refinement: 35 % · 2m10s so far · about 4m01s left``."""
    parts = [] if not total else [f"{100 * min(done / total, 1):.0f} %"]
    parts.append(f"{human_seconds(seconds)} so far")
    if total and 0 < done < total:
        parts.append(f"about {human_seconds(seconds * (total - done) / done)} left")
    return f"{description}: {' · '.join(parts)}"


def _no_advance(amount: float = 1) -> None:
    pass


def human_bytes(count: float) -> str:
    """Write 1536 as '1.50 KiB', in binary units, as allocators and file systems count."""
    unit, suffix = pick_unit_and_suffix(abs(int(count)), ["B", "KiB", "MiB", "GiB", "TiB"], 1024)
    return f"{count / unit:.{0 if unit == 1 else 2}f} {suffix}"


# Not transformers' or accelerate's parsers of sizes: they take -5GB, and read 5Gb as bits.
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(I?))?B?\s*", re.IGNORECASE)


def parse_bytes(text: str, kind: str) -> int:
    """Read a size: ``24GB`` (decimal, as disks and devices are sold), ``22.5GiB`` (binary), ``200`` (bytes).

    Args:
        kind: what it is the size of, for the message: ``memory``.

    Raises:
        UsageError: it is not a size, or less than one byte.
    """
    found = _SIZE.fullmatch(text)
    power = "KMGT".find((found[2] or " ").upper()) + 1 if found else 0
    size = int(float(found[1]) * (1024 if found[3] else 1000) ** power) if found else 0
    if size < 1:
        raise UsageError(f"{text!r} is not a valid {kind} size.", "Write it as 24GB, 500MB or 2GiB.")
    return size


def counted(number: int, noun: str) -> str:
    """Write '1 document' or '1,200 documents'."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def human_seconds(seconds: float) -> str:
    """Write 75 as '1m15s', and above one hour only hours and minutes."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def result(path: object) -> None:
    """Print the path of what a command made, as the last line on stdout, for scripts to read."""
    if is_main_process():
        exact(str(path))


def exact(text: str) -> None:
    """Print a line on stdout to the byte: rich would expand tabs, and no encoding has the bytes of some paths."""
    stream = data.file
    stream.flush()
    if hasattr(stream, "buffer"):
        stream.buffer.write(os.fsencode(text + "\n"))
        stream.buffer.flush()
    else:
        stream.write(text + "\n")
