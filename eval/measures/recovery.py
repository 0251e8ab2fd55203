"""Measure how much of the conversion's loss uptraining recovered."""

from __future__ import annotations

import json
from pathlib import Path

from ...checkpoint.record import METRICS_NAME
from ...console import warn
from ..results import RecoveredShare, RecoveryPoint
from .intervals import Array, Estimate, quotient_estimate, ratio_estimate


def least_loss(source_nats: Array, converted_nats: Array, tokens: Array) -> float | None:
    """Find the lower end of the interval of the nats per token that a conversion lost (None without an interval).

    A share of this loss is defined only if the end is above zero. Otherwise it would be a quotient of noise.

    Args:
        source_nats, converted_nats: summed over each document.
        tokens: of each document.
    """
    return ratio_estimate(converted_nats - source_nats, tokens).low


def recovered_share(source_nats: Array, converted_nats: Array, uptrained_nats: Array, tokens: Array) -> Estimate | None:
    """Estimate ln(ppl_c / ppl_u) / ln(ppl_c / ppl_s), the share of the lost log-perplexity that uptraining recovered.

    Args:
        source_nats, converted_nats, uptrained_nats: summed over each of the same documents.
        tokens: of each document.

    Returns:
        1 where the source is reached, None where it is not certain that the conversion lost anything.
    """
    least = least_loss(source_nats, converted_nats, tokens)
    if least is None or least <= 0:
        return None
    return quotient_estimate(converted_nats - uptrained_nats, converted_nats - source_nats, tokens)


def reported_recovery(
    source_nats: Array, converted_nats: Array, uptrained_nats: Array, tokens: Array, converted: str
) -> RecoveredShare:
    """Report :func:`recovered_share` with the name of the converted model, or the reason why there is none."""
    share = recovered_share(source_nats, converted_nats, uptrained_nats, tokens)
    if share is not None:
        return RecoveredShare(**dict(share.reported()), converted=converted)
    least = least_loss(source_nats, converted_nats, tokens)
    reason = "documents are too few for an interval" if least is None else "its interval reaches zero"
    missing = f"it is not certain that {converted} lost anything on this text: {reason}"
    return RecoveredShare(value=None, low=None, high=None, converted=converted, missing=missing)


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
