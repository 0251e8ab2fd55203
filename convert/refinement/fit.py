"""Fit the projections of one attention block to wanted outputs: a few hundred AdamW steps on calibration text.

Letters of shapes: N blocks of text, B blocks at once, T tokens of a block, C hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...console import Advance

_HELD_OUT = 16
"""One block in so many measures the error and is not fitted to."""
_WARMUP_SHARE, _BETAS = 0.05, (0.9, 0.95)


@dataclass(frozen=True)
class RefineSettings:
    """How each block is fitted.

    Attributes:
        steps: AdamW steps per layer.
        learning_rate: of each tensor as a share of its root mean square, since models differ in the size of their
            weights; reached after the warm-up, it falls to zero as a cosine.
        batch_tokens: about how many tokens a step sees.
        seed: of the order of the text.
    """

    steps: int = 200
    learning_rate: float = 0.07
    batch_tokens: int = 4096
    seed: int = 0


@dataclass(frozen=True)
class Task:
    """What to fit in one layer: ``call(inputs) → targets``.

    Attributes:
        batch: blocks of one step.
        weights_NT: of each token's error, one over the mean square of the stream there: the next norm divides by it.
        variance: weighted mean square of what the source's block adds, the unit of the error.
    """

    call: Callable[[Tensor], Tensor]
    inputs_NTC: Tensor
    targets_NTC: Tensor
    weights_NT: Tensor
    variance: float
    batch: int
    device: torch.device

    @property
    def fitted(self) -> int:
        """How many blocks are fitted to; the others measure the error."""
        return len(self.inputs_NTC) - max(len(self.inputs_NTC) // _HELD_OUT // self.batch, 1) * self.batch

    def error(self, which: slice | Tensor) -> Tensor:
        """Weighted mean squared error of some blocks, per unit of variance."""
        inputs_BTC, targets_BTC, weights_BT = (
            part[which].to(self.device) for part in (self.inputs_NTC, self.targets_NTC, self.weights_NT)
        )
        return ((self.call(inputs_BTC) - targets_BTC).square().mean(-1) * weights_BT).mean() / self.variance

    @torch.no_grad()
    def held_out_error(self) -> float:
        starts = range(self.fitted, len(self.inputs_NTC), self.batch)
        errors = [self.error(slice(first, first + self.batch)).item() for first in starts]
        return sum(errors) / len(errors)


def fit(parameters: list[nn.Parameter], task: Task, settings: RefineSettings, advance: Advance) -> tuple[float, float]:
    """AdamW on ``parameters``; where the error on held-out blocks does not fall they stay as they were.

    Args:
        advance: called after each step.

    Returns:
        The error on held-out blocks before and after.
    """
    start = [parameter.detach().clone() for parameter in parameters]
    before = task.held_out_error()
    groups = [{"params": [part], "lr": settings.learning_rate * size} for part, size in _sizes(parameters)]
    optimizer = torch.optim.AdamW(groups, betas=_BETAS, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _schedule(step, settings.steps))
    for which in _batches(task, settings):
        optimizer.zero_grad(set_to_none=True)
        task.error(which).backward()
        optimizer.step()
        schedule.step()
        advance()
    after = task.held_out_error()
    if after < before:
        return before, after
    for parameter, value in zip(parameters, start, strict=True):
        parameter.data = value
    return before, before


def _sizes(parameters: list[nn.Parameter]) -> Iterator[tuple[nn.Parameter, float]]:
    """Each parameter with its root mean square; a bias, which may be zero, counts as no less than the matrices do."""
    sizes = [parameter.detach().square().mean().sqrt().item() for parameter in parameters]
    matrices = [size for parameter, size in zip(parameters, sizes, strict=True) if parameter.dim() > 1]
    for parameter, size in zip(parameters, sizes, strict=True):
        yield parameter, size if parameter.dim() > 1 else max(size, sum(matrices) / len(matrices))


def _batches(task: Task, settings: RefineSettings) -> Iterator[Tensor]:
    """The blocks of each step: all of them in random order, again and again."""
    draw = torch.Generator().manual_seed(settings.seed)
    order = torch.empty(0, dtype=torch.long)
    for _ in range(settings.steps):
        if len(order) < task.batch:
            order = torch.randperm(task.fitted, generator=draw)
        yield order[: task.batch]
        order = order[task.batch :]


def _schedule(step: int, steps: int) -> float:
    """Share of the learning rate: a short rise, then a cosine to zero."""
    return min((step + 1) / max(steps * _WARMUP_SHARE, 1), 0.5 + 0.5 * math.cos(math.pi * step / max(steps, 1)))


@contextmanager
def learning_only(model: nn.Module, learned: list[nn.Parameter]) -> Iterator[None]:
    """Gradients for ``learned`` alone; afterwards every parameter is as it was."""
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    model.requires_grad_(False)
    for parameter in learned:
        parameter.requires_grad_(True)
    try:
        with torch.enable_grad():
            yield
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
            parameter.grad = None
