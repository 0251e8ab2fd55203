"""Refuse a config.json whose numbers no model ever had, before a class spends an hour on building it."""

from __future__ import annotations

import re
from typing import Any

from ...errors import CheckpointError

_LIMITS = (
    (re.compile(r"(num|n)_\w*layers?|n_layer|num_blocks|depths?"), 2_000),
    (re.compile(r"(num|n)_\w*(heads?|experts|groups|codebooks)|n_head"), 100_000),
)
"""Keys, and more than the largest model of that kind has by an order of magnitude."""


def refuse_absurd(config: dict[str, Any]) -> None:
    """Look at every number of layers, heads and experts, in sub-configs too.

    Raises:
        CheckpointError: one is far too large.
    """
    for key, value in config.items():
        if isinstance(value, dict):
            refuse_absurd(value)
        elif isinstance(value, (int, float)) and any(
            value > limit and pattern.fullmatch(key) for pattern, limit in _LIMITS
        ):
            raise CheckpointError(f"config.json says {key} = {value:,}, which no model has.", "Repair config.json.")
