"""The commands `eval` and `report`: read options, call one function, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .. import console
from ..errors import HeadfoldError
from ..options import Out, Overwrite, Trust, share


def evaluate(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="The original checkpoint: folder or hub id.")],
    out: Out,
    data: Annotated[
        str, typer.Option(help="text never trained on: stdlib, a text/jsonl/parquet file, or a datasets id")
    ],
    others: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CONVERTED]...", help="Made from it; none: the source alone."),
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens to score; 0 for the whole text.")] = 65_536,
    window: Annotated[
        int | None, typer.Option(help="Tokens that a model sees at once; 512 or the model's own limit.")
    ] = None,
    stride: Annotated[int | None, typer.Option(help="Tokens between two windows; half a window.")] = None,
    batch: Annotated[int, typer.Option(help="Windows of one forward pass.")] = 8,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, …")] = "auto",
    overwrite: Overwrite = False,
    trust_remote_code: Trust = False,
) -> None:
    """Compare checkpoints with their source: perplexity, KL, KV-cache size and decoding speed, with their errors.

    Writes results.json, report.md and one self-contained report.html.
    """
    from .compare import compare
    from .report import print_report

    results = compare(
        source, others or [], data=data, out=out, window=window, stride=stride, max_tokens=tokens or None,
        batch_size=batch, dtype=dtype, device=device, overwrite=overwrite, trust_remote_code=trust_remote_code,
    )  # fmt: skip
    print_report(results)
    console.result(out / "report.html")


def report(
    results: Annotated[Path, typer.Argument(metavar="RESULTS", help="A results.json, or the folder that holds it.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for the report; none: print it only.")] = None,
    fail_over: Annotated[
        str | None, typer.Option(help="Exit with 1 when the last model's perplexity is worse by more, such as 2%.")
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Print the results of `headfold eval` again, write their report again, or let a build fail by them."""
    from .report import final_loss, print_report, read_results, rebuild_report

    limit = None if fail_over is None else share(fail_over)
    found = read_results(results) if out is None else rebuild_report(results, out, overwrite=overwrite)
    print_report(found)
    if out is not None:
        console.result(out / "report.html")
    loss = final_loss(found)
    if limit is not None and loss > limit:
        raise HeadfoldError(f"The perplexity is worse than the source's by {loss:.2%}, more than {limit:.2%}.")
