"""Where and how a model may be run: device, dtype, and the longest window it was made for."""

from __future__ import annotations

import platform
import re
from typing import Any

import torch

from ...console import warn
from ...errors import UsageError
from .score_loop import DEFAULT_WINDOW

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_LIMITS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length")
_UNLIMITED = 10**9  # tokenizers say 10**30 where they mean no limit
_LEARNED_POSITIONS = re.compile(r"(^|\.)(wpe|embed_positions|position_embeddings?)$")


def choose_device(name: str) -> torch.device:
    """``auto`` takes the accelerator of this machine, else the CPU.

    Raises:
        UsageError: no such device here.
    """
    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as problem:
        raise UsageError(f"There is no device {name!r} here.", "Try --device auto or --device cpu.") from problem
    return device


def choose_dtype(name: str, source_config: Any, device: torch.device) -> torch.dtype:
    """``auto`` is the dtype of the source's weights for all models; on a CPU, where half precision is slow, float32.

    Raises:
        UsageError: not a dtype that models are measured in.
    """
    if name == "auto":
        stored = getattr(source_config, "dtype", None)
        return stored if isinstance(stored, torch.dtype) and device.type != "cpu" else torch.float32
    if name not in _DTYPES:
        raise UsageError(f"Unknown dtype {name!r}.", f"Known: auto, {', '.join(_DTYPES)}.")
    return _DTYPES[name]


def position_limit(config: Any, tokenizer: Any) -> int | None:
    """Tokens that the model was made for, None where nothing says so."""
    text_config = config.get_text_config()
    limits = [getattr(text_config, name, None) for name in _LIMITS]
    limits.append(getattr(tokenizer, "model_max_length", None))
    stated = [int(limit) for limit in limits if isinstance(limit, (int, float)) and 0 < limit < _UNLIMITED]
    return min(stated, default=None)


def choose_window(asked: int | None, limit: int | None, learned_positions: bool) -> int:
    """The window for all models: what was asked for, by default 512, and never more than the model was made for.

    Args:
        limit: the smallest position limit of the models compared.
        learned_positions: the models look positions up in a table of ``limit`` rows.

    Raises:
        UsageError: a window was asked for that runs beyond such a table.
    """
    if asked is None:
        return min(DEFAULT_WINDOW, limit or DEFAULT_WINDOW)
    if limit is None or asked <= limit:
        return asked
    if learned_positions:
        raise UsageError(
            f"The window of {asked} tokens is longer than the {limit} positions that the model has.",
            f"Try --window {limit} or less.",
        )
    warn(f"The window of {asked} tokens is longer than the {limit} the model was made for; {limit} is used.")
    return limit


def has_learned_positions(model: torch.nn.Module) -> bool:
    """The model looks positions up in a table, so it cannot run beyond the table's end."""
    return any(
        isinstance(module, torch.nn.Embedding) and _LEARNED_POSITIONS.search(name) is not None
        for name, module in model.named_modules()
    )


def device_name(device: torch.device) -> str:
    """What the numbers were measured on, e.g. ``NVIDIA H200`` or ``cpu (x86_64, 2 threads)``."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device} ({platform.machine()}, {torch.get_num_threads()} threads)"
