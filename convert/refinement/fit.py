"""Fit the projections of one attention layer to target outputs: a few hundred AdamW steps on calibration text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...console import Advance

_HELD_OUT = 16
"""One sequence in so many measures the error and is not fitted to."""
_WARMUP_SHARE, _BETAS = 0.05, (0.9, 0.95)
"""0.95 instead of AdamW's 0.999 for the second moment, because a fit has only hundreds of steps."""


@dataclass(frozen=True)
class RefineSettings:
    """Settings of the fit of each layer.

    Attributes:
        steps: AdamW steps per layer.
        learning_rate: learning rate of each tensor as a share of its root mean square, because models differ in the
            size of their weights. It is reached after the warm-up and falls to zero as a cosine.
        batch_tokens: about how many tokens a step sees.
        seed: seed of the order of the text.
    """

    steps: int = 200
    learning_rate: float = 0.07
    batch_tokens: int = 4096
    seed: int = 0


@dataclass(frozen=True)
class LayerRegression:
    """The regression problem of one layer: ``call(inputs) → targets``.

    Attributes:
        weights_BT: weight of each token's error: one over the mean square of the residual stream there, because the
            next norm divides by it.
        variance: weighted mean square of what the source's layer adds to the stream, the unit of the error.
        batch: sequences of one step.
    """

    call: Callable[[Tensor], Tensor]
    inputs_BTC: Tensor
    targets_BTC: Tensor
    weights_BT: Tensor
    variance: float
    batch: int
    device: torch.device

    @property
    def fitted(self) -> int:
        """Number of sequences that are fitted to; the others measure the error."""
        # Whole batches, and at least one: masks and positions are recorded for a full batch.
        return len(self.inputs_BTC) - max(len(self.inputs_BTC) // _HELD_OUT // self.batch, 1) * self.batch

    def error(self, which: slice | Tensor) -> Tensor:
        """Compute the weighted mean squared error of some sequences, per unit of variance."""
        inputs_BTC, targets_BTC, weights_BT = (
            part[which].to(self.device) for part in (self.inputs_BTC, self.targets_BTC, self.weights_BT)
        )
        return ((self.call(inputs_BTC) - targets_BTC).square().mean(-1) * weights_BT).mean() / self.variance

    @torch.no_grad()
    def held_out_error(self) -> float:
        starts = range(self.fitted, len(self.inputs_BTC), self.batch)
        errors = [self.error(slice(first, first + self.batch)).item() for first in starts]
        return sum(errors) / len(errors)


def fit_projections(
    parameters: list[nn.Parameter], problem: LayerRegression, settings: RefineSettings, advance: Advance
) -> tuple[float, float]:
    """Run AdamW on ``parameters``. They stay as they were where the error on held-out text does not fall.

    Args:
        advance: called after each step.

    Returns:
        The error on held-out text before and after.
    """
    start = [parameter.detach().clone() for parameter in parameters]
    before = problem.held_out_error()
    groups = [{"params": [part], "lr": settings.learning_rate * size} for part, size in _sizes(parameters)]
    # No weight decay: the fit starts at good weights, and zero is not a better guess.
    optimizer = torch.optim.AdamW(groups, betas=_BETAS, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _schedule(step, settings.steps))
    for which in _batches(problem, settings):
        optimizer.zero_grad(set_to_none=True)
        problem.error(which).backward()
        optimizer.step()
        schedule.step()
        advance()
    after = problem.held_out_error()
    # A comparison with NaN is false, so a fit that diverged is undone as well.
    if after < before:
        return before, after
    for parameter, value in zip(parameters, start, strict=True):
        parameter.data = value
    return before, before


def _sizes(parameters: list[nn.Parameter]) -> Iterator[tuple[nn.Parameter, float]]:
    """Pair each parameter with its root mean square.

    A bias may be zero, and its learning rate would be too, so it counts as at least as large as the matrices.
    """
    sizes = [parameter.detach().square().mean().sqrt().item() for parameter in parameters]
    matrices = [size for parameter, size in zip(parameters, sizes, strict=True) if parameter.dim() > 1]
    for parameter, size in zip(parameters, sizes, strict=True):
        yield parameter, size if parameter.dim() > 1 else max(size, sum(matrices) / len(matrices))


def _batches(problem: LayerRegression, settings: RefineSettings) -> Iterator[Tensor]:
    """Choose the sequences of each step: all of them in random order, again and again."""
    draw = torch.Generator().manual_seed(settings.seed)
    order = torch.empty(0, dtype=torch.long)
    for _ in range(settings.steps):
        if len(order) < problem.batch:
            order = torch.randperm(problem.fitted, generator=draw)
        yield order[: problem.batch]
        order = order[problem.batch :]


def _schedule(step: int, steps: int) -> float:
    """Share of the learning rate: a short rise, then a cosine to zero."""
    return min((step + 1) / max(steps * _WARMUP_SHARE, 1), 0.5 + 0.5 * math.cos(math.pi * step / max(steps, 1)))


@contextmanager
def gradients_only_for(trained: list[nn.Parameter], model: nn.Module) -> Iterator[None]:
    """Let only ``trained`` receive gradients, and restore every parameter's flag afterwards."""
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    model.requires_grad_(False)
    for parameter in trained:
        parameter.requires_grad_(True)
    try:
        with torch.enable_grad():
            yield
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
            parameter.grad = None  # gives its memory back before the next layer
