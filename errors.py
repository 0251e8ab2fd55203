"""Errors for users. Each says what went wrong, and hints at what to do about it."""

from __future__ import annotations


class HeadfoldError(Exception):
    """Something failed for a reason the user can act on.

    Args:
        message: one sentence: what failed, and why.
        hint: what to type or change, shown on a line of its own.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(HeadfoldError):
    """The request itself is wrong: a path, a number or a recipe key. Nothing was started."""

    exit_code = 2


class CheckpointError(HeadfoldError):
    """The files of a checkpoint are damaged, incomplete or contradict each other."""


class UnsupportedError(HeadfoldError):
    """The checkpoint is sound, but headfold cannot convert or run it correctly, and refuses."""


class DataError(HeadfoldError):
    """Text cannot be used: it is empty, unreadable or too short."""


class TrainingError(HeadfoldError):
    """Training cannot go on, for example because the loss is not a number."""


class Interrupted(HeadfoldError):
    """A signal asked the run to stop. Its state is saved, and the same command continues it."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h: try again later


_LONGEST_REASON = 300


def reason(problem: BaseException) -> str:
    """Shorten an error of another library to one line that holds its reason, for a sentence of ours."""
    lines = [" ".join(line.split()) for line in str(problem).splitlines() if line.strip()]
    if isinstance(problem, (KeyError, IndexError)) or not lines:  # they say nothing but the key
        return f"{type(problem).__name__} {' '.join(lines)}".rstrip()
    said = lines.pop(0)
    # Validators name the field on the first line, and what is wrong with it on the next ones.
    while (
        lines
        and (said.endswith((":", ",", " or", " and")) or "validation error" in said.lower())
        and len(said) < _LONGEST_REASON
    ):
        said = f"{said} {lines.pop(0)}"
    return said if len(said) <= _LONGEST_REASON else f"{said[:_LONGEST_REASON].rstrip()} …"
