"""Lines of progress: one for every few steps, to the metrics and to the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ...console import human_seconds, info
from ..estimate.budget import Budget
from ..estimate.cost import flops_per_token
from ..estimate.model_size import ModelSize
from .metrics import Metrics, Stopwatch


@dataclass(frozen=True)
class StepResult:
    """Means over the target tokens of the step and over all processes.

    Attributes:
        loss: in nats.
        terms: of the loss, by the names of :class:`headfold.uptrain.loss.token_losses.LossSums`.
        gradient_norm: before clipping.
        targets: number of target tokens.
    """

    loss: float
    terms: dict[str, float]
    gradient_norm: float
    targets: int


@dataclass(frozen=True)
class FlopsUtilisation:
    """Model FLOPs utilisation (MFU; Chowdhery et al. 2022, arXiv 2204.02311, appendix B).

    Attributes:
        peak_flops: operations per second of all devices together, as their maker promises.
    """

    student: ModelSize
    teacher: ModelSize | None
    peak_flops: float

    def share(self, tokens_per_second: float, targets_per_token: float) -> float:
        """Compute the share of the peak that the run uses."""
        return tokens_per_second * flops_per_token(self.student, self.teacher, targets_per_token) / self.peak_flops


class ProgressLog:
    """Collects the results of steps and writes their means.

    Args:
        terms: names of the terms of the loss to show.
        utilisation: None if the peak of the devices is not known.
        step: the step from which the run continues.
        tokens_read: real tokens read before that step.
    """

    def __init__(
        self,
        metrics: Metrics,
        budget: Budget,
        terms: Sequence[str],
        utilisation: FlopsUtilisation | None,
        *,
        step: int,
        tokens_read: int,
    ) -> None:
        self._metrics, self._budget, self._terms, self._utilisation = metrics, budget, terms, utilisation
        # the pace of this part alone: an earlier one may have run on other devices
        self._stopwatch = Stopwatch(budget.steps - step)
        self._tokens_read = tokens_read
        self._results: list[StepResult] = []

    def add(self, result: StepResult) -> None:
        """Take in the result of a step."""
        self._results.append(result)

    def write(self, step: int, *, tokens_read: int, learning_rate: float, recovered: float | None) -> None:
        """Write a line about the steps since the last one.

        Its rates count real tokens. Its ``tokens`` are those of the budget, in which padding counts as well.
        """
        results, self._results = self._results, []
        read, self._tokens_read = tokens_read - self._tokens_read, tokens_read
        rate, seconds_left = self._stopwatch.lap(len(results), read)
        line: dict[str, Any] = {
            "step": step,
            "tokens": step * self._budget.tokens_per_step,
            # a mean over the lap, since the loss of one step is noisy
            "loss": fmean(result.loss for result in results),
            **{name: fmean(result.terms[name] for result in results) for name in self._terms},
            "learning_rate": learning_rate,
            # the newest one, since a mean would hide that it grows
            "gradient_norm": results[-1].gradient_norm,
            "tokens_per_second": rate,
        }
        if self._utilisation is not None:
            # padding is read but not predicted, so targets are counted apart
            line["mfu"] = self._utilisation.share(rate, sum(result.targets for result in results) / read)
        if recovered is not None:
            line["recovered"] = recovered
        self._metrics.add("train", **line)
        _print(line, self._budget.steps, seconds_left)


_FORMATS: dict[str, Callable[[float], str]] = {
    "divergence": lambda value: f"KL {value:.4f}",
    "learning_rate": lambda value: f"lr {value:.2e}",
    "gradient_norm": lambda value: f"|g| {value:.2f}",
    "tokens_per_second": lambda value: f"{value:,.0f} tok/s",
    "mfu": lambda value: f"MFU {100 * value:.0f} %",
    "recovered": lambda value: f"recovered {100 * value:.0f} %",
}
"""Formats of numbers. Any other number, such as a term of the loss, is shown with its name and four decimals."""


def _print(line: dict[str, Any], steps: int, seconds_left: float) -> None:
    """``step 120/3500 · 3 % · loss 3.214 · KL 0.31 · lr 1.9e-03 · |g| 0.61 · 6,100 tok/s · ETA 8m12s``."""
    parts = [f"step {line['step']}/{steps}", f"{100 * line['step'] / steps:.0f} %"]
    for name, value in line.items():
        if name not in ("step", "tokens"):
            parts.append(_FORMATS[name](value) if name in _FORMATS else f"{name} {value:.4f}")
    info(" · ".join([*parts, f"ETA {human_seconds(seconds_left)}"]))
