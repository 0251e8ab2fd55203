"""Parts of accelerate that headfold relies on although accelerate does not document them (tested with 1.15).

tests/libraries/test_accelerate_internals.py fails if one of them changes.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.hooks import AlignDevicesHook
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, parse_flag_from_env
from torch import Tensor, nn


def forget_settings_of_earlier_run() -> None:
    """Let the next ``Accelerator`` of this process choose its own precision.

    accelerate keeps the first choice in a class attribute for as long as the process lives.
    """
    AcceleratorState._reset_state()


def launch_asks_for_cpu() -> bool:
    """Return whether accelerate's launcher told this process to stay on CPUs."""
    return bool(parse_flag_from_env("ACCELERATE_USE_CPU"))


def launch_asks_for_fsdp() -> bool:
    """Return whether accelerate's launcher told this process to share weights (FSDP)."""
    return bool(parse_flag_from_env("ACCELERATE_USE_FSDP"))


def fsdp_plugin(accelerator: Accelerator) -> FullyShardedDataParallelPlugin:
    """The FSDP settings of the launch; read from the environment where accelerate ignores them, as it does on CPUs."""
    return getattr(accelerator.state, "fsdp_plugin", None) or FullyShardedDataParallelPlugin()


def turn_on_fsdp(accelerator: Accelerator, plugin: FullyShardedDataParallelPlugin) -> None:
    """Make ``prepare`` shard the model, also on CPUs, where accelerate accepts the request and shards nothing."""
    accelerator.state.fsdp_plugin = plugin
    accelerator.state.distributed_type = DistributedType.FSDP
    # saving and loading ask the process's own state, which a new AcceleratorState would read as well
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP


def launcher_command(config: Path, program: Sequence[str], several_on_cpus: bool) -> list[str]:
    """The command that starts ``python -m PROGRAM`` on the processes of a launch config.

    Args:
        several_on_cpus: several processes on CPUs. accelerate leaves these to mpirun, and without it starts a single
            process in silence. Its flag for starting several is called ``--multi_gpu``; the device is chosen elsewhere.
    """
    flags = ["--multi_gpu"] if several_on_cpus else []
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    return [*launcher, *flags, "-m", *program]


def launcher_environment(on_cpus: bool, seconds_to_save: int) -> dict[str, str]:
    """Environment of the launcher.

    Args:
        on_cpus: accelerate's launcher of several processes forgets to tell them to stay on CPUs, so they are told here.
        seconds_to_save: wait this long after SIGTERM before processes are killed, unless the environment says how long.
    """
    environment = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(seconds_to_save), **os.environ}
    if on_cpus:
        environment["ACCELERATE_USE_CPU"] = "true"
    return environment


def quiet_about_tied_weights() -> None:
    """Silence accelerate's warning, at every save, that it stores tied weights once. That is what headfold wants."""
    logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)


@contextmanager
def weights_in_memory(module: nn.Module) -> Iterator[dict[Tensor, torch.dtype]]:
    """Read the weights of ``module`` that accelerate keeps on disk; drop them at the end.

    Yields:
        The tensors that were read, with the dtypes that they are stored in.
    """
    with ExitStack() as stack:
        stored: dict[Tensor, torch.dtype] = {}
        for part in module.modules():
            hook = getattr(part, "_hf_hook", None)
            if isinstance(hook, AlignDevicesHook) and hook.offload:
                stack.callback(_drop_weights, part, part.forward)
                stored |= _read_weights(part, hook)
        yield stored


def _read_weights(part: nn.Module, hook: AlignDevicesHook) -> dict[Tensor, torch.dtype]:
    """Read the weights of one module, and bypass the hook that would read them again at each call."""
    assert hook.weights_map is not None
    for name, _ in list(part.named_parameters(recurse=False)):
        part.register_parameter(name, nn.Parameter(hook.weights_map[name]))
    part.forward = part._old_forward  # type: ignore[assignment] # accelerate keeps the class's own forward there
    return {parameter: parameter.dtype for parameter in part.parameters(recurse=False)}


def _drop_weights(part: nn.Module, forward: Callable[..., Any]) -> None:
    part.forward = forward
    for name, parameter in list(part.named_parameters(recurse=False)):
        part.register_parameter(name, nn.Parameter(parameter.to("meta")))
