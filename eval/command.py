"""The commands `eval` and `report`: read options, call one function, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from .. import console
from ..errors import UsageError
from ..options import Out, Overwrite, Trust, path_option, paths_argument, share, with_settings
from .settings import EvalSettings

FailOver = Annotated[
    str | None, typer.Option(help="Exit with 1 if the last model's perplexity may be worse by more, such as 2%.")
]
FailBy = Annotated[
    Literal["bound", "point"] | None,
    typer.Option(help="Judge by the interval's upper end (bound, the default) or by the measured value (point)."),
]


@with_settings("eval", required=("data",))
def evaluate(
    settings: EvalSettings,
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="The original checkpoint: folder or hub id.")],
    out: Out,
    others: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CONVERTED]...", help="Checkpoints made from it; none: measure the source alone."),
    ] = None,
    card: Annotated[
        bool, typer.Option("--card", help="Write the table into the README.md of each folder that headfold made.")
    ] = False,
    fail_over: FailOver = None,
    fail_by: FailBy = None,
    overwrite: Overwrite = False,
    trust_remote_code: Trust = False,
) -> None:
    """Compare checkpoints with their source: perplexity, KL, retrieval, KV-cache size and decoding speed.

    Writes results.json, report.md and one self-contained report.html. Repeat the same command to continue a
    comparison that was stopped. On several processes: `accelerate launch --num_processes 8 -m headfold eval …`.
    """
    # imports torch, for which --help must not wait
    from .compare import compare
    from .report.verdict import refuse_loss
    from .report.write import print_report

    limit = _limit(fail_over, fail_by)
    if limit is not None and not others:
        raise UsageError("--fail-over judges a model against its source, but there is only the source.")
    results = compare(
        source, others or [], out=out, settings=settings, overwrite=overwrite, trust_remote_code=trust_remote_code
    )
    # every process has the results, and one of them prints
    if console.is_main_process():
        print_report(results)
        if card:
            from .report.model_card import write_cards

            write_cards(results)
        console.result(out / "report.html")
        # last, so that a build that fails still has its report
        if limit is not None:
            refuse_loss(results, limit, fail_by or "bound")


def report(
    results: Annotated[
        list[Path], paths_argument(metavar="RESULTS...", help="Files results.json, or the folders that hold them.")
    ],
    out: Annotated[Path | None, path_option("--out", "-o", help="Folder for the report; none: print it only.")] = None,
    fail_over: FailOver = None,
    fail_by: FailBy = None,
    overwrite: Overwrite = False,
) -> None:
    """Print the results of `headfold eval` again, merge several of one source, or let a build fail by them.

    Results that are merged must be of the same source on the same tokens; a folder that `headfold sweep` wrote adds its
    curve to the page.
    """
    from .report.merge import read_and_merge
    from .report.verdict import refuse_loss
    from .report.write import print_report, rebuild_report

    if overwrite and out is None:
        raise UsageError("--overwrite would change nothing: nothing is written.", "Leave it out, or add --out.")
    limit = _limit(fail_over, fail_by)
    found = read_and_merge(results)
    if out is not None:
        rebuild_report(found, out, overwrite=overwrite)
    print_report(found)
    if out is not None:
        console.result(out / "report.html")
    # last, so that a build that fails still has its report
    if limit is not None:
        refuse_loss(found, limit, fail_by or "bound")


def _limit(fail_over: str | None, fail_by: str | None) -> float | None:
    if fail_by is not None and fail_over is None:
        raise UsageError("--fail-by would change nothing: no limit is given.", "Add --fail-over, such as 2%.")
    return None if fail_over is None else share(fail_over)
