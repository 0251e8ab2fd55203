"""Edit config.json as text: one number changes, every other byte stays."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()


def with_number(text: str, path: Sequence[str], value: int | bool, after: str) -> str:
    """``text`` with the number or truth value at ``path`` set to ``value``.

    Args:
        text: a valid JSON object.
        path: keys from the top; all but the last lead to objects that exist.
        after: where the last key is missing, it is added behind this one (at the end where that is missing too).
    """
    start = _SPACE.match(text).end()  # type: ignore[union-attr]
    for key in path[:-1]:
        start = _members(text, start)[key][1]
    members = _members(text, start)
    if path[-1] in members:
        _, begin, end = members[path[-1]]
        return f"{text[:begin]}{json.dumps(value)}{text[end:]}"
    return _inserted(text, start, members, path[-1], value, after)


def _members(text: str, start: int) -> dict[str, tuple[int, int, int]]:
    """Key → (begin of the key, begin of its value, end), for the object at ``start``; of a repeated key, the last."""
    found: dict[str, tuple[int, int, int]] = {}
    position = start + 1
    while True:
        position = _skip(text, position, ",")
        if text[position] == "}":
            return found
        key, after_key = _DECODER.raw_decode(text, position)
        value_begin = _skip(text, after_key, ":")
        _, value_end = _DECODER.raw_decode(text, value_begin)
        found[key] = (position, value_begin, value_end)
        position = value_end


def _skip(text: str, position: int, mark: str) -> int:
    """The next position that is neither white space nor ``mark``."""
    while text[position] in " \t\r\n" or text[position] == mark:
        position += 1
    return position


def _inserted(
    text: str, start: int, members: dict[str, tuple[int, int, int]], key: str, value: int | bool, after: str
) -> str:
    if not members:
        return f'{text[: start + 1]}"{key}": {json.dumps(value)}{text[start + 1 :]}'
    begin, _, end = members.get(after) or list(members.values())[-1]
    gap_begin = max(text.rfind(mark, 0, begin) for mark in "{,") + 1
    gap = text[gap_begin:begin]  # line break and indentation, as the neighbour has it
    return f'{text[:end]},{gap}"{key}": {json.dumps(value)}{text[end:]}'
