"""Start a run on several processes: accelerate's launcher, with a config of ours or of the user."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import yaml

from ...errors import Interrupted, UsageError

_SHIPPED = Path(__file__).parents[2] / "recipes" / "accelerate"
_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""A terminal signals its own session alone, so what it sends, on Ctrl-C or when it closes, is passed on too."""
_LOOK_SECONDS = 0.2


@dataclass(frozen=True)
class Layout:
    """How a run is spread: over how many processes, whether they share the weights (FSDP), whether on CPUs, and
    whether mpirun starts them."""

    processes: int = 1
    sharded: bool = False
    cpu: bool = False
    by_mpirun: bool = False


def find_launch(name: str) -> Path:
    """A launch config by its path, or a shipped one by its name; what it says is checked.

    Raises:
        UsageError: there is none, or it is malformed.
    """
    for file in (Path(name), _SHIPPED / f"{name}.yaml"):
        if file.is_file():
            read_layout(file)
            return file.resolve()
    shipped = ", ".join(sorted(file.stem for file in _SHIPPED.glob("*.yaml")))
    raise UsageError(
        f"There is no launch config {name}.",
        f"Give the path of one (`accelerate config`), or a shipped one: {shipped}.",
    )


def read_layout(file: Path) -> Layout:
    """What a launch config says of processes and sharding.

    Raises:
        UsageError: it is no launch config, or asks for what does not work here.
    """
    try:
        content: Any = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as problem:
        raise _no_config(file, "it cannot be read as YAML") from problem
    if not isinstance(content, dict):
        raise _no_config(file, "it holds no names with values")
    processes, kind = content.get("num_processes"), content.get("distributed_type")
    if not isinstance(processes, int) or isinstance(processes, bool) or processes < 1:
        raise _no_config(file, f"num_processes is {processes!r} and must be a whole number from 1")
    if not isinstance(kind, str) or kind.upper() not in _KINDS:
        raise _no_config(file, f"distributed_type is {kind!r}, and headfold runs with {', '.join(_KINDS)}")
    kind = kind.upper()
    _refuse_what_does_not_work(file, content, kind, processes)
    cpu = kind == "MULTI_CPU" or content.get("use_cpu") is True
    return Layout(processes, kind == "FSDP", cpu, by_mpirun=bool(_mpirun_hosts(content)))


_KINDS = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_MUSA", "MULTI_HPU", "FSDP")
"""Kinds of launch, as accelerate names them, in which every process runs the whole loop."""


def _refuse_what_does_not_work(file: Path, content: dict[str, Any], kind: str, processes: int) -> None:
    """What a launch config may say and accelerate, or headfold, would take in silence."""
    if kind == "NO" and processes > 1:
        raise UsageError(
            f"{file} asks for {processes} processes, and distributed_type 'NO' starts one.",
            "Set `distributed_type: MULTI_GPU` in it, or MULTI_CPU, or FSDP.",
        )
    if content.get("mixed_precision") in ("fp16", "fp8"):
        raise UsageError(
            f"{file} asks for {content['mixed_precision']}, in which headfold does not train.",
            "Set `mixed_precision: bf16` in it; --precision says what a run computes in.",
        )
    if kind != "FSDP":
        return
    plugin = content.get("fsdp_config") or {}
    if not isinstance(plugin, dict):
        raise _no_config(file, f"fsdp_config is {plugin!r} and must hold names with values")
    if plugin.get("fsdp_version") != 2:
        raise UsageError(f"{file} asks for FSDP in its first version.", "Set `fsdp_version: 2` in it.")


def _mpirun_hosts(content: dict[str, Any]) -> Any:
    """The host file of a launch by mpirun, which starts the processes itself."""
    mpirun = content.get("mpirun_config")
    return mpirun.get("mpirun_hostfile") if isinstance(mpirun, dict) else None


def _no_config(file: Path, fault: str) -> UsageError:
    return UsageError(f"{file} is no launch config of accelerate: {fault}.", "`accelerate config` writes one.")


def launch(file: Path, arguments: Sequence[str]) -> None:
    """Run `headfold ARGUMENTS` under accelerate's launcher, and wait for it.

    Raises:
        Interrupted: a signal stopped it. It is passed on as SIGTERM, and the processes' save is waited for.
        SystemExit: it ended otherwise than well, with the launcher's exit code.
    """
    layout = read_layout(file)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file), *_several(layout)]
    # a save of a large model takes longer than the half minute that the launcher waits before it kills
    environment = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600", **os.environ}
    if layout.cpu:  # which the launcher of several processes forgets
        environment["ACCELERATE_USE_CPU"] = "true"
    # a session of its own is a group that can be signalled whole: for one process the launcher passes no signal on
    process = subprocess.Popen([*command, "-m", "headfold", *arguments], env=environment, start_new_session=True)
    asked = False

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)

    # what is ignored, as SIGHUP under nohup, stays so
    before = {number: signal.getsignal(number) for number in _STOPPING}
    caught = [number for number, handler in before.items() if handler != signal.SIG_IGN]
    for number in caught:
        signal.signal(number, pass_on)
    try:
        code = process.wait()
        while asked and _lives(process.pid):  # the launcher of one process is gone before the save is done
            time.sleep(_LOOK_SECONDS)
    finally:
        for number in caught:
            signal.signal(number, before[number] or signal.SIG_DFL)
    if asked and code:
        raise Interrupted("Stopped by a signal.", "Run the same command to go on from the newest save.")
    if code:
        raise SystemExit(code)


def _several(layout: Layout) -> list[str]:
    """What makes the launcher start all processes of a config for CPUs.

    By itself it leaves them to mpirun, and where that is not set up it starts a single process in silence. Its own
    way of starting several is called ``--multi_gpu``; on which device they run is another question.
    """
    forgotten = layout.cpu and layout.processes > 1 and not (layout.sharded or layout.by_mpirun)
    return ["--multi_gpu"] if forgotten else []


def _lives(group: int) -> bool:
    """Whether a process of the group runs; one that has ended and that nobody asked about does not count."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


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
