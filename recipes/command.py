"""The commands `run` and `sweep`: read options, call one function, print."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .. import console
from ..options import DryRun, Source, path_option, with_settings
from .settings import SweepSettings

if TYPE_CHECKING:
    from .schema import Recipe


@with_settings("sweep")
def sweep(
    settings: SweepSettings,
    checkpoint: Source,
    out: Annotated[Path, path_option("--out", "-o", help="Folder for the table, the plot and the page.")],
) -> None:
    """Convert in many ways and plot perplexity against KV-cache size, before any uptraining, to choose G.

    Repeat the same command to continue a sweep that was stopped.
    """
    # imported here, like torch in all commands, so that --help is fast
    from ..eval.report.sweep import COLUMNS, read_sweep, table_rows
    from .sweep import sweep as run_sweep

    page = run_sweep(checkpoint, out, settings)
    # from the file, which also holds the rows of an earlier try
    console.table(f"{checkpoint} before uptraining", COLUMNS, table_rows(read_sweep(out).rows))
    console.result(page)


def run(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="A YAML file, or the name of a shipped recipe such as demo.")
    ],
    out: Annotated[
        Path | None,
        path_option("--out", "-o", help="Folder for the checkpoints and the report; runs/NAME by default."),
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
    """Print the recipe and the plan of each step. The uptraining's teacher is the source itself."""
    import yaml

    from ..uptrain.dry_run import estimate_run
    from ..uptrain.processes.launch import Layout, find_launch, read_layout
    from .plan import conversion_rows, evaluation_rows
    from .run import refuse_absent_text

    refuse_absent_text(recipe)
    console.data.print(yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False), markup=False)
    layout = Layout() if launch is None else read_layout(find_launch(launch))
    settings = recipe.uptrain
    if settings.teacher in ("auto", "source"):
        settings = settings.model_copy(update={"teacher": recipe.checkpoint})
    console.table(f"Converting {recipe.checkpoint}", ["", "source", "result"], conversion_rows(recipe))
    rows = estimate_run(recipe.checkpoint, settings, layout, refuse=False)
    console.table(f"Uptraining {recipe.checkpoint}", ["", ""], rows)
    console.table("Comparing", ["", ""], evaluation_rows(recipe))
