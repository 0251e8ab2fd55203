"""The commands `eval` and `report`: read options, call one function, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .. import console
from ..errors import HeadfoldError, UsageError
from ..options import Out, Overwrite, Trust, path_option, paths_argument, share, with_settings
from .settings import EvalSettings


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
    overwrite: Overwrite = False,
    trust_remote_code: Trust = False,
) -> None:
    """Compare checkpoints with their source: perplexity, KL, retrieval, KV-cache size and decoding speed.

    Writes results.json, report.md and one self-contained report.html. Repeat the same command to continue a
    comparison that was stopped. On several processes: `accelerate launch --num_processes 8 -m headfold eval …`.
    """
    # imports torch, for which --help must not wait
    from .compare import compare
    from .report.write import print_report

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


def report(
    results: Annotated[
        list[Path], paths_argument(metavar="RESULTS...", help="Files results.json, or the folders that hold them.")
    ],
    out: Annotated[Path | None, path_option("--out", "-o", help="Folder for the report; none: print it only.")] = None,
    fail_over: Annotated[
        str | None, typer.Option(help="Exit with 1 when the last model's perplexity is worse by more, such as 2%.")
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Print the results of `headfold eval` again, merge several of one source, or let a build fail by them.

    Results that are merged must be of the same source on the same tokens; a folder that `headfold sweep` wrote adds its
    curve to the page.
    """
    from .report.merge import read_and_merge
    from .report.verdict import final_loss
    from .report.write import print_report, rebuild_report

    if overwrite and out is None:
        raise UsageError("--overwrite would change nothing: nothing is written.", "Leave it out, or add --out.")
    limit = None if fail_over is None else share(fail_over)
    found = read_and_merge(results)
    if out is not None:
        rebuild_report(found, out, overwrite=overwrite)
    print_report(found)
    if out is not None:
        console.result(out / "report.html")
    # last, so that a build that fails still has its report
    loss = final_loss(found)
    if limit is not None and loss > limit:
        raise HeadfoldError(f"The perplexity is worse than the source's by {loss:.2%}, more than {limit:.2%}.")
