"""Set accelerate up for a run, and look up what the devices can do."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs
from torch.distributed.fsdp import MixedPrecisionPolicy

from ...errors import UnsupportedError, UsageError
from ...libraries import accelerate_internals
from ..settings import UptrainSettings

# Dense bf16 operations per second, from the makers' data sheets: NVIDIA A100 (2021), A10 (2021), L4 (2023),
# L40S (2023), H100 (2023), H200 (2024), B200 (2025); AMD MI250X (2021), MI300X (2023). The first match counts, so a
# name stands before those that it contains.
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
"""Processes wait this long for one that reads text or writes the result. The default of ten minutes ends large runs."""


def make_accelerator(settings: UptrainSettings, trackers: list[str], logs: Path) -> Accelerator:
    """Make accelerate's object for this run, whatever an earlier run of this process used.

    Args:
        trackers: names as accelerate knows them.
        logs: folder for trackers that write files.
    """
    accelerate_internals.forget_settings_of_earlier_run()
    asked_for = settings.device == "cpu" or accelerate_internals.launch_asks_for_cpu()
    cpu = asked_for or not torch.accelerator.is_available()
    bf16 = settings.precision == "bf16" or (settings.precision == "auto" and has_fast_bf16(cpu))
    precision = "bf16" if bf16 else "no"
    log_with: list[Any] | None = list(trackers) or None  # accelerate warns about an empty list
    handlers = [InitProcessGroupKwargs(timeout=_PATIENCE), DistributedDataParallelKwargs(gradient_as_bucket_view=True)]
    accelerator = Accelerator(
        cpu=cpu, mixed_precision=precision, log_with=log_with, project_dir=logs, kwargs_handlers=handlers
    )
    if accelerate_internals.launch_asks_for_fsdp() and accelerator.num_processes > 1:
        _set_up_sharding(accelerator)
    return accelerator


def _set_up_sharding(accelerator: Accelerator) -> None:
    """Use FSDP2 as the launch asks for it, also on CPUs, and add gradients up in float32.

    A run that computes in bf16 would otherwise also add gradients up in bf16, and round what the model returns, the
    loss, to bf16.

    Raises:
        UsageError: the launch asks for something that headfold does not use.
    """
    plugin = accelerate_internals.fsdp_plugin(accelerator)
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
    accelerate_internals.turn_on_fsdp(accelerator, plugin)


def refuse_untested_optimizer(settings: UptrainSettings, sharded: bool) -> None:
    """Check that the optimizer has been tested on weights that processes share (FSDP).

    Raises:
        UnsupportedError: it is Adafactor, which has not.
    """
    if sharded and settings.optimizer == "adafactor":
        raise UnsupportedError(
            "Adafactor was not tried on weights that processes share (FSDP).", "Take --optimizer adamw, or DDP."
        )


class StopRequested(Exception):
    """Raised to give work up because a process should stop. Weights, optimizer and random state are as before it."""


def on_any_process(accelerator: Accelerator, flag: bool) -> bool:
    """Return True on every process if ``flag`` is true on one. Every process must call this."""
    if accelerator.num_processes == 1:
        return flag
    total = torch.tensor(float(flag), device=accelerator.device)
    return bool(accelerator.reduce(total, "sum") > 0)


def has_fast_bf16(cpu: bool) -> bool:
    """Return True if bf16 is fast on this machine: GPUs need bf16 units, and CPUs matrix units (AMX)."""
    if cpu:
        return bool(torch.cpu.get_capabilities().get("amx_tile", False))
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


def peak_flops(device: torch.device) -> float | None:
    """Look up the dense bf16 operations per second that the maker promises, if the device is in the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _PEAK_FLOPS.items() if part in name), None)


def memory_bytes(device: torch.device) -> int:
    """Look up the memory of one device: all of a GPU's, or what is free of the machine's for a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(psutil.virtual_memory().available)
