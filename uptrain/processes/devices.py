"""accelerate set up for a run, and what is known of the devices that it runs on."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
    parse_flag_from_env,
)
from torch.distributed.fsdp import MixedPrecisionPolicy

from ...errors import UsageError
from ..settings import UptrainSettings

# Dense bf16 operations per second, from the makers' data sheets: NVIDIA A100 (2021), A10 (2021), L4 (2023),
# L40S (2023), H100 (2023), H200 (2024), B200 (2025); AMD MI250X (2021), MI300X (2023). First match counts.
_PEAK_FLOPS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10G": 70e12,
    "A10": 125e12,
    "MI300X": 1307e12,
    "MI250X": 383e12,
}


_PATIENCE = timedelta(hours=4)
"""How long processes wait for one that reads text or writes the result; ten minutes, the default, end a large one."""


def make_accelerator(settings: UptrainSettings, trackers: list[str], logs: Path) -> Accelerator:
    """accelerate with the precision that was asked for; an earlier run of this process does not dictate its own.

    Args:
        trackers: names as accelerate knows them; those that write files do so in ``logs``.
    """
    AcceleratorState._reset_state()
    asked = settings.device == "cpu" or parse_flag_from_env("ACCELERATE_USE_CPU")
    cpu = asked or not torch.accelerator.is_available()
    bf16 = settings.precision == "bf16" or (settings.precision == "auto" and has_fast_bf16(cpu))
    precision = "bf16" if bf16 else "no"
    log_with: list[Any] | None = list(trackers) or None  # an empty list would earn a warning
    handlers = [InitProcessGroupKwargs(timeout=_PATIENCE), DistributedDataParallelKwargs(gradient_as_bucket_view=True)]
    accelerator = Accelerator(
        cpu=cpu, mixed_precision=precision, log_with=log_with, project_dir=logs, kwargs_handlers=handlers
    )
    if parse_flag_from_env("ACCELERATE_USE_FSDP") and accelerator.num_processes > 1:
        _settle_sharding(accelerator)
    return accelerator


def _settle_sharding(accelerator: Accelerator) -> None:
    """Use FSDP2 as it was asked for, also on CPUs, and add gradients up in float32.

    On CPUs accelerate takes the wish for FSDP, shards nothing and says nothing; what it does for a GPU is done here.
    Where it computes in bf16 it also adds gradients up in bf16 and rounds what the model returns, the loss, to bf16.

    Raises:
        UsageError: the launch asks for what does not work here.
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None) or FullyShardedDataParallelPlugin()
    if plugin.fsdp_version != 2:
        raise UsageError(
            "This launch asks for FSDP in its first version, which headfold does not use.",
            "Set `fsdp_version: 2` in the launch config; recipes/accelerate/fsdp2-8.yaml is one.",
        )
    if plugin.cpu_ram_efficient_loading:
        raise UsageError(
            "This launch asks for weights on one process alone while loading, and headfold looks at them on each.",
            "Set `fsdp_cpu_ram_efficient_loading: false` in the launch config.",
        )
    if accelerator.mixed_precision != "no":
        plugin.mixed_precision_policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    accelerator.state.fsdp_plugin = plugin
    accelerator.state.distributed_type = DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP


class StopRequested(Exception):
    """Work was given up because a process was asked to stop: weights, optimizer and random state are as before it."""


def anyone(accelerator: Accelerator, asked: bool) -> bool:
    """True on every process when it is on one; every process must call this."""
    if accelerator.num_processes == 1:
        return asked
    flag = torch.tensor(float(asked), device=accelerator.device)
    return bool(accelerator.reduce(flag, "sum") > 0)


def has_fast_bf16(cpu: bool) -> bool:
    """bf16 pays on every accelerator that has it, and on CPUs with matrix units (AMX) for it. Of this machine."""
    if not cpu:
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", None)  # private: absent in some versions, then fp32
    return bool(has_amx and has_amx())


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 operations per second that the maker promises; None for a device that is not in the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _PEAK_FLOPS.items() if part in name), None)


def memory_bytes(device: torch.device) -> int:
    """Memory of one device: all of a GPU's, and what is free of the machine's for a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(psutil.virtual_memory().available)
