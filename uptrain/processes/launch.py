"""Start a run on several processes: accelerate's launcher, with a shipped config or the user's."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import yaml

from ...errors import Interrupted, UsageError
from ...libraries.accelerate_internals import launcher_command, launcher_environment
from ...local_paths import expanded

_SHIPPED = Path(__file__).parents[2] / "recipes" / "accelerate"
_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""The processes run in a session of their own, so what a terminal sends on Ctrl-C or when it closes is passed on."""
_POLL_SECONDS = 0.2
_SECONDS_TO_SAVE = 600
"""The launcher kills processes after half a minute by default. A save of a large model takes longer."""


@dataclass(frozen=True)
class Layout:
    """The processes of a run.

    Attributes:
        sharded: they share the weights (FSDP).
        cpu: they run on CPUs.
        by_mpirun: mpirun starts them.
    """

    processes: int = 1
    sharded: bool = False
    cpu: bool = False
    by_mpirun: bool = False

    @property
    def several_on_cpus(self) -> bool:
        """Tell whether accelerate would leave the processes to mpirun although there is none."""
        return self.cpu and self.processes > 1 and not (self.sharded or self.by_mpirun)


def find_launch(name: str) -> Path:
    """Find a launch config by its path, or a shipped one by its name, and check it.

    Raises:
        UsageError: it does not exist, or is malformed.
    """
    for file in (expanded(name), _SHIPPED / f"{name}.yaml"):
        if file.is_file():
            read_layout(file)
            return file.resolve()
    shipped = ", ".join(sorted(file.stem for file in _SHIPPED.glob("*.yaml")))
    raise UsageError(
        f"There is no launch config {name}.",
        f"Give the path of one (`accelerate config`), or a shipped one: {shipped}.",
    )


def read_layout(file: Path) -> Layout:
    """Read processes and sharding from a launch config.

    Raises:
        UsageError: it is not a launch config, or asks for something that does not work here.
    """
    try:
        content: Any = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as problem:
        raise _not_a_config(file, "it cannot be read as YAML") from problem
    if not isinstance(content, dict):
        raise _not_a_config(file, "it has no names with values")
    processes, kind = content.get("num_processes"), content.get("distributed_type")
    # true in YAML is an int in Python
    if not isinstance(processes, int) or isinstance(processes, bool) or processes < 1:
        raise _not_a_config(file, f"num_processes is {processes!r} and must be a whole number from 1")
    if not isinstance(kind, str) or kind.upper() not in _KINDS:
        raise _not_a_config(file, f"distributed_type is {kind!r}, and headfold runs with {', '.join(_KINDS)}")
    kind = kind.upper()
    # before the layout is used: accelerate would run something else without a word
    _refuse_unsupported(file, content, kind, processes)
    cpu = kind == "MULTI_CPU" or content.get("use_cpu") is True
    return Layout(processes, kind == "FSDP", cpu, by_mpirun=bool(_mpirun_hosts(content)))


_KINDS = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_MUSA", "MULTI_HPU", "FSDP")
"""Kinds of launch, as accelerate names them, in which every process runs the whole loop."""


def _refuse_unsupported(file: Path, content: dict[str, Any], kind: str, processes: int) -> None:
    """Refuse what accelerate or headfold would otherwise ignore without a word."""
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
        raise _not_a_config(file, f"fsdp_config is {plugin!r} and must hold names with values")
    if plugin.get("fsdp_version") != 2:
        raise UsageError(f"{file} asks for FSDP in its first version.", "Set `fsdp_version: 2` in it.")


def _mpirun_hosts(content: dict[str, Any]) -> Any:
    """Return the host file of a launch by mpirun, which starts the processes itself."""
    mpirun = content.get("mpirun_config")
    return mpirun.get("mpirun_hostfile") if isinstance(mpirun, dict) else None


def _not_a_config(file: Path, fault: str) -> UsageError:
    return UsageError(f"{file} is not a launch config of accelerate: {fault}.", "`accelerate config` writes one.")


def launch(file: Path, arguments: Sequence[str]) -> None:
    """Run `headfold ARGUMENTS` under accelerate's launcher, and wait for it.

    Raises:
        Interrupted: a signal stopped it. It is passed on as SIGTERM, and the save of the processes is waited for.
        SystemExit: it failed; the code is the launcher's exit code.
    """
    layout = read_layout(file)
    command = launcher_command(file, ["headfold", *arguments], layout.several_on_cpus)
    environment = launcher_environment(layout.cpu, _SECONDS_TO_SAVE)
    # in a session of its own: the launcher of a single process passes no signal on, but a whole group can be signalled
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    with _passing_signals_on(process.pid) as passed:
        code = process.wait()
        while passed and _is_alive(process.pid):  # the launcher of one process is gone before the save is done
            time.sleep(_POLL_SECONDS)
    if passed and code:
        raise Interrupted("Stopped by a signal.", "Run the same command to continue from the newest save.")
    if code:
        raise SystemExit(code)


@contextmanager
def _passing_signals_on(group: int) -> Iterator[list[int]]:
    """While open, pass stop signals on to a group of processes as SIGTERM, and collect those that came."""
    passed: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        passed.append(number)
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGTERM)

    before = {number: signal.getsignal(number) for number in _STOPPING}
    # a signal that is ignored, as SIGHUP is under nohup, stays ignored
    caught = [number for number, handler in before.items() if handler != signal.SIG_IGN]
    for number in caught:
        signal.signal(number, pass_on)
    try:
        yield passed
    finally:
        for number in caught:
            signal.signal(number, before[number] or signal.SIG_DFL)


def _is_alive(group: int) -> bool:
    """Return whether a process of the group still runs. A zombie, which has ended but was not waited for, does not."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


def without_launch(arguments: Sequence[str]) -> list[str]:
    """Take ``--launch CONFIG`` out of a command line: the processes get the rest."""
    remaining, skip = [], False
    for argument in arguments:
        if skip or argument.startswith("--launch="):
            skip = False
        elif argument == "--launch":
            skip = True
        else:
            remaining.append(argument)
    return remaining
