"""Join the processes of ``accelerate launch``, which owns devices and process groups."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from ...console import process_count

if TYPE_CHECKING:
    from accelerate import Accelerator

_TIMEOUT = timedelta(hours=24)
"""Longest wait of the other processes while the first one times decoding or answers tasks."""


def join_processes(device: str) -> Accelerator | None:
    """Join the run's other processes (None where this one is alone).

    Args:
        device: ``cpu``. Anything else means the accelerator that the launcher gives each process.
    """
    if process_count() < 2:
        return None
    from accelerate import Accelerator, InitProcessGroupKwargs

    from ...libraries.accelerate_internals import forget_settings_of_earlier_run

    forget_settings_of_earlier_run()
    cpu = device == "cpu" or not torch.accelerator.is_available()
    return Accelerator(cpu=cpu, kwargs_handlers=[InitProcessGroupKwargs(timeout=_TIMEOUT)])
