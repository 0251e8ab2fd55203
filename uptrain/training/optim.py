"""Which weights are trained, the optimizer, with decay on matrices only, and the learning rate by step."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...errors import UnsupportedError, UsageError
from ..settings import UptrainSettings

_DECAY_SHARE = 0.2  # of a warmup-stable-decay run
# What mean squared gradients and weights are held up to. PyTorch's own first one, 1.2e-7, is far above the gradients of
# a large model; with the paper's 1e-30 rows without a gradient become NaN in float32. The second is the paper's.
_ADAFACTOR_FLOORS = (1e-16, 1e-3)
_ATTENTION = re.compile(r"\.(self_attn|self_attention|attention|attn|encoder_attn|SelfAttention|EncDecAttention)\.")
_TRAINED = {
    "all": re.compile(""),
    "attention": _ATTENTION,
    "kv": re.compile(_ATTENTION.pattern + r"(.*\.)?(k|v|kv|key|value|key_value)_?(proj|projection|norm|layernorm)?\."),
}


def freeze_the_rest(model: nn.Module, train: str) -> None:
    """Leave only the weights of ``train`` trainable: ``all``, ``attention``, or ``kv`` (keys and values).

    Raises:
        UsageError: the class has no weights of that kind, for example keys and values fused with queries.
    """
    wanted = _TRAINED[train]
    found = False
    for name, parameter in model.named_parameters():
        trained = wanted.search(f".{name}") is not None
        parameter.requires_grad_(trained)
        found |= trained and parameter.ndim >= 2  # a norm of keys alone is not what was meant
    if not found:
        raise UsageError(
            f"{type(model).__name__} has no weights that `--train {train}` means.", "Take --train attention, or all."
        )


def refuse_untried(settings: UptrainSettings, sharded: bool) -> None:
    """Raise for an optimizer that was not tried on weights that processes share (FSDP).

    Raises:
        UnsupportedError: it is Adafactor.
    """
    if sharded and settings.optimizer == "adafactor":
        raise UnsupportedError(
            "Adafactor was not tried on weights that processes share (FSDP).", "Take --optimizer adamw, or DDP."
        )


def make_optimizer(model: nn.Module, settings: UptrainSettings) -> torch.optim.Optimizer:
    """AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101) or Adafactor (Shazeer & Stern 2018, arXiv 1804.04235).

    Norms and biases are not decayed. Adafactor's learning rate is relative to the root mean square of a weight, and
    falls with 1/√step at the latest, as T5 was trained with it.
    """
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    groups = [
        {"params": [weight for weight in trained if weight.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [weight for weight in trained if weight.ndim < 2], "weight_decay": 0.0},
    ]
    filled = [group for group in groups if group["params"]]
    if settings.optimizer == "adafactor":
        return torch.optim.Adafactor(filled, lr=settings.learning_rate, eps=_ADAFACTOR_FLOORS)
    return torch.optim.AdamW(
        filled,
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        fused=True,
    )


# How much of the way from the peak to the final learning rate is left: of the share of steps done after warm-up.
_FALLS: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1 - done,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
    "warmup-stable-decay": lambda done: min(1.0, (1 - done) / _DECAY_SHARE),
}


def make_schedule(settings: UptrainSettings, steps: int) -> Callable[[int], float]:
    """Learning rate of step 0, 1, …, ``steps`` − 1.

    A function of the step alone, so it neither needs saving nor depends on the number of processes. It rises to the
    peak in equal steps, and the last step has ``final_learning_rate`` × the peak exactly (``constant`` stays there).
    Warm-up, stable, decay: Hu et al. 2024, arXiv 2404.06395, §4.2, with a linear decay.
    """
    warmup = max(1, round(settings.warmup * steps))
    fall, floor = _FALLS[settings.schedule], settings.final_learning_rate

    def rate(step: int) -> float:
        if step < warmup:
            return settings.learning_rate * (step + 1) / warmup
        left = fall((step + 1 - warmup) / (steps - warmup))
        return settings.learning_rate * (floor + (1 - floor) * left)

    return rate


def set_learning_rate(optimizer: Any, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
