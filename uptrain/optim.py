"""AdamW with decay on matrices only, and the learning rate as a pure function of the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import get_scheduler

from .settings import UptrainSettings

_SCHEDULES = {
    "cosine": "cosine_with_min_lr",
    "linear": "linear",
    "constant": "constant_with_warmup",
    "warmup-stable-decay": "warmup_stable_decay",
}
_DECAY_SHARE = 0.2  # of a warmup-stable-decay run


def make_optimizer(model: nn.Module, settings: UptrainSettings) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101); norms and biases are not decayed."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    groups = [
        {"params": [weight for weight in trained if weight.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [weight for weight in trained if weight.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        fused=True,
    )


def make_schedule(settings: UptrainSettings, steps: int) -> Callable[[int], float]:
    """Learning rate of step 0, 1, …, ``steps`` − 1.

    A function of the step alone, so it neither needs saving nor depends on the number of processes. The shapes are
    those of ``transformers.get_scheduler``; they end at ``final_learning_rate`` × the peak (``linear`` at zero,
    ``constant`` does not fall).
    """
    warmup = round(settings.warmup * steps)
    special: dict[str, Any] = {}
    if settings.schedule == "cosine":
        special = {"min_lr_rate": settings.final_learning_rate}
    elif settings.schedule == "warmup-stable-decay":
        special = {"num_decay_steps": round(_DECAY_SHARE * steps), "min_lr_ratio": settings.final_learning_rate}
    carrier = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler: Any = get_scheduler(
        _SCHEDULES[settings.schedule],
        carrier,
        num_warmup_steps=warmup,
        num_training_steps=steps,
        scheduler_specific_kwargs=special,
    )
    factor = scheduler.lr_lambdas[0]
    # The library's warm-up starts at zero, which would waste the first step: count steps from one.
    return lambda step: float(settings.learning_rate * factor(step + 1 if warmup else step))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
