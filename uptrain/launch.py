"""Start a run on several processes: accelerate's launcher, with a config of ours or of the user."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

from ..errors import Interrupted, UsageError
from .settings import UptrainSettings

_SHIPPED = Path(__file__).parents[1] / "recipes" / "accelerate"


@dataclass(frozen=True)
class Layout:
    """How a run is spread: over how many processes, and whether they share the weights (FSDP) or each hold all."""

    processes: int = 1
    sharded: bool = False


def find_launch(name: str) -> Path:
    """A launch config by its path, or a shipped one by its name.

    Raises:
        UsageError: there is none.
    """
    for file in (Path(name), _SHIPPED / f"{name}.yaml"):
        if file.is_file():
            return file.resolve()
    shipped = ", ".join(sorted(file.stem for file in _SHIPPED.glob("*.yaml")))
    raise UsageError(
        f"There is no launch config {name}.",
        f"Give the path of one (`accelerate config`), or a shipped one: {shipped}.",
    )


def read_layout(file: Path) -> Layout:
    """What a launch config says of processes and sharding.

    Raises:
        UsageError: it is no launch config, or asks for FSDP in its first version.
    """
    try:
        content: Any = yaml.safe_load(file.read_text(encoding="utf-8"))
        processes, kind = int(content["num_processes"]), str(content["distributed_type"])
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError, ValueError) as problem:
        raise UsageError(f"{file} is no launch config of accelerate.", "`accelerate config` writes one.") from problem
    sharded = kind.upper() == "FSDP"
    if sharded and (content.get("fsdp_config") or {}).get("fsdp_version") != 2:
        raise UsageError(f"{file} asks for FSDP in its first version.", "Set `fsdp_version: 2` in it.")
    return Layout(processes, sharded)


def launch(file: Path, arguments: Sequence[str]) -> None:
    """Run `headfold ARGUMENTS` under accelerate's launcher, and wait for it.

    Raises:
        Interrupted: a signal stopped it; SIGTERM is passed on, so that the processes save first.
        SystemExit: it ended otherwise than well, with the launcher's exit code.
    """
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file)]
    # a save of a large model takes longer than the half minute that the launcher waits before it kills
    environment = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600", **os.environ}
    process = subprocess.Popen([*command, "-m", "headfold", *arguments], env=environment)
    asked = False

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        process.send_signal(number)

    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        code = process.wait()
    except KeyboardInterrupt:  # a terminal sends it to the processes as well
        asked = True
        code = process.wait()
    finally:
        signal.signal(signal.SIGTERM, before)
    if asked and code:
        raise Interrupted("Stopped by a signal.", "Run the same command to go on from the newest save.")
    if code:
        raise SystemExit(code)


def without_launch(arguments: Sequence[str]) -> list[str]:
    """The command line that the processes get: the same but for ``--launch CONFIG``."""
    kept, skip = [], False
    for argument in arguments:
        if skip or argument.startswith("--launch="):
            skip = False
        elif argument == "--launch":
            skip = True
        else:
            kept.append(argument)
    return kept


def as_options(settings: UptrainSettings) -> list[str]:
    """The options of `headfold uptrain` that give these settings; what is at its default is left out."""
    options: list[str] = []
    for name, field in UptrainSettings.model_fields.items():
        value, option = getattr(settings, name), "--" + name.replace("_", "-")
        if value == field.default:
            continue
        if name == "teacher" and value is None:
            options.append("--no-teacher")
        elif isinstance(value, bool):
            options.append(option)
        else:
            for one in value if isinstance(value, tuple) else [value]:
                options += [option, str(one)]
    if "--data" not in options:  # it has no default on the command line
        options += ["--data", str(settings.data)]
    return options
