"""Paths of this machine: read as people write them, and kept out of what is published."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .errors import UsageError

_ABSOLUTE = re.compile(r"[/~]|file://|[A-Za-z]:[\\/]|\\\\")
_IN_A_SENTENCE = re.compile(r"(?<![\w.:/~-])(?:~\w*|file://|[A-Za-z]:)?[/\\](?:[^\s/\\'\"`,;:()<>|]+[/\\])+")


def expanded(path: str | Path) -> Path:
    """Replace a leading ``~`` by the home folder. A shell does not do so behind ``--out=``.

    Raises:
        UsageError: there is no such user.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as problem:
        raise UsageError(f"The home folder in {path} is unknown.", "Write the whole path.") from problem


def command_line(arguments: Sequence[str] | None = None) -> str:
    """Write the command line of this process, its program without a folder."""
    program, *words = sys.argv if arguments is None else arguments
    return shlex.join([Path(program).name, *words])


def public(value: Any) -> Any:
    """Shorten every absolute path in a JSON value to its last part: the rest may name a user or a project.

    Relative paths stay. Under the key ``command`` the words of command lines are looked at.
    """
    if isinstance(value, dict):
        return {
            key: public_command(one) if key == "command" and isinstance(one, str) else public(one)
            for key, one in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [public(one) for one in value]
    return last_part(value) if isinstance(value, str) else value


def public_command(text: str) -> str:
    """Shorten every absolute path in command lines."""
    return "\n".join(map(_public_line, text.splitlines()))


def _public_line(line: str) -> str:
    try:
        words = shlex.split(line)
    except ValueError:  # an older version wrote something else
        return public_sentence(line)
    return shlex.join(map(_public_word, words))


def _public_word(word: str) -> str:
    """Shorten a path, also behind ``--out=``."""
    option, equals, value = word.partition("=")
    return f"{option}={last_part(value)}" if equals and option.startswith("-") else last_part(word)


def last_part(text: str) -> str:
    """Shorten an absolute path to its last part, and leave anything else as it is."""
    if not _ABSOLUTE.match(text) or "\n" in text:
        return text
    separators = r"[/\\]" if "\\" in text[:3] else "/"
    return re.split(separators, text.rstrip("/\\"))[-1] or text


def public_sentence(text: str) -> str:
    """Shorten every absolute path within a sentence to its last part."""
    return _IN_A_SENTENCE.sub("", text)
