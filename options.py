"""Options that several commands share, and how they read numbers that are typed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from .errors import UsageError

Source = Annotated[
    str, typer.Argument(metavar="CHECKPOINT", help="Folder of the checkpoint, or its id on the Hugging Face hub.")
]
Out = Annotated[Path, typer.Option("--out", "-o", help="Folder to write. It appears whole or not at all.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the output folder if it exists.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be done, write nothing.")]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the checkpoint.")]


def numbers(text: str) -> list[int]:
    """``8,4,2,1``."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as problem:
        raise UsageError(f"{text!r} is no list of numbers.", "Write them as 8,4,2,1.") from problem


def share(text: str) -> float:
    """``2%`` or ``0.02``."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError as problem:
        raise UsageError(f"{text!r} is no share.", "Write it as 2% or 0.02.") from problem
    if not math.isfinite(value) or value < 0 or (value >= 1 and not text.endswith("%")):
        raise UsageError(f"{text!r} is no share.", "Write it as 2% or 0.02.")
    return value
