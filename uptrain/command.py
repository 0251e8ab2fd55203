"""The command `uptrain`: read options, call one function, print."""

from __future__ import annotations

import math
import sys
from typing import Annotated, Any

import typer

from .. import console
from ..errors import UsageError
from ..options import DryRun, Out, Overwrite, Source, Trust
from .idle import refuse_idle
from .settings import Resume, UptrainSettings


def _help(field: str) -> str | None:
    return UptrainSettings.model_fields[field].description


def _default(field: str) -> Any:
    return UptrainSettings.model_fields[field].default


def uptrain(
    context: typer.Context,
    checkpoint: Source,
    out: Out,
    data: Annotated[list[str], typer.Option(help=_help("data"))],
    fraction: Annotated[float | None, typer.Option(help=_help("fraction"))] = None,
    pretraining_tokens: Annotated[
        float | None, typer.Option(help=f"{_help('pretraining_tokens')}; 2e12 is understood")
    ] = None,
    tokens: Annotated[float | None, typer.Option(help=_help("tokens"))] = None,
    steps: Annotated[int | None, typer.Option(help=_help("steps"))] = None,
    sequence_length: Annotated[
        int, typer.Option("--sequence-length", "--block", help=_help("sequence_length"))
    ] = _default("sequence_length"),
    batch: Annotated[int, typer.Option(help=_help("batch"))] = _default("batch"),
    micro_batch: Annotated[int, typer.Option(help=_help("micro_batch"))] = _default("micro_batch"),
    isolate_documents: Annotated[bool, typer.Option("--isolate-documents", help=_help("isolate_documents"))] = False,
    source_column: Annotated[str, typer.Option(help=_help("source_column"))] = _default("source_column"),
    target_column: Annotated[str | None, typer.Option(help=_help("target_column"))] = None,
    noise_density: Annotated[float, typer.Option(help=_help("noise_density"))] = _default("noise_density"),
    mean_span: Annotated[float, typer.Option(help=_help("mean_span"))] = _default("mean_span"),
    train: Annotated[str, typer.Option(help=f"all, attention or kv; {_help('train')}")] = _default("train"),
    dropout: Annotated[float | None, typer.Option(help=_help("dropout"))] = None,
    optimizer: Annotated[str, typer.Option(help=_help("optimizer"))] = _default("optimizer"),
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
    beta1: Annotated[float, typer.Option(help="AdamW's decay of the mean gradient")] = _default("beta1"),
    beta2: Annotated[float, typer.Option(help="AdamW's decay of the squared gradient")] = _default("beta2"),
    max_grad_norm: Annotated[float, typer.Option(help=_help("max_grad_norm"))] = _default("max_grad_norm"),
    spike: Annotated[float, typer.Option(help=_help("spike"))] = _default("spike"),
    teacher: Annotated[str, typer.Option(help=_help("teacher"))] = _default("teacher"),
    no_teacher: Annotated[bool, typer.Option("--no-teacher", help="Learn from the text alone.")] = False,
    distillation_weight: Annotated[float, typer.Option(help=_help("distillation_weight"))] = _default(
        "distillation_weight"
    ),
    temperature: Annotated[float, typer.Option(help=_help("temperature"))] = _default("temperature"),
    divergence: Annotated[str, typer.Option(help=_help("divergence"))] = _default("divergence"),
    hidden_weight: Annotated[float, typer.Option(help=_help("hidden_weight"))] = _default("hidden_weight"),
    precision: Annotated[str, typer.Option(help=f"auto, fp32 or bf16, {_help('precision')}")] = _default("precision"),
    device: Annotated[str, typer.Option(help="auto or cpu")] = _default("device"),
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help=_help("gradient_checkpointing"))
    ] = False,
    compile: Annotated[bool, typer.Option("--compile", help=_help("compile"))] = False,
    liger: Annotated[bool, typer.Option("--liger", help=_help("liger"))] = False,
    seed: Annotated[int, typer.Option(help="of the order of the text")] = _default("seed"),
    log_every: Annotated[int, typer.Option(help=_help("log_every"))] = _default("log_every"),
    save_every: Annotated[int, typer.Option(help=_help("save_every"))] = _default("save_every"),
    save_total_limit: Annotated[int, typer.Option(help=_help("save_total_limit"))] = _default("save_total_limit"),
    eval_data: Annotated[str | None, typer.Option(help=_help("eval_data"))] = None,
    eval_every: Annotated[int, typer.Option(help=_help("eval_every"))] = _default("eval_every"),
    eval_tokens: Annotated[int, typer.Option(help="tokens of one held-out evaluation")] = _default("eval_tokens"),
    tracker: Annotated[list[str], typer.Option(help=_help("tracker"))] = ["auto"],  # noqa: B006, typer reads it
    resume: Annotated[
        Resume,
        typer.Option(
            help="auto: go on with an unfinished run where there is one; always: fail where there is none; never: "
            "throw it away and begin anew"
        ),
    ] = "auto",
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="With --dry-run: also take ten steps, save nothing, and say how long.")
    ] = False,
    device_memory: Annotated[
        float | None, typer.Option(help="With --dry-run: GB of one device, where it is not this machine's.")
    ] = None,
    launch: Annotated[
        str | None,
        typer.Option(help="Run on several processes: a config of `accelerate config`, or one-gpu, ddp-8, fsdp2-8."),
    ] = None,
    trust_remote_code: Trust = False,
) -> None:
    """Continue the pretraining of a converted checkpoint for a small share of its budget.

    One process: call it as it is. Several: with --launch, or under `accelerate launch -m headfold uptrain …`.
    A run that was stopped or killed goes on from its newest save when the same command is given again.
    """
    given = {name: value for name, value in locals().items() if name in UptrainSettings.model_fields}
    for name in ("pretraining_tokens", "tokens"):
        given[name] = _whole(name, given[name])
    given["data"] = data[0] if len(data) == 1 else tuple(data)
    given["tracker"] = tuple(tracker)
    if no_teacher:
        if teacher != _default("teacher"):
            raise UsageError("--teacher and --no-teacher contradict each other.", "Leave one of them out.")
        given["teacher"] = None
    settings = _settings(given)
    refuse_idle(settings, {name for name in given if _was_given(context, name)})
    looking = {"--measure": measure, "--device-memory": device_memory is not None}
    for option in [name for name, used in looking.items() if used and not dry_run]:
        raise UsageError(f"{option} goes with --dry-run.", f"Add --dry-run, or leave {option} out.")
    if dry_run:
        _look_ahead(checkpoint, settings, launch, measure, _bytes(device_memory), trust_remote_code)
    elif launch is not None:
        from .processes import launch as launching

        launching.launch(launching.find_launch(launch), launching.without_launch(sys.argv[1:]))
    else:
        from .loop import uptrain_checkpoint

        uptrain_checkpoint(
            checkpoint, out, settings, overwrite=overwrite, resume=resume, trust_remote_code=trust_remote_code
        )
        console.result(out)


def _look_ahead(
    checkpoint: str,
    settings: UptrainSettings,
    launch: str | None,
    measured: bool,
    device_bytes: int | None,
    trust_remote_code: bool,
) -> None:
    """Print what the run will take."""
    from .estimate.dryrun import look_ahead, measure
    from .processes.launch import Layout, find_launch, read_layout

    layout = Layout() if launch is None else read_layout(find_launch(launch))
    rows = look_ahead(checkpoint, settings, layout, device_bytes=device_bytes, trust_remote_code=trust_remote_code)
    if measured:
        rows += measure(checkpoint, settings, layout, trust_remote_code=trust_remote_code)
    console.table(f"Uptraining {checkpoint}", ["", ""], rows)


def _was_given(context: typer.Context, name: str) -> bool:
    """An option stands on the command line, if only at its default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _bytes(gigabytes: float | None) -> int | None:
    if gigabytes is None:
        return None
    if not math.isfinite(gigabytes) or gigabytes <= 0:
        raise UsageError(f"--device-memory {gigabytes} is no size in GB.", "Give a number above 0, such as 80.")
    return int(gigabytes * 1e9)


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
