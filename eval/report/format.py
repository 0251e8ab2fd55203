"""Write numbers as people read them: the same cells for the terminal, Markdown and the HTML page."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ..results import ReportedEstimate, SpeedGain


@dataclass(frozen=True)
class Cell:
    """A number, and below it its interval or what it is relative to."""

    main: str
    detail: str = ""

    @property
    def line(self) -> str:
        """Join both on one line: '28.71 [25.84, 31.58]', '2.00 KiB, 4.00× smaller'."""
        joint = " " if not self.detail or self.detail.startswith(("[", "(")) else ", "
        return f"{self.main}{joint}{self.detail}".strip()


@dataclass(frozen=True)
class TableRow:
    """One measure, with a cell per model."""

    label: str
    note: str
    cells: list[Cell]


def number(value: float | None) -> str:
    """Show four significant digits below a thousand: 28.71, 244.3, 12,345 (a dash for a missing number)."""
    if value is None or not math.isfinite(value):
        return "–"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    digits = 3 - (math.floor(math.log10(abs(value))) if value else 0)
    return f"{value:.{min(max(digits, 1), 4)}f}"


def percent(share: float | None, digits: int = 1) -> str:
    """0.777 → '77.7 %'."""
    return "–" if share is None else f"{100 * share:.{digits}f} %"


def whole_percent(share: float | None) -> str:
    """0.777 → '78 %'."""
    return percent(share, 0)


def probability(share: float) -> str:
    """0.4231 → '42.3 %', 0.00002 → '0.002 %', less than a millionth of a percent → '~0 %'."""
    value = 100 * share
    if value < 1e-6:
        return "~0 %"
    digits = 1 if value >= 1 else 2 - math.floor(math.log10(value)) - 1
    return f"{value:.{digits}f} %"


def change(ratio: float | None) -> str:
    """1.031 → '+3.1 %', and from tenfold on a factor: '1,278×'."""
    if ratio is None:
        return "–"
    # a true minus sign is as wide as the plus
    return f"{ratio:,.0f}×" if ratio >= 10 else f"{100 * (ratio - 1):+,.1f} %".replace("-", "−")


def times(ratio: float) -> str:
    """2.0 → '2.00×'."""
    return f"{ratio:.2f}×"


def gain(found: SpeedGain) -> Cell:
    """Show a ratio of speeds with its interval, or with its smallest and largest repeat where it has none."""
    if found.low is None or found.high is None:
        return Cell(times(found.median), f"({found.min:.2f} to {found.max:.2f})")
    return Cell(times(found.median), f"[{found.low:.2f}, {found.high:.2f}]")


def signed(value: float | None) -> str:
    """0.5 → '+0.5000'."""
    return "–" if value is None else ("−" if value < 0 else "+") + number(abs(value))


def count(amount: float) -> str:
    """1500 → '1.5 k', for tokens and parameters."""
    # decimal, as tokens and parameters are counted
    for limit, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if amount >= limit:
            return f"{amount / limit:.3g} {unit}"
    return f"{amount:.0f}"


def with_interval(estimate: ReportedEstimate | None, show: Callable[[float | None], str]) -> Cell:
    """Show an estimate with its interval below, or a dash where it was not measured."""
    if estimate is None:
        return Cell("–")
    if estimate.low is None or estimate.high is None:
        return Cell(show(estimate.value))
    low, high = show(estimate.low), show(estimate.high)
    if high.endswith(" %"):
        low = low.removesuffix(" %")  # one unit for both ends: [2.8, 3.4 %]
    return Cell(show(estimate.value), f"[{low}, {high}]")
