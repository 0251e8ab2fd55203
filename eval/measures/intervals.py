"""Compute 95 % intervals of per-token means by resampling whole documents.

Tokens of one document are not independent, so whole documents are drawn, with replacement. Numerator and denominator
of a mean use the same draw, and so do the two models of a comparison: the bootstrap is paired (Efron & Tibshirani 1993,
"An Introduction to the Bootstrap", chapters 10 and 14; BCa intervals).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..results import ReportedEstimate

LEVEL = 0.95
RESAMPLES = 2000
SEED = 0
_DRAWN_AT_ONCE = 4_000_000
"""Numbers that scipy may hold at once: all draws of a large corpus together would not fit into memory."""

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Estimate:
    """A value and its 95 % interval. Low and high are None for a single document, which cannot be resampled."""

    value: float
    low: float | None
    high: float | None

    def map(self, function: Callable[[float], float]) -> Estimate:
        """Put the estimate on another scale by an increasing function."""
        if self.low is None or self.high is None:
            return Estimate(function(self.value), None, None)
        return Estimate(function(self.value), function(self.low), function(self.high))

    def reported(self) -> ReportedEstimate:
        """Turn infinite and undefined numbers into None, as results.json holds no others."""
        finite = [
            number if number is not None and math.isfinite(number) else None
            for number in (self.value, self.low, self.high)
        ]
        return ReportedEstimate(value=finite[0], low=finite[1], high=finite[2])


def ratio_estimate(numerators: Array, denominators: Array) -> Estimate:
    """Estimate ``sum(numerators) / sum(denominators)``.

    Args:
        numerators: one sum per document, e.g. nats.
        denominators: the matching weights, such as tokens. Their sum over any draw must not be zero.
    """
    value = float(numerators.sum() / denominators.sum())
    if len(numerators) < 2:
        return Estimate(value, None, None)
    if np.array_equal(numerators, value * denominators):
        return Estimate(value, value, value)  # every draw gives the same ratio, for which BCa is undefined
    low, high = _bootstrap(numerators, denominators, "BCa")
    # BCa fails where leaving out any one document changes nothing; the plain percentiles still exist then.
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
        warnings.simplefilter("ignore", DegenerateDataWarning)  # the caller checks the numbers instead
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


def mean_estimate(values: Array) -> Estimate:
    """Estimate the mean of values that count the same."""
    return ratio_estimate(values, np.ones_like(values))


def float_array(numbers: Iterable[float]) -> Array:
    """Make a float64 array of any numbers."""
    return np.array([float(number) for number in numbers], dtype=np.float64)
