"""Write a comparison down: results.json, Markdown for a model card or a pull request, one self-contained HTML page."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from ...checkpoint.publish import publishing
from ...console import data, table
from ...errors import DataError, UsageError
from ..results import KIND, SCHEMA
from . import format as wording
from . import table as rows
from .page import render
from .plots import report_plots

RESULTS_NAME, MARKDOWN_NAME, HTML_NAME = "results.json", "report.md", "report.html"

Result = dict[str, Any]


def write_report(results: Result, folder: Path) -> None:
    """Write ``results.json``, ``report.md`` and ``report.html`` into an existing folder."""
    written = json.dumps(results, indent=1, ensure_ascii=False, allow_nan=False)
    (folder / RESULTS_NAME).write_text(written + "\n", encoding="utf-8")
    (folder / MARKDOWN_NAME).write_text(markdown(results), encoding="utf-8")
    (folder / HTML_NAME).write_text(html(results), encoding="utf-8")


def rebuild_report(results: Result, out: Path, *, overwrite: bool = False) -> None:
    """Write the report of results that :func:`.merge.gather` read to the folder ``out``."""
    with publishing(out, overwrite=overwrite) as folder:
        write_report(results, folder)


def read_results(path: Path) -> Result:
    """results.json of a comparison.

    Args:
        path: the file, or the folder that holds it.

    Raises:
        UsageError: there are no results.
        DataError: the file holds something else, or results of another headfold.
    """
    file = path / RESULTS_NAME if path.is_dir() else path
    try:
        results = json.loads(file.read_text(encoding="utf-8"))
    except OSError as problem:
        raise UsageError(
            f"There are no results at {file}: {problem.strerror}.", "Name a folder that headfold eval wrote."
        ) from problem
    except ValueError as problem:
        raise DataError(f"{file} is no JSON: {problem}.", "Run headfold eval again.") from problem
    if not isinstance(results, dict) or results.get("kind") != KIND:
        raise DataError(
            f"{file} does not hold the results of headfold eval.", "Name a folder that headfold eval wrote."
        )
    if results.get("schema") != SCHEMA:
        raise DataError(
            f"{file} has schema {results.get('schema')}, this headfold reads {SCHEMA}.",
            "Use the headfold that wrote it.",
        )
    return results


def print_report(results: Result) -> None:
    """The table on stdout, as it stands in the report, and the verdict below it."""
    columns = ["", *(model["name"] for model in results["models"])]
    body = [
        [row.label, *(f"{cell.main}\n{cell.detail}".strip() for cell in row.cells)] for row in rows.table_rows(results)
    ]
    made = results["protocol"]
    windows = "targets" if wording.of_targets(results) else f"window {made['window']}, stride {made['stride']}"
    title = f"{made['tokens']:,} tokens of {made['corpus']}, {windows}, {made['dtype']}"
    table(title, columns, body)
    data.print(wording.verdict(results), markup=False)


def final_loss(results: Result) -> float:
    """Relative growth of perplexity over the source of the last model named, the one of the verdict, e.g. 0.03."""
    last = results["models"][-1]
    if "against_source" not in last:
        return 0.0
    ratio = last["against_source"]["perplexity_ratio"]["value"]
    return math.inf if ratio is None else float(ratio) - 1


def markdown(results: Result) -> str:
    """The report without plots."""
    names = [_escaped(model["name"]) for model in results["models"]]
    lines = [
        f"**{wording.verdict(results)}**",
        "",
        f"| | {' | '.join(names)} |",
        f"|:--|{'--:|' * len(names)}",
    ]
    for row in rows.table_rows(results):
        cells = " | ".join(_escaped(cell.line) for cell in row.cells)
        lines.append(f"| {row.label} ({row.note}) | {cells} |")
    lines.append("")
    lines += [f"- {word}: {value}" for word, value in wording.protocol(results)]
    lines += ["", "```", results["command"], "```", ""]
    return "\n".join(lines)


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|")


def html(results: Result) -> str:
    """One page with its style and plots inside; it loads nothing."""
    pair = results["models"][-1].get("against_source", {})
    return render(
        "report.html",
        results=results,
        models=results["models"],
        verdict=wording.verdict(results),
        tiles=wording.tiles(results),
        rows=rows.table_rows(results),
        grid=rows.grid(results),
        plots=report_plots(results),
        worst=pair.get("worst_documents", []),
        worst_tokens=pair.get("worst_tokens", []),
        protocol=wording.protocol(results),
        number=wording.number,
        change=wording.change,
        probability=wording.probability,
        no_recovery=not any(model["recovery"] for model in results["models"]),
    )
