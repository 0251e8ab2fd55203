"""95 % intervals of per-token means, from resampling whole documents.

Tokens of one document are not independent, so documents are what is drawn (with replacement). Numerator and
denominator of a mean, and the two models of a comparison, keep the same draw: the bootstrap is paired
(Efron & Tibshirani 1993, "An Introduction to the Bootstrap", chapters 10 and 14; BCa intervals).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

LEVEL = 0.95
RESAMPLES = 2000
SEED = 0
_DRAWN_AT_ONCE = 4_000_000

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Estimate:
    """A value and its 95 % interval; no interval (None) where a single document leaves nothing to resample."""

    value: float
    low: float | None
    high: float | None

    def map(self, function: Callable[[float], float]) -> Estimate:
        """The same estimate on another scale; ``function`` must increase."""
        if self.low is None or self.high is None:
            return Estimate(function(self.value), None, None)
        return Estimate(function(self.value), function(self.low), function(self.high))

    def as_dict(self) -> dict[str, float | None]:
        """Numbers that JSON can hold: an infinite or undefined one becomes None."""
        numbers = {"value": self.value, "low": self.low, "high": self.high}
        return {
            name: number if number is not None and math.isfinite(number) else None for name, number in numbers.items()
        }


def ratio_estimate(numerators: Array, denominators: Array) -> Estimate:
    """``sum(numerators) / sum(denominators)`` with its interval.

    Args:
        numerators: one sum per document, e.g. nats.
        denominators: the matching weights, e.g. tokens; their sum over any draw must not be zero.
    """
    value = float(numerators.sum() / denominators.sum())
    if len(numerators) < 2:
        return Estimate(value, None, None)
    if np.array_equal(numerators, value * denominators):
        return Estimate(value, value, value)  # every draw gives the same; BCa has no answer to that
    low, high = _bootstrap(numerators, denominators, "BCa")
    if not (math.isfinite(low) and math.isfinite(high)):
        low, high = _bootstrap(numerators, denominators, "percentile")
    return Estimate(value, low, high)


def _bootstrap(numerators: Array, denominators: Array, method: str) -> tuple[float, float]:
    import warnings

    from scipy.stats import DegenerateDataWarning, bootstrap

    def ratio(numerator: Array, denominator: Array, axis: int = -1) -> Array:
        quotient: Array = numerator.sum(axis=axis) / denominator.sum(axis=axis)
        return quotient

    with warnings.catch_warnings(), np.errstate(divide="ignore", invalid="ignore"):
        warnings.simplefilter("ignore", DegenerateDataWarning)  # the caller looks at the numbers instead
        warnings.simplefilter("ignore", RuntimeWarning)
        found = bootstrap(
            (numerators, denominators),
            ratio,
            paired=True,
            vectorized=True,
            n_resamples=RESAMPLES,
            batch=max(1, _DRAWN_AT_ONCE // len(numerators)),
            confidence_level=LEVEL,
            method=method,
            rng=np.random.default_rng(SEED),
        ).confidence_interval
    return float(found.low), float(found.high)
