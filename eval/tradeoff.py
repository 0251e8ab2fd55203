"""The trade-off of a sweep: perplexity against KV-cache bytes, as a table, a PNG and one self-contained page."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jinja2

from ..errors import UsageError
from .wording import number

RESULTS_NAME, PLOT_NAME, PAGE_NAME = "sweep.json", "sweep.png", "sweep.html"
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
        change = "–" if row is source else f"{100 * (row.perplexity / source.perplexity - 1):+,.1f} %"
        cells.append(
            [
                row.method,
                str(row.groups),
                f"{row.cache_bytes_per_token:,.0f}",
                number(row.perplexity),
                interval,
                change,
                "–" if row is source else f"{row.seconds:.1f}",
            ]
        )
    return cells


COLUMNS = ("method", "groups", "KV bytes per token", "perplexity", "95 % interval", "vs source", "seconds")


def write_tradeoff(rows: Sequence[SweepRow], folder: Path, details: dict[str, Any]) -> None:
    """Write ``sweep.json``, ``sweep.png`` and ``sweep.html`` into an existing folder.

    Args:
        details: how it was measured, a few named values for the page and the JSON.
    """
    content = {"details": details, "rows": [asdict(row) for row in rows]}
    half_written = folder / f".{RESULTS_NAME}.tmp"
    half_written.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    half_written.replace(folder / RESULTS_NAME)
    picture = folder / PLOT_NAME
    _plot(rows, picture)
    loader = jinja2.PackageLoader(__package__, "templates")
    page = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    text = page.get_template("sweep.html").render(
        columns=COLUMNS,
        rows=table_rows(rows),
        details=details,
        picture=base64.b64encode(picture.read_bytes()).decode(),
        alt="; ".join(f"{row.method} with {row.groups} KV heads: perplexity {number(row.perplexity)}" for row in rows),
    )
    (folder / PAGE_NAME).write_text(text, encoding="utf-8")


def _plot(rows: Sequence[SweepRow], file: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    axes = figure.add_subplot()
    source = next(row for row in rows if row.method == "source")
    axes.axhline(source.perplexity, color="#59636e", linestyle=(0, (4, 3)), linewidth=1.5, label="source")
    for place, method in enumerate(dict.fromkeys(row.method for row in rows if row.method != "source")):
        found = sorted((row for row in rows if row.method == method), key=lambda row: row.groups)
        style: dict[str, Any] = {"marker": _MARKERS[place % len(_MARKERS)], "linewidth": 2, "markersize": 6}
        axes.plot(
            [row.cache_bytes_per_token for row in found], [row.perplexity for row in found], label=method, **style
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(
        sorted({row.cache_bytes_per_token for row in rows}),
        [f"{size:,.0f}" for size in sorted({row.cache_bytes_per_token for row in rows})],
    )
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("KV-cache bytes per token")
    axes.set_ylabel("perplexity before uptraining")
    axes.grid(color="#dde2e7")
    axes.legend(frameon=False)
    figure.savefig(file, dpi=150)


def read_rows(folder: Path, details: dict[str, Any]) -> list[SweepRow]:
    """Rows of an earlier sweep in this folder, to go on with; empty where there is none.

    Raises:
        UsageError: the folder holds a sweep that was measured otherwise, or something that is no sweep.
    """
    file = folder / RESULTS_NAME
    if not file.exists():
        return []
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        found, rows = content["details"], [SweepRow(**row) for row in content["rows"]]
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise UsageError(f"{file} is no sweep.", "Choose another folder with -o, or remove this one.") from problem
    changed = [
        f"{name} was {found.get(name)} and is now {value}"
        for name, value in details.items()
        if found.get(name) != value
    ]
    if changed:
        raise UsageError(
            f"{folder} holds a sweep that was measured otherwise: {', '.join(changed)}.",
            "Choose another folder with -o, or remove this one.",
        )
    return rows
