"""Write an evaluation's table into the model cards of its checkpoints, where the user asks for it."""

from __future__ import annotations

from pathlib import Path

from ...checkpoint.card import write_card
from ...checkpoint.record import read_record
from ...console import info, warn
from ...local_paths import expanded, last_part
from ...output_lock import only_run
from ..results import Comparison
from .table import table_rows


def write_cards(results: Comparison) -> list[Path]:
    """Write the README.md of every model but the source that headfold made, with its numbers beside the source's.

    Returns:
        the folders whose card was written. Others are left alone with a warning.
    """
    written = []
    for place, model in enumerate(results.others, start=1):
        folder = expanded(model.path)
        # a README that somebody else wrote must not be changed
        if not folder.is_dir() or not read_record(folder)["history"]:
            warn(f"{model.name} was not made by headfold, so its card is left alone.")
            continue
        with only_run(folder):
            write_card(folder, _rows(results, place))
        info(f"The card of {model.name} now holds this evaluation.")
        written.append(folder)
    return written


def _rows(results: Comparison, place: int) -> list[list[str]]:
    """List the header, and the measures of the source and one model."""
    made = results.protocol
    text = f"{made.tokens:,} tokens of {last_part(made.corpus)}, window {made.window}"
    rows = [[text, results.source.name, results.models[place].name]]
    for row in table_rows(results):
        rows.append([f"{row.label} ({row.note})", row.cells[0].line, row.cells[place].line])
    return rows
