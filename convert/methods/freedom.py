"""What a method may turn in the heads of a family, in words for the record and for ``--dry-run``."""

from __future__ import annotations

from .attention_layer import AttentionLayer

_TURNS = {"aligned": ("a phase", "a rotation"), "aligned+rescale": ("a phase", "a rotation")}
_FREE = ("a complex number", "any invertible map")
"""For a rotary plane, and for rows that are not rotated; what ``aligned`` uses of it, and all that is exact."""


def freedom(block: AttentionLayer, method: str) -> str:
    """What ``method`` turns in one block: ``keys: a complex number per rotary plane; values: any invertible map``."""
    plane, rows = _TURNS.get(method, _FREE)
    return f"keys: {_of_keys(block, plane, rows)}; values: {rows}"


def _of_keys(block: AttentionLayer, plane: str, rows: str) -> str:
    if block.keys_normed:
        return "a sign per rotary plane or row, or a phase where the two weights of the q/k norm are equal"
    rotated = 0 if block.rotary is None or block.rotary.layout == "none" else block.rotary.dim
    parts = ([f"{plane} per rotary plane"] if rotated else []) + ([rows] if rotated < block.head_dim else [])
    return f"{parts[0]}, {parts[1]} of the rows not rotated" if len(parts) == 2 else parts[0]
