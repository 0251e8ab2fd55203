"""The command line: register the commands, and turn errors into exit codes."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from . import __version__, console
from .convert import command as convert_command
from .errors import HeadfoldError, UsageError
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


def main(arguments: list[str] | None = None) -> None:
    """Run the console script. It always ends in SystemExit."""
    console.replace_what_a_stream_cannot_print()
    try:
        app(arguments)
    except HeadfoldError as problem:
        console.error(problem.message, problem.hint)
        sys.exit(problem.exit_code)
    # a full disk or a file without permission: the words of the system say it best
    except OSError as problem:
        console.error(f"{problem.filename or 'A file'} cannot be used: {problem.strerror or problem}.")
        sys.exit(1)
    except KeyboardInterrupt:
        console.error("Interrupted.")
        # 128 + SIGINT, as shells report it
        sys.exit(130)
