"""The commands `run` and `sweep`: read options, call one function, print."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .. import console
from ..options import DryRun, Source, numbers

if TYPE_CHECKING:
    from .schema import Recipe


def sweep(
    checkpoint: Source,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the table, the plot and the page.")],
    groups: Annotated[str, typer.Option(help="Numbers of groups, such as 8,4,2,1.")],
    data: Annotated[str, typer.Option(help="Text to measure on, never the one that calibration sees.")],
    calibration: Annotated[str, typer.Option(help="Text that the methods may look at.")],
    methods: Annotated[str, typer.Option(help="Methods, each also with +refine.")] = (
        "mean,first,random,aligned,folded,folded+refine"
    ),
    calibration_tokens: Annotated[int, typer.Option(min=1, help="Tokens of calibration text to read.")] = 131_072,
    refine: Annotated[int, typer.Option(min=1, help="Steps per layer for methods with +refine.")] = 200,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to score.")] = 32_768,
    window: Annotated[int, typer.Option(min=2, help="Tokens that a model sees at once.")] = 512,
    device: Annotated[str, typer.Option(help="Where calibration and refinement run: cpu, cuda, …")] = "cpu",
) -> None:
    """Convert in many ways and plot perplexity against KV-cache size, before any uptraining: the way to choose G.

    Rows that are measured are kept, so a sweep that was stopped goes on.
    """
    from ..convert.calibrated import Calibration
    from ..eval.report.sweep import COLUMNS, RESULTS_NAME, SweepRow, table_rows
    from .sweep import SweepSettings
    from .sweep import sweep as run_sweep

    settings = SweepSettings(
        numbers(groups), methods.split(","), data, Calibration(calibration, calibration_tokens, device=device),
        refine, tokens, window,
    )  # fmt: skip
    page = run_sweep(checkpoint, out, settings)
    import json

    rows = [SweepRow(**row) for row in json.loads((out / RESULTS_NAME).read_text(encoding="utf-8"))["rows"]]
    console.table(f"{checkpoint} before uptraining", COLUMNS, table_rows(rows))
    console.result(page)


def run(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="A YAML file, or the name of a shipped recipe such as demo.")
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder for the checkpoints and the report; runs/NAME by default."),
    ] = None,
    launch: Annotated[
        str | None,
        typer.Option(help="Uptrain on several processes: a config of `accelerate config`, or ddp-8, fsdp2-8."),
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Convert, uptrain and compare in a row, as a recipe says. Steps that are done already are skipped.

    The path of the report is the last line printed.
    """
    from .schema import load_recipe

    loaded = load_recipe(recipe)
    folder = out if out is not None else Path("runs") / Path(recipe).stem
    if dry_run:
        _look_ahead(loaded, launch)
        return
    from ..uptrain.processes.launch import find_launch
    from .run import run_recipe

    console.result(run_recipe(loaded, folder, find_launch(launch) if launch else None))


def _look_ahead(recipe: Recipe, launch: str | None) -> None:
    """Print the recipe, and what its uptraining will take; its teacher is the source itself."""
    import yaml

    from ..uptrain.estimate.dryrun import look_ahead
    from ..uptrain.processes.launch import Layout, find_launch, read_layout
    from .run import refuse_absent_text

    refuse_absent_text(recipe)
    console.data.print(yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False), markup=False)
    layout = Layout() if launch is None else read_layout(find_launch(launch))
    settings = recipe.uptrain
    if settings.teacher in ("auto", "source"):
        settings = settings.model_copy(update={"teacher": recipe.checkpoint})
    rows = look_ahead(recipe.checkpoint, settings, layout, refuse=False)
    console.table(f"Uptraining {recipe.checkpoint}", ["", ""], rows)
