"""The command `uptrain`: read options, call one function, print."""

from __future__ import annotations

import math
import sys
from typing import Annotated

import typer

from .. import console
from ..errors import UsageError
from ..options import DryRun, Out, Overwrite, Source, Trust, with_settings
from .settings import Resume, UptrainSettings


@with_settings("uptrain", required=("data",))
def uptrain(
    settings: UptrainSettings,
    checkpoint: Source,
    out: Out,
    resume: Annotated[
        Resume,
        typer.Option(
            help="auto: continue an unfinished run if there is one; always: fail if there is none; never: discard it."
        ),
    ] = "auto",
    overwrite: Overwrite = False,
    launch: Annotated[
        str | None,
        typer.Option(help="Run on several processes: a config of `accelerate config`, or one-gpu, ddp-8, fsdp2-8."),
    ] = None,
    dry_run: DryRun = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="With --dry-run: take ten steps, save nothing, and say how long.")
    ] = False,
    device_memory: Annotated[
        float | None, typer.Option(help="With --dry-run: memory of one device in GB, if not this machine's.")
    ] = None,
    trust_remote_code: Trust = False,
) -> None:
    """Continue the pretraining of a converted checkpoint for a small share of its budget.

    Run it as it is on one process. For several, add --launch, or use `accelerate launch -m headfold uptrain …`.
    Repeat the same command to continue a run that was stopped or killed.
    """
    looking = {"--measure": measure, "--device-memory": device_memory is not None}
    for option in [name for name, used in looking.items() if used and not dry_run]:
        raise UsageError(f"{option} goes with --dry-run.", f"Add --dry-run, or leave {option} out.")
    if dry_run:
        _show_cost(checkpoint, settings, launch, measure, _bytes(device_memory), trust_remote_code)
    elif launch is not None:
        # torch is imported inside commands only, so that --help is fast
        from .processes import launch as launching

        # the words of the user: settings that were not given must not look as if they were
        launching.launch(launching.find_launch(launch), launching.without_launch(sys.argv[1:]))
    else:
        from .run import uptrain_checkpoint

        uptrain_checkpoint(
            checkpoint, out, settings, overwrite=overwrite, resume=resume, trust_remote_code=trust_remote_code
        )
        console.result(out)


def _show_cost(
    checkpoint: str,
    settings: UptrainSettings,
    launch: str | None,
    measured: bool,
    device_bytes: int | None,
    trust_remote_code: bool,
) -> None:
    """Print the cost of the run."""
    from .dry_run import estimate_run, measure
    from .processes.launch import Layout, find_launch, read_layout

    layout = Layout() if launch is None else read_layout(find_launch(launch))
    rows = estimate_run(checkpoint, settings, layout, device_bytes=device_bytes, trust_remote_code=trust_remote_code)
    if measured:
        rows += measure(checkpoint, settings, layout, trust_remote_code=trust_remote_code)
    console.table(f"Uptraining {checkpoint}", ["", ""], rows)


def _bytes(gigabytes: float | None) -> int | None:
    if gigabytes is None:
        return None
    if not math.isfinite(gigabytes) or gigabytes <= 0:
        raise UsageError(f"--device-memory {gigabytes} is not a size in GB.", "Give a number above 0, such as 80.")
    return int(gigabytes * 1e9)
