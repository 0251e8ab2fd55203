"""Held-out perplexity over uptraining tokens, as the trainer wrote it down."""

from __future__ import annotations

import json
from pathlib import Path

from ...checkpoint.record import METRICS_NAME
from ...console import warn


def read_recovery(folder: Path) -> list[dict[str, float]]:
    """Points ``{"tokens", "perplexity"}`` in order of tokens; empty where the folder was not uptrained."""
    file = folder / METRICS_NAME
    if not file.is_file():
        return []
    points = []
    for number, text in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            line = json.loads(text)
            if line["kind"] == "eval":
                points.append({"tokens": float(line["tokens"]), "perplexity": float(line["perplexity"])})
        except (json.JSONDecodeError, KeyError, TypeError, ValueError):
            warn(f"Line {number} of {file} cannot be read and is left out of the recovery plot.")
    return sorted(points, key=lambda point: point["tokens"])
