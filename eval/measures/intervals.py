"""Compute 95 % intervals of per-token means over documents of unequal length.

Tokens of one document are not independent, so documents are the units. The mean over all tokens is a mean of the
documents' own means, weighted by length, and one long document may hold much of the weight. Its error is estimated
twice: from each document's own deviation (the cluster-robust CR2 of Bell & McCaffrey 2002, with documents of equal
variance as the working model), and from the variance of all documents together. The larger one counts. How many such
errors an interval must span comes from a studentised bootstrap (Efron & Tibshirani 1993, chapter 12): deviations are
drawn with replacement, while the lengths stay as they are. Each end is the farther one of an equal-tailed and a
symmetric interval.

``benchmarks/coverage.py`` shows how often these intervals hold the truth. The two models of a comparison are paired:
their difference is taken document by document.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..results import ReportedEstimate

METHOD = "studentised bootstrap over documents, weighted by length"
LEVEL = 0.95
RESAMPLES = 2000
SEED = 0
FEWEST_DOCUMENTS = 5
FEWEST_EFFECTIVE = 2.0
"""Below these there is no interval, since none would hold its level."""
ENOUGH = (
    f"an interval needs at least {FEWEST_DOCUMENTS} documents, an effective number of {FEWEST_EFFECTIVE:g}, "
    "and documents that differ"
)
_DRAWN_AT_ONCE = 4_000_000
"""Numbers in memory at once: all draws of a large corpus together would not fit."""
_FARTHEST = 1e6
"""Quotients farther away than this count as unbounded."""
_NO_SPREAD = 1e-9
"""Standard errors below this share of the largest deviation are rounding."""

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Estimate:
    """A value and its 95 % interval. Low and high are None where documents are too few for one."""

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


def effective_number(weights: Array) -> float:
    """Count documents of equal length that would tell as much: ``(Σ t)² / Σ t²`` (Kish 1965)."""
    return float(weights.sum() ** 2 / (weights**2).sum())


def enough_documents(weights: Array) -> bool:
    """Tell whether documents of these lengths are enough for an interval."""
    return len(weights) >= FEWEST_DOCUMENTS and effective_number(weights) >= FEWEST_EFFECTIVE


def ratio_estimate(numerators: Array, denominators: Array) -> Estimate:
    """Estimate ``sum(numerators) / sum(denominators)``.

    Args:
        numerators: one sum per document, e.g. nats.
        denominators: the matching weights above zero, such as tokens.
    """
    value = float(numerators.sum() / denominators.sum())
    means = numerators / denominators
    if len(means) > 1 and np.ptp(means) <= _NO_SPREAD * np.abs(means).max():
        return Estimate(value, value, value)  # no document deviates, as when a model is compared with itself
    if not enough_documents(denominators) or not np.isfinite(means).all():
        return Estimate(value, None, None)
    errors = _StandardErrors(denominators)
    error = float(errors.of(means[None])[1][0])
    low, high = _critical_values(errors, means - means.mean())
    return Estimate(value, value - high * error, value - low * error)


def bounded_estimate(numerators: Array, denominators: Array, least: float, most: float = math.inf) -> Estimate:
    """Estimate as :func:`ratio_estimate` does a number that lies between ``least`` and ``most``, such as a share."""
    return _within(ratio_estimate(numerators, denominators), least, most)


def mean_estimate(values: Array) -> Estimate:
    """Estimate the mean of values that count the same."""
    return ratio_estimate(values, np.ones_like(values))


def trials_estimate(values: Array, least: float, most: float) -> Estimate:
    """Estimate the mean of single trials between ``least`` and ``most``, such as answers that are right or wrong.

    Two trials of each extreme are added for the interval (Agresti & Coull 1998): without them, twenty right answers out
    of twenty would seem to prove a model without fault.
    """
    value = float(values.mean())
    widened = mean_estimate(np.concatenate([values, [least, most, least, most]]))
    if not enough_documents(np.ones_like(values)) or widened.low is None or widened.high is None:
        return Estimate(value, None, None)
    # the added trials draw the interval to the middle, and it must hold the value itself
    return _within(Estimate(value, min(widened.low, value), max(widened.high, value)), least, most)


def _within(found: Estimate, least: float, most: float) -> Estimate:
    if found.low is None or found.high is None:
        return found
    return Estimate(found.value, max(found.low, least), min(found.high, most))


def clustered_mean(values: Array, clusters: Iterable[int]) -> Estimate:
    """Estimate the mean of values of which those in one cluster are not independent, such as passages of a document."""
    _, places = np.unique(list(clusters), return_inverse=True)
    sums, counts = (np.bincount(places, weights=one) for one in (values, np.ones_like(values)))
    return ratio_estimate(sums.astype(np.float64), counts.astype(np.float64))


def quotient_estimate(numerators: Array, denominators: Array, lengths: Array) -> Estimate:
    """Estimate ``sum(numerators) / sum(denominators)`` where single denominators may be zero or below.

    The interval holds every quotient θ for which ``numerators − θ · denominators`` may have a mean of zero per unit of
    length (Fieller 1954).

    Args:
        denominators: their mean must be above zero beyond its interval.
        lengths: of the documents.
    """
    from scipy.optimize import brentq

    value = float(numerators.sum() / denominators.sum())

    def lower_end(quotient: float, sign: int) -> float:
        found = ratio_estimate(sign * (numerators - quotient * denominators), lengths).low
        return math.nan if found is None else found

    ends = []
    for sign in (1, -1):
        # beyond value, the mean is so far from zero that its interval leaves zero out
        step = max(1.0, abs(value))
        while lower_end(value - sign * step, sign) <= 0 and step < _FARTHEST:
            step *= 2
        if not lower_end(value - sign * step, sign) > 0:
            return Estimate(value, None, None)
        if lower_end(value, sign) >= 0:
            ends.append(value)
            continue
        ends.append(float(brentq(lower_end, value - sign * step, value, args=(sign,), xtol=1e-6)))
    return Estimate(value, ends[0], ends[1])


def paired_ratio(ratios: Sequence[float]) -> Estimate:
    """Estimate the typical ratio of two timings from several repeats, each paired.

    The interval is Student's t on the logarithms, with repeats as units. It holds 1 for a model against itself if the
    two take turns in going first: a drift of the machine then has no direction.

    Returns:
        the median as value. A single repeat has no interval.
    """
    from scipy.special import stdtrit

    value = statistics.median(ratios)
    if len(ratios) < 2:
        return Estimate(value, None, None)
    logs = np.log(ratios)
    half = float(stdtrit(len(logs) - 1, (1 + LEVEL) / 2) * logs.std(ddof=1) / math.sqrt(len(logs)))
    return Estimate(value, math.exp(logs.mean() - half), math.exp(logs.mean() + half))


class _StandardErrors:
    """Standard errors of the weighted mean of many samples at once.

    Letters of shapes: B samples, N documents.
    """

    def __init__(self, lengths_N: Array) -> None:
        self._weight_N = lengths_N / lengths_N.sum()
        self._squares = float((self._weight_N**2).sum())
        # E[(x_i − x̄)²] = σ² (1 − 2 w_i + Σ w²) for documents of equal variance σ²
        self._robust_N = self._weight_N**2 / (1 - 2 * self._weight_N + self._squares)

    def of(self, sample_BN: Array) -> tuple[Array, Array]:
        """Compute the weighted mean of each sample, and the larger of its two standard errors."""
        mean_B = sample_BN @ self._weight_N
        robust_B = ((sample_BN - mean_B[:, None]) ** 2) @ self._robust_N
        pooled_B = self._squares * sample_BN.var(axis=1, ddof=1)
        return mean_B, np.sqrt(np.maximum(robust_B, pooled_B))


def _critical_values(errors: _StandardErrors, deviations_N: Array) -> tuple[float, float]:
    """Draw deviations, and find the quantiles of their studentised mean."""
    parts = []
    for drawn_BN in _draws(deviations_N):
        mean_B, error_B = errors.of(drawn_BN)
        # a draw of one deviation alone has no spread, and is left out
        spread_B = error_B > _NO_SPREAD * np.abs(deviations_N).max()
        parts.append(mean_B[spread_B] / error_B[spread_B])
    studentised_B = np.concatenate(parts)
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(studentised_B, [tail, 1 - tail])
    symmetric = np.quantile(np.abs(studentised_B), LEVEL)
    return float(min(low, -symmetric)), float(max(high, symmetric))


def _draws(deviations_N: Array) -> Iterator[Array]:
    """Draw with replacement, in portions that fit into memory."""
    random, count = np.random.default_rng(SEED), len(deviations_N)
    portion = max(1, _DRAWN_AT_ONCE // count)
    for begin in range(0, RESAMPLES, portion):
        yield deviations_N[random.integers(count, size=(min(portion, RESAMPLES - begin), count))]


def float_array(numbers: Iterable[float]) -> Array:
    """Make a float64 array of any numbers."""
    return np.array([float(number) for number in numbers], dtype=np.float64)
