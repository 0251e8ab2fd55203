"""The command line: register the commands, and turn errors into exit codes."""

from __future__ import annotations

import math
import os
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Annotated

import typer

from . import __version__, console
from .convert import command as convert_command
from .errors import HeadfoldError, Interrupted, UsageError
from .eval import command as eval_command
from .recipes import command as recipes_command
from .uptrain import command as uptrain_command

app = typer.Typer(
    name="headfold",
    help="Turn a multi-head-attention checkpoint into a grouped-query one, uptrain it, and compare the two.",
    no_args_is_help=True,
    add_completion=False,
    # faults of headfold get the plain traceback, which belongs into an issue
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        console.data.print(f"headfold {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    console.drop_half_set_launch()
    # every process would do the same work and write the same output
    if console.process_count() > 1 and context.invoked_subcommand not in (None, "uptrain", "eval"):
        raise UsageError(
            f"`headfold {context.invoked_subcommand}` runs on one process, and this is one of several.",
            "Only uptrain and eval go under accelerate launch; call this one as it is.",
        )


app.command(
    "convert",
    epilog="Example: `headfold convert meta-llama/Llama-2-7b-hf --groups 8 --calibration text.jsonl -o llama-gqa8`",
)(convert_command.convert)
app.command("check", epilog="Example: `headfold check ./llama-2-7b-gqa8`")(convert_command.check)
app.command(
    "inspect",
    epilog="Example: `headfold inspect ./llama-2-7b`, or with text: `… --groups 8,4 --statistics moments.safetensors`",
)(convert_command.inspect)
app.command(
    "uptrain",
    epilog="Example: `headfold uptrain gqa8 --data text.jsonl --fraction 0.05 --pretraining-tokens 2e12 -o gqa8-up`",
)(uptrain_command.uptrain)
app.command(
    "eval",
    epilog="Example: `headfold eval llama-2-7b llama-2-7b-gqa8 llama-2-7b-gqa8-up --data wikitext.txt -o report`",
)(eval_command.evaluate)
app.command(
    "sweep",
    epilog="Example: `headfold sweep ./small --groups 8,4,2,1 --calibration text.jsonl --data held-out.jsonl -o sweep`",
)(recipes_command.sweep)
app.command("run", epilog="Example: `headfold run demo -o demo`")(recipes_command.run)
app.command("report", epilog="Example: `headfold report report -o report-again --fail-over 2%`")(eval_command.report)


_AFTER_A_STOP = {
    "convert": "The same command continues a refinement after its last finished layer. Anything else begins anew.",
    "uptrain": "The same command continues from the newest save.",
    "eval": "The same command continues with the measurements that are saved.",
    "sweep": "The same command continues after the last row.",
    "run": "The same command continues with the step that was stopped.",
}
_STOPPED = 75  # EX_TEMPFAIL of sysexits.h: try again later
_ECHO_SECONDS = 2.0
"""A terminal or Slurm signals launcher and processes alike, and the launcher passes it on: that is one request."""


def main(arguments: list[str] | None = None) -> None:
    """Run the console script. It always ends in SystemExit."""
    console.replace_what_a_stream_cannot_print()
    words = sys.argv[1:] if arguments is None else arguments
    try:
        with _signals_raise():
            app(arguments)
    except Interrupted as problem:
        console.stopped(problem.message, problem.hint)
        sys.exit(_STOPPED)
    except HeadfoldError as problem:
        console.error(problem.message, problem.hint)
        sys.exit(problem.exit_code)
    except BrokenPipeError:
        # `headfold inspect … | head -1`: the reader has seen enough
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123 - Python flushes it once more as it ends
        sys.exit(0)
    # a full disk or a file without permission: the words of the system say it best
    except OSError as problem:
        console.error(f"{problem.filename or 'A file'} cannot be used: {problem.strerror or problem}.")
        sys.exit(1)
    except MemoryError:
        console.error("The memory of this machine is used up.", "Free some, or take a machine with more.")
        sys.exit(1)
    except _CommandStopped:
        said = _AFTER_A_STOP.get(next((word for word in words if not word.startswith("-")), ""))
        console.stopped("Nothing unfinished was left under the name of the output.", said)
        sys.exit(_STOPPED)
    except Exception:
        traceback.print_exc()
        line = shlex.join(["headfold", *words])
        console.error(
            f"This is a fault in headfold {__version__}.", f"Please report it, with the lines above and: {line}"
        )
        sys.exit(1)


class _CommandStopped(BaseException):
    """A signal asks the command to stop. Not KeyboardInterrupt, which typer turns into exit code 130 without a word."""


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Let SIGTERM and Ctrl-C raise an exception, so that unfinished folders and locks are removed.

    ``uptrain`` takes the signals over while it trains. A second one ends a clean-up that takes too long.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    last = -math.inf

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal last
        before, last = last, time.monotonic()
        if last - before >= _ECHO_SECONDS:
            raise _CommandStopped

    caught = (signal.SIGTERM, signal.SIGINT)
    # one that is ignored stays so, as a shell has it for commands in the background
    before = {number: signal.getsignal(number) for number in caught if signal.getsignal(number) != signal.SIG_IGN}
    for number in before:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
