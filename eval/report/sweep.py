"""The trade-off of a sweep: perplexity against KV-cache bytes, as a table, one self-contained page and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import UsageError
from ...working_folder import changes, describe, read_json, write_json
from .figure import (
    DASHED,
    MUTED,
    SERIES,
    Plot,
    name_axes,
    new_figure,
    perplexity_scale,
    plain_ticks,
    png_of,
    svg_of,
)
from .format import change, number
from .page import render

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESULTS_NAME, PAGE_NAME, PICTURE_NAME = "sweep.json", "sweep.html", "sweep.png"
_MARKERS = "osD^vP*X"


@dataclass(frozen=True)
class SweepRow:
    """One conversion, measured without uptraining.

    Attributes:
        method: how it was converted, or ``source``.
        perplexity, low, high: with its 95 % interval over documents; None where there is one document only.
        seconds: of the conversion, calibration left out.
    """

    method: str
    groups: int
    cache_bytes_per_token: float
    perplexity: float
    low: float | None
    high: float | None
    seconds: float

    @property
    def key(self) -> tuple[str, int]:
        return self.method, self.groups


def table_rows(rows: Sequence[SweepRow]) -> list[list[str]]:
    """Cells of the table, best first within each number of groups; the source, whose row must be there, on top."""
    source = next(row for row in rows if row.method == "source")
    cells = []
    for row in sorted(rows, key=lambda row: (-row.groups, row.method != "source", row.perplexity)):
        interval = "" if row.low is None or row.high is None else f"[{number(row.low)}, {number(row.high)}]"
        against = "–" if row is source else change(row.perplexity / source.perplexity)
        cells.append(
            [
                row.method,
                str(row.groups),
                f"{row.cache_bytes_per_token:,.0f}",
                number(row.perplexity),
                interval,
                against,
                "–" if row is source else f"{row.seconds:.1f}",
            ]
        )
    return cells


COLUMNS = ("method", "groups", "KV bytes per token", "perplexity", "95 % interval", "vs source", "seconds")


def write_tradeoff(rows: Sequence[SweepRow], folder: Path, details: dict[str, Any]) -> None:
    """Write ``sweep.json``, ``sweep.html`` and ``sweep.png`` into an existing folder.

    Args:
        details: how it was measured, a few named values for the page and the JSON.
    """
    content = {"details": details, "rows": [asdict(row) for row in rows]}
    write_json(folder / RESULTS_NAME, content, indent=1)
    page = render("sweep.html", columns=COLUMNS, rows=table_rows(rows), details=details, plot=tradeoff_plot(rows))
    (folder / PAGE_NAME).write_text(page, encoding="utf-8")
    (folder / PICTURE_NAME).write_bytes(png_of(_tradeoff_figure(rows)))


def tradeoff_plot(rows: Sequence[SweepRow]) -> Plot:
    """Perplexity against KV-cache bytes for a page."""
    spoken = "; ".join(f"{row.method} with {row.groups} KV heads: {number(row.perplexity)}" for row in rows)
    return Plot(
        "What each number of KV heads costs",
        "Before any uptraining; down and to the left is better. Dashed: the source.",
        svg_of(_tradeoff_figure(rows), "tradeoff"),
        f"Perplexity against KV-cache bytes per token. {spoken}.",
    )


def _tradeoff_figure(rows: Sequence[SweepRow]) -> Figure:
    """A curve per method, both axes logarithmic."""
    figure, axes = new_figure(4.4)
    source = next(row for row in rows if row.method == "source")
    values = [row.perplexity for row in rows]
    axes.axhline(source.perplexity, color=MUTED, linestyle=DASHED, linewidth=1.5, label="source")
    for place, method in enumerate(dict.fromkeys(row.method for row in rows if row.method != "source")):
        found = sorted((row for row in rows if row.method == method), key=lambda row: row.groups)
        style: dict[str, Any] = {"marker": _MARKERS[place % len(_MARKERS)], "linewidth": 2, "markersize": 5}
        style["color"] = SERIES[place % len(SERIES)]
        style["linestyle"] = "solid" if place < len(SERIES) else "dashed"
        sizes = [row.cache_bytes_per_token for row in found]
        axes.plot(sizes, [row.perplexity for row in found], label=method, **style)
    plain_ticks(axes, "x", sorted({row.cache_bytes_per_token for row in rows}), lambda size: f"{size:,.0f}")
    perplexity_scale(axes, "y", values)
    name_axes(figure, axes, "KV-cache bytes per token", "perplexity before uptraining")
    return figure


def read_sweep(folder: Path) -> dict[str, Any]:
    """``details`` and ``rows`` of a sweep, as written by :func:`write_tradeoff`."""
    return read_json(folder / RESULTS_NAME)


def read_rows(folder: Path, details: dict[str, Any]) -> list[SweepRow]:
    """Rows of an earlier sweep in this folder, to go on with; empty where there is none.

    Raises:
        UsageError: the folder holds a sweep that was measured otherwise, or something that is no sweep.
    """
    file = folder / RESULTS_NAME
    if not file.exists():
        return []
    try:
        content = read_json(file)
        found, rows = content["details"], [SweepRow(**row) for row in content["rows"]]
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise UsageError(f"{file} is no sweep.", "Choose another folder with -o, or remove this one.") from problem
    changed = changes(found, details)
    if changed:
        raise UsageError(
            f"{folder} holds a sweep that was measured otherwise: {describe(changed)}.",
            "Choose another folder with -o, or remove this one.",
        )
    return rows
