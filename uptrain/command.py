"""The command `uptrain`: read options, call one function, print."""

from __future__ import annotations

import math
from typing import Annotated, Any

import typer

from .. import console
from ..errors import UsageError
from ..options import DryRun, Out, Overwrite, Source, Trust
from .settings import UptrainSettings


def _help(field: str) -> str | None:
    return UptrainSettings.model_fields[field].description


def _default(field: str) -> Any:
    return UptrainSettings.model_fields[field].default


def uptrain(
    checkpoint: Source,
    out: Out,
    data: Annotated[str, typer.Option(help=_help("data"))],
    fraction: Annotated[float | None, typer.Option(help=_help("fraction"))] = None,
    pretraining_tokens: Annotated[
        float | None, typer.Option(help=f"{_help('pretraining_tokens')}; 2e12 is understood")
    ] = None,
    tokens: Annotated[float | None, typer.Option(help=_help("tokens"))] = None,
    steps: Annotated[int | None, typer.Option(help=_help("steps"))] = None,
    block: Annotated[int, typer.Option(help=_help("block"))] = _default("block"),
    batch: Annotated[int, typer.Option(help=_help("batch"))] = _default("batch"),
    micro_batch: Annotated[int, typer.Option(help=_help("micro_batch"))] = _default("micro_batch"),
    learning_rate: Annotated[float, typer.Option("--learning-rate", "--lr", help=_help("learning_rate"))] = _default(
        "learning_rate"
    ),
    final_learning_rate: Annotated[float, typer.Option(help=_help("final_learning_rate"))] = _default(
        "final_learning_rate"
    ),
    warmup: Annotated[float, typer.Option(help=_help("warmup"))] = _default("warmup"),
    schedule: Annotated[str, typer.Option(help="cosine, linear, constant or warmup-stable-decay")] = _default(
        "schedule"
    ),
    weight_decay: Annotated[float, typer.Option(help=_help("weight_decay"))] = _default("weight_decay"),
    clip: Annotated[float, typer.Option(help=_help("clip"))] = _default("clip"),
    teacher: Annotated[str | None, typer.Option(help=_help("teacher"))] = None,
    distillation_weight: Annotated[float, typer.Option(help=_help("distillation_weight"))] = _default(
        "distillation_weight"
    ),
    precision: Annotated[str, typer.Option(help=f"auto, fp32 or bf16, {_help('precision')}")] = _default("precision"),
    device: Annotated[str, typer.Option(help="auto or cpu")] = _default("device"),
    seed: Annotated[int, typer.Option(help="of the order of the text")] = _default("seed"),
    log_every: Annotated[int, typer.Option(help=_help("log_every"))] = _default("log_every"),
    save_every: Annotated[int, typer.Option(help=_help("save_every"))] = _default("save_every"),
    keep: Annotated[int, typer.Option(help=_help("keep"))] = _default("keep"),
    eval_data: Annotated[str | None, typer.Option(help=_help("eval_data"))] = None,
    eval_every: Annotated[int, typer.Option(help=_help("eval_every"))] = _default("eval_every"),
    eval_tokens: Annotated[int, typer.Option(help="tokens of one held-out evaluation")] = _default("eval_tokens"),
    restart: Annotated[
        bool, typer.Option("--restart", help="Throw an unfinished run away instead of continuing it.")
    ] = False,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    trust_remote_code: Trust = False,
) -> None:
    """Continue the pretraining of a converted checkpoint for a small share of its budget.

    One process: call it as it is. Several: `accelerate launch --num_processes 8 -m headfold uptrain …`.
    A run that was stopped or killed goes on from its newest save when the same command is given again.
    """
    given = {name: value for name, value in locals().items() if name in UptrainSettings.model_fields}
    for name in ("pretraining_tokens", "tokens"):
        given[name] = _whole(name, given[name])
    settings = _settings(given)
    if dry_run:
        from .budget import plan_budget

        budget = plan_budget(settings)
        rows = [
            ["tokens", f"{budget.tokens:,}"],
            ["steps", f"{budget.steps:,}"],
            ["tokens per step", f"{budget.tokens_per_step:,}"],
        ]
        console.table(f"Uptraining {checkpoint}", ["budget", ""], rows)
        return
    from .loop import uptrain_checkpoint

    uptrain_checkpoint(
        checkpoint, out, settings, overwrite=overwrite, restart=restart, trust_remote_code=trust_remote_code
    )
    console.result(out)


def _whole(name: str, number: float | None) -> int | None:
    """2e12 on the command line is a whole number of tokens."""
    if number is None:
        return None
    if not math.isfinite(number) or number != int(number):
        raise UsageError(f"--{name.replace('_', '-')} {number} is no whole number of tokens.")
    return int(number)


def _settings(given: dict[str, Any]) -> UptrainSettings:
    """Validate options by the very model that validates recipes."""
    from pydantic import ValidationError

    try:
        return UptrainSettings(**given)
    except ValidationError as problem:
        fault = problem.errors()[0]
        option = "--" + str(fault["loc"][0]).replace("_", "-")
        raise UsageError(f"{option} {fault['input']}: {fault['msg']}.", "See `headfold uptrain --help`.") from problem
