"""The optimizer, and the learning rate of each step."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import torch
from torch import nn

from ..settings import UptrainSettings

_DECAY_SHARE = 0.2  # of the steps of a warmup-stable-decay run
# Lower limits of mean squared gradients and of weights. PyTorch's default for the first, 1.2e-7, is far above the
# gradients of a large model. With the paper's 1e-30, rows without a gradient become NaN in float32. The second is the
# paper's.
_ADAFACTOR_FLOORS = (1e-16, 1e-3)


def make_optimizer(model: nn.Module, settings: UptrainSettings) -> torch.optim.Optimizer:
    """Make AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101) or Adafactor (Shazeer & Stern 2018, arXiv 1804.04235).

    Norms, biases and vectors are not decayed, see :func:`is_decayed`. Adafactor's learning rate is relative to the root
    mean square of a weight, and is at most 1/√step, as in the training of T5.
    """
    decayed: list[nn.Parameter] = []
    spared: list[nn.Parameter] = []
    # A tied weight comes once, under its first name.
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            (decayed if is_decayed(model, name) else spared).append(weight)
    groups = [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": spared, "weight_decay": 0.0},
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


_BIAS = re.compile(r"bias|^b\d*$")
_NORM = re.compile(r"norm|l2clip", re.IGNORECASE)
# Decay rates and skip weights of state-space layers. Some keep them for each head, so as matrices.
_STATE_SPACE = ("A_log", "D")


def is_decayed(model: nn.Module, name: str) -> bool:
    """Tell whether weight decay applies to a parameter: to matrices that multiply, embeddings among them.

    The number of dimensions does not decide: norms of single heads are (H, D), and biases of experts (experts, C).

    Args:
        name: as ``named_parameters`` gives it.
    """
    path, _, leaf = name.rpartition(".")
    owner = model.get_submodule(path)
    if leaf == "weight" and isinstance(owner, nn.Linear):
        return True
    if leaf == "weight" and isinstance(owner, nn.Embedding):
        return not _BIAS.search(path.rpartition(".")[2])  # the table of T5's relative bias
    if sum(side > 1 for side in model.get_parameter(name).shape) < 2 or leaf in _STATE_SPACE or _BIAS.search(leaf):
        return False
    return not (_NORM.search(type(owner).__name__) or _NORM.search(name))


# From the share of the steps after warm-up that are done, to the share of the way from the peak to the final learning
# rate that is left.
_FALLS: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1 - done,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
    "warmup-stable-decay": lambda done: min(1.0, (1 - done) / _DECAY_SHARE),
}


def make_schedule(settings: UptrainSettings, steps: int) -> Callable[[int], float]:
    """Make the function from a step (0, 1, …, ``steps`` − 1) to its learning rate.

    It depends on the step alone, so it need not be saved and is the same for any number of processes. The rate rises to
    the peak in equal steps, and the last step has exactly ``final_learning_rate`` × the peak (``constant`` stays at the
    peak). Warmup-stable-decay is from Hu et al. 2024, arXiv 2404.06395, §4.2, with a linear decay.
    """
    warmup = max(1, round(settings.warmup * steps))
    fall, floor = _FALLS[settings.schedule], settings.final_learning_rate

    def rate(step: int) -> float:
        if step < warmup:
            return settings.learning_rate * (step + 1) / warmup
        left = fall((step + 1 - warmup) / (steps - warmup))
        return settings.learning_rate * (floor + (1 - floor) * left)

    return rate
