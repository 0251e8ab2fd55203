"""Several processes under ``accelerate launch``; accelerate owns devices and process groups."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from accelerate import Accelerator

_PATIENCE = timedelta(hours=24)
"""How long the others wait while one process times decoding or answers tasks."""


def process_count() -> int:
    """Processes that share this run, as the launcher says."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def join_processes(device: str) -> Accelerator | None:
    """This process among those that share the run, None where it is alone.

    Args:
        device: ``cpu``, or anything else for the accelerator that the launcher gives each process.
    """
    if process_count() < 2:
        return None
    from accelerate import Accelerator, InitProcessGroupKwargs

    from ...libraries.accelerate_internals import forget_settings_of_earlier_run

    forget_settings_of_earlier_run()
    cpu = device == "cpu" or not torch.accelerator.is_available()
    return Accelerator(cpu=cpu, kwargs_handlers=[InitProcessGroupKwargs(timeout=_PATIENCE)])
