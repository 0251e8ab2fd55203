"""The commands `eval` and `report`: read options, call one function, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .. import console
from ..errors import HeadfoldError, UsageError
from ..options import Out, Overwrite, Trust, numbers, share
from .settings import EvalSettings

_FIELDS = EvalSettings.model_fields


def _help(name: str) -> str:
    return _FIELDS[name].description or name


def _default(name: str) -> Any:
    return _FIELDS[name].default


def evaluate(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="The original checkpoint: folder or hub id.")],
    out: Out,
    data: Annotated[str, typer.Option(help=_help("data"))],
    others: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CONVERTED]...", help="Made from it; none: the source alone."),
    ] = None,
    tokens: Annotated[int, typer.Option(help="tokens to score; 0 for the whole text")] = _default("tokens"),
    window: Annotated[int | None, typer.Option(help=_help("window"))] = None,
    stride: Annotated[int | None, typer.Option(help=_help("stride"))] = None,
    batch: Annotated[int, typer.Option(help=_help("batch"))] = _default("batch"),
    source_column: Annotated[str, typer.Option(help=_help("source_column"))] = _default("source_column"),
    target_column: Annotated[str | None, typer.Option(help=_help("target_column"))] = None,
    noise_density: Annotated[float, typer.Option(help=_help("noise_density"))] = _default("noise_density"),
    mean_span: Annotated[float, typer.Option(help=_help("mean_span"))] = _default("mean_span"),
    bos: Annotated[bool | None, typer.Option("--bos/--no-bos", help=_help("bos"))] = None,
    dtype: Annotated[str, typer.Option(help=_help("dtype"))] = _default("dtype"),
    device: Annotated[str, typer.Option(help=_help("device"))] = _default("device"),
    source_cache: Annotated[str | None, typer.Option(help=_help("source_cache"))] = None,
    contexts: Annotated[str | None, typer.Option(help=_help("contexts"))] = None,
    decode_batches: Annotated[str, typer.Option(help=_help("decode_batches"))] = "1,8",
    new_tokens: Annotated[int, typer.Option(help=_help("new_tokens"))] = _default("new_tokens"),
    repeats: Annotated[int, typer.Option(help=_help("repeats"))] = _default("repeats"),
    memory: Annotated[str | None, typer.Option(help=_help("memory"))] = None,
    needles: Annotated[int, typer.Option(help=_help("needles"))] = _default("needles"),
    needle_lengths: Annotated[str | None, typer.Option(help=_help("needle_lengths"))] = None,
    tasks: Annotated[str | None, typer.Option(help=_help("tasks") + "; separated by commas")] = None,
    shots: Annotated[int | None, typer.Option(help=_help("shots"))] = None,
    task_limit: Annotated[int | None, typer.Option(help=_help("task_limit"))] = None,
    card: Annotated[
        bool, typer.Option("--card", help="write the table into the README.md of each folder that headfold made")
    ] = False,
    overwrite: Overwrite = False,
    trust_remote_code: Trust = False,
) -> None:
    """Compare checkpoints with their source: perplexity, KL, retrieval, KV-cache size and decoding speed.

    Writes results.json, report.md and one self-contained report.html. On several processes:
    `accelerate launch --num_processes 8 -m headfold eval …`. A comparison that was stopped goes on when the same
    command is given again.
    """
    given = {name: value for name, value in locals().items() if name in _FIELDS}
    given["tokens"] = tokens or None
    given["tasks"] = [] if tasks is None else [name.strip() for name in tasks.split(",")]
    for name in ("contexts", "decode_batches", "needle_lengths"):
        given[name] = None if given[name] is None else numbers(given[name])
    settings = _settings(given)
    from .compare import compare
    from .report.write import print_report

    results = compare(
        source, others or [], out=out, settings=settings, overwrite=overwrite, trust_remote_code=trust_remote_code
    )
    if console.is_main_process():
        print_report(results)
        if card:
            from .report.model_card import write_cards

            write_cards(results)
        console.result(out / "report.html")


def _settings(given: dict[str, Any]) -> EvalSettings:
    """Validate options by the very model that validates recipes."""
    from pydantic import ValidationError

    try:
        return EvalSettings(**given)
    except ValidationError as problem:
        fault = problem.errors()[0]
        option = "--" + str(fault["loc"][0]).replace("_", "-")
        raise UsageError(f"{option} {fault['input']}: {fault['msg']}.", "See `headfold eval --help`.") from problem


def report(
    results: Annotated[
        list[Path], typer.Argument(metavar="RESULTS...", help="results.json files, or the folders that hold them.")
    ],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for the report; none: print it only.")] = None,
    fail_over: Annotated[
        str | None, typer.Option(help="Exit with 1 when the last model's perplexity is worse by more, such as 2%.")
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Print the results of `headfold eval` again, merge several of one source, or let a build fail by them.

    Results that are merged must be of the same source on the same tokens; a folder that `headfold sweep` wrote adds its
    curve to the page.
    """
    from .report.merge import gather
    from .report.write import final_loss, print_report, rebuild_report

    limit = None if fail_over is None else share(fail_over)
    found = gather(results)
    if out is not None:
        rebuild_report(found, out, overwrite=overwrite)
    print_report(found)
    if out is not None:
        console.result(out / "report.html")
    loss = final_loss(found)
    if limit is not None and loss > limit:
        raise HeadfoldError(f"The perplexity is worse than the source's by {loss:.2%}, more than {limit:.2%}.")
