"""Measure how much of the conversion's loss uptraining recovered."""

from __future__ import annotations

import json
from pathlib import Path

from ...checkpoint.record import METRICS_NAME
from ...console import warn
from ..results import RecoveredShare, RecoveryPoint
from .intervals import Array, Estimate, ratio_estimate


def recovered_share(source_nats: Array, converted_nats: Array, uptrained_nats: Array) -> Estimate | None:
    """Estimate ln(ppl_c / ppl_u) / ln(ppl_c / ppl_s), the share of the lost log-perplexity that uptraining recovered.

    Args:
        source_nats, converted_nats, uptrained_nats: of the same texts, one number per document; for a single number
            per model, the logarithm of its perplexity.

    Returns:
        1 where the source is reached, None where the conversion lost nothing.
    """
    lost_nats = converted_nats - source_nats
    if lost_nats.sum() <= 0:
        return None
    return ratio_estimate(converted_nats - uptrained_nats, lost_nats)


def reported_recovery(
    source_nats: Array, converted_nats: Array, uptrained_nats: Array, converted: str
) -> RecoveredShare | None:
    """Report :func:`recovered_share`, with the name of the converted model."""
    share = recovered_share(source_nats, converted_nats, uptrained_nats)
    return None if share is None else RecoveredShare(**dict(share.reported()), converted=converted)


def read_recovery(folder: Path) -> list[RecoveryPoint]:
    """Read the trainer's held-out perplexities in order of tokens (empty where the folder was not uptrained)."""
    file = folder / METRICS_NAME
    if not file.is_file():
        return []
    points = []
    for number, text in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            line = json.loads(text)
            if line["kind"] == "eval":
                points.append(RecoveryPoint(tokens=float(line["tokens"]), perplexity=float(line["perplexity"])))
        except (KeyError, TypeError, ValueError):  # a run that was killed may leave half a line
            warn(f"Line {number} of {file} cannot be read and is left out of the recovery plot.")
    return sorted(points, key=lambda point: point.tokens)
