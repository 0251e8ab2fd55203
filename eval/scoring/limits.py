"""Choose the device, the dtype and the window to run models with, within the limits of model and machine."""

from __future__ import annotations

import platform
import re
from typing import Any

import torch

from ...console import counted, warn
from ...errors import UsageError
from .score_loop import DEFAULT_WINDOW

# Llama, GPT-2 and others each have a name of their own for it.
_LIMITS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length")
_UNLIMITED = 10**9
"""Limits from here on mean none: tokenizers without a limit state 10**30."""
_LEARNED_POSITIONS = re.compile(r"(^|\.)(wpe|embed_positions|position_embeddings?)$")


def choose_device(name: str) -> torch.device:
    """Find the device. ``auto`` takes the accelerator of this machine, else the CPU.

    Raises:
        UsageError: this machine has no such device.
    """
    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)  # naming a device that is not there fails only when it is used
    except (RuntimeError, AssertionError) as problem:
        raise UsageError(f"There is no device {name!r} here.", "Try --device auto or --device cpu.") from problem
    return device


def choose_dtype(name: str, source_config: Any, device: torch.device) -> torch.dtype:
    """Choose one dtype for all models.

    Args:
        name: of torch's dtype. ``auto`` takes the dtype of the source's weights, but float32 on a CPU, where half
            precision is slow.
    """
    if name == "auto":
        stored = getattr(source_config, "dtype", None)
        return stored if isinstance(stored, torch.dtype) and device.type != "cpu" else torch.float32
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def position_limit(config: Any, tokenizer: Any) -> int | None:
    """Find the number of tokens that the model was made for, None where neither config nor tokenizer says.

    Families name this setting differently, so the smallest of the limits stated is taken.
    """
    text_config = config.get_text_config()
    limits = [getattr(text_config, name, None) for name in _LIMITS]
    limits.append(getattr(tokenizer, "model_max_length", None))
    stated = [int(limit) for limit in limits if isinstance(limit, (int, float)) and 0 < limit < _UNLIMITED]
    return min(stated, default=None)


def choose_window(wanted: int | None, limit: int | None, learned_positions: bool) -> int:
    """Choose the window for all models: 512 by default, and never more than the models were made for.

    Args:
        wanted: the user's window, None for the default.
        limit: the smallest position limit of the models compared.
        learned_positions: the models look positions up in a table of ``limit`` rows.

    Raises:
        UsageError: the wanted window runs beyond such a table.
    """
    if wanted is None:
        return min(DEFAULT_WINDOW, limit or DEFAULT_WINDOW)
    if limit is None or wanted <= limit:
        return wanted
    if learned_positions:
        raise UsageError(
            f"The window of {wanted} tokens is longer than the {limit} positions that the model has.",
            f"Try --window {limit} or less.",
        )
    warn(f"The window of {wanted} tokens is longer than the {limit} the model was made for; {limit} is used.")
    return limit


def has_learned_positions(model: torch.nn.Module) -> bool:
    """Tell whether the model looks positions up in a table, so that it cannot run beyond the table's end."""
    return any(
        isinstance(module, torch.nn.Embedding) and _LEARNED_POSITIONS.search(name) is not None
        for name, module in model.named_modules()
    )


def device_name(device: torch.device) -> str:
    """Name the hardware for the report, such as ``NVIDIA H200`` or ``cpu (x86_64, 2 threads)``."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device} ({platform.machine()}, {counted(torch.get_num_threads(), 'thread')})"
