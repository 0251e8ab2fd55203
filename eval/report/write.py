"""Write a comparison: results.json, Markdown for a model card or a pull request, one self-contained HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...checkpoint.publish import publishing
from ...console import data, table
from ...local_paths import expanded, last_part, public, public_command
from ..results import RESULTS_NAME, Comparison
from .format import change, number, probability
from .page import render
from .plots import report_plots
from .protocol_rows import protocol_rows
from .table import decode_grid, table_rows
from .verdict import tiles, verdict

MARKDOWN_NAME, HTML_NAME = "report.md", "report.html"


def write_report(results: Comparison, folder: Path) -> None:
    """Write ``results.json``, ``report.md`` and ``report.html`` into an existing folder, without absolute paths."""
    results = published(results)
    (folder / RESULTS_NAME).write_text(results.to_json() + "\n", encoding="utf-8")
    (folder / MARKDOWN_NAME).write_text(markdown(results), encoding="utf-8")
    (folder / HTML_NAME).write_text(html(results), encoding="utf-8")


def published(results: Comparison) -> Comparison:
    """Shorten the paths of this machine: reports are passed on."""
    shortened: dict[str, Any] = {
        "command": public_command(results.command),
        "settings": public(results.settings),
        "protocol": results.protocol.model_copy(update={"corpus": last_part(results.protocol.corpus)}),
        "models": [model.model_copy(update={"path": last_part(model.path)}) for model in results.models],
    }
    if results.sweep is not None:
        shortened["sweep"] = results.sweep.model_copy(update={"details": public(results.sweep.details)})
    return results.model_copy(update=shortened)


def rebuild_report(results: Comparison, out: Path, *, overwrite: bool = False) -> None:
    """Write the report of results that :func:`.merge.read_and_merge` read to the folder ``out``."""
    with publishing(expanded(out), overwrite=overwrite) as folder:
        write_report(results, folder)


def print_report(results: Comparison) -> None:
    """Print the report's table on stdout, and the verdict below it."""
    columns = ["", *(model.name for model in results.models)]
    body = [[row.label, *(f"{cell.main}\n{cell.detail}".strip() for cell in row.cells)] for row in table_rows(results)]
    made = results.protocol
    # pairs are scored whole, so window and stride mean nothing there
    windows = "targets" if results.of_encoder_decoders else f"window {made.window}, stride {made.stride}"
    table(f"{made.tokens:,} tokens of {made.corpus}, {windows}, {made.dtype}", columns, body)
    data.print(verdict(results), markup=False)


def markdown(results: Comparison) -> str:
    """Write the report without plots."""
    names = [_escaped(model.name) for model in results.models]
    lines = [
        f"**{verdict(results)}**",
        "",
        f"| | {' | '.join(names)} |",
        f"|:--|{'--:|' * len(names)}",
    ]
    for row in table_rows(results):
        cells = " | ".join(_escaped(cell.line) for cell in row.cells)
        lines.append(f"| {row.label} ({row.note}) | {cells} |")
    lines.append("")
    lines += [f"- {word}: {value}" for word, value in protocol_rows(results)]
    lines += ["", "```", results.command, "```", ""]
    return "\n".join(lines)


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|")  # a bar would end the cell


def html(results: Comparison) -> str:
    """Write one page with its style and plots inside. It loads nothing."""
    pair = results.last.against_source
    return render(
        "report.html",
        results=results,
        models=results.models,
        verdict=verdict(results),
        tiles=tiles(results),
        rows=table_rows(results),
        grid=decode_grid(results),
        plots=report_plots(results),
        worst=[] if pair is None else pair.worst_documents,
        worst_tokens=[] if pair is None else pair.worst_tokens,
        protocol=protocol_rows(results),
        number=number,
        change=change,
        probability=probability,
        no_recovery=not any(model.recovery for model in results.models),
    )
