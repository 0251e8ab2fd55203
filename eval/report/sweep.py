"""Show the trade-off of a sweep, perplexity against KV-cache bytes: a table, one self-contained page and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import UsageError
from ...local_paths import public
from ...working_folder import changes, describe, read_json, write_json
from ..results import SweepResults
from ..results import SweepRow as SweepRow
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
# More markers than colours, so that methods differ in print as well.
_MARKERS = "osD^vP*X"


def table_rows(rows: Sequence[SweepRow]) -> list[list[str]]:
    """Build the table's cells: the source first, whose row must be there, then by groups, the best first."""
    source = next(row for row in rows if row.method == "source")
    cells = []
    # methods are compared at equal groups, so groups come before perplexity
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
        details: how the rows were measured, as a few named values.
    """
    # the JSON first: a sweep continues from it, even if drawing fails
    content = SweepResults(details=details, rows=list(rows))
    write_json(folder / RESULTS_NAME, content.model_dump(mode="json"), indent=1)
    shown = public(details)  # the page is passed on, and the JSON is what a sweep continues from
    page = render("sweep.html", columns=COLUMNS, rows=table_rows(rows), details=shown, plot=tradeoff_plot(rows))
    (folder / PAGE_NAME).write_text(page, encoding="utf-8")
    (folder / PICTURE_NAME).write_bytes(png_of(_tradeoff_figure(rows)))


def tradeoff_plot(rows: Sequence[SweepRow]) -> Plot:
    """Draw perplexity against KV-cache bytes for a page."""
    alt_text = "; ".join(f"{row.method} with {row.groups} KV heads: {number(row.perplexity)}" for row in rows)
    return Plot(
        "What each number of KV heads costs",
        "Before any uptraining; down and to the left is better. Dashed: the source.",
        svg_of(_tradeoff_figure(rows), "tradeoff"),
        f"Perplexity against KV-cache bytes per token. {alt_text}.",
    )


def _tradeoff_figure(rows: Sequence[SweepRow]) -> Figure:
    """Draw a curve per method, both axes logarithmic."""
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
    plain_ticks(axes, sorted({row.cache_bytes_per_token for row in rows}), lambda size: f"{size:,.0f}")
    perplexity_scale(axes, "y", values)
    name_axes(figure, axes, "KV-cache bytes per token", "perplexity before uptraining")
    return figure


def read_sweep(folder: Path) -> SweepResults:
    """Read what :func:`write_tradeoff` wrote.

    Raises:
        UsageError: the file does not hold the results of a sweep.
    """
    file = folder / RESULTS_NAME
    try:
        return SweepResults.model_validate(read_json(file))
    except (OSError, ValueError) as problem:
        raise UsageError(
            f"{file} does not hold the results of a sweep.", "Choose another folder with -o, or remove this one."
        ) from problem


def read_rows(folder: Path, details: dict[str, Any]) -> list[SweepRow]:
    """Read the rows of an earlier sweep in this folder, to continue it (empty where there is none).

    Raises:
        UsageError: the folder holds a sweep that was measured with other settings, or a file that is not a sweep.
    """
    if not (folder / RESULTS_NAME).exists():
        return []
    earlier = read_sweep(folder)
    changed = changes(earlier.details, details)
    if changed:
        raise UsageError(
            f"{folder} holds a sweep that was measured with other settings: {describe(changed)}.",
            "Choose another folder with -o, or remove this one.",
        )
    return earlier.rows
