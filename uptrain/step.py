"""One optimizer step: micro-batches, exact normalisation over them and over processes, clipping."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from ..errors import TrainingError, UsageError
from .losses import cross_entropy_sum, distillation_sum
from .optim import set_learning_rate
from .settings import UptrainSettings


class Stepper:
    """Turns one batch of blocks into one update of the weights.

    Args:
        model: the prepared student. teacher: a frozen model on the same device, or None.
        learning_rate: of step 0, 1, …
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: Any,
        optimizer: Any,
        settings: UptrainSettings,
        learning_rate: Callable[[int], float],
        teacher: Any = None,
    ) -> None:
        if settings.batch % accelerator.num_processes:
            raise UsageError(
                f"A batch of {settings.batch} blocks cannot be shared evenly by {accelerator.num_processes} processes.",
                "Give a --batch that the number of processes divides.",
            )
        self._accelerator, self._model, self._optimizer = accelerator, model, optimizer
        self._settings, self._teacher = settings, teacher
        self.learning_rate = learning_rate

    def __call__(self, step: int, ids_BT: Tensor) -> tuple[Tensor, float]:
        """Do step ``step`` with this process's share of its batch.

        Returns:
            the mean loss in nats per token over all processes, and the norm of the gradient before clipping.

        Raises:
            TrainingError: the loss or the gradient is not finite; the weights are left as they were.
        """
        micro_batches = ids_BT.split(self._settings.micro_batch)
        targets = self._settings.batch * (ids_BT.shape[1] - 1)  # blocks are full, so every process knows the total
        total = torch.zeros((), device=self._accelerator.device)
        for index, micro_MT in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            with nullcontext() if last else self._accelerator.no_sync(self._model):
                loss = self._loss_sum(micro_MT.to(self._accelerator.device)) / targets
                # DDP and FSDP average gradients over processes; the division above already counted them all
                self._accelerator.backward(loss * self._accelerator.num_processes)
            total += loss.detach()
        loss_nats = self._accelerator.reduce(total, "sum")
        norm = float(self._accelerator.clip_grad_norm_(self._model.parameters(), self._settings.clip))
        if not (torch.isfinite(loss_nats) and torch.isfinite(torch.tensor(norm))):
            raise TrainingError(
                f"At step {step + 1} the loss is {float(loss_nats)} and the gradient norm {norm}: the run diverged.",
                "The last save is intact; lower --learning-rate or raise --warmup and start again with --restart.",
            )
        set_learning_rate(self._optimizer, self.learning_rate(step))
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss_nats, norm

    def _loss_sum(self, ids_MT: Tensor) -> Tensor:
        """Weighted sum of the token losses of one micro-batch, nats."""
        logits = self._model(input_ids=ids_MT, use_cache=False).logits
        if self._teacher is None:
            return cross_entropy_sum(logits, ids_MT)
        weight = self._settings.distillation_weight
        with torch.no_grad(), self._accelerator.autocast():
            teacher_logits = self._teacher(input_ids=ids_MT, use_cache=False).logits
        distilled = distillation_sum(logits, teacher_logits)
        if weight == 1:
            return distilled
        return weight * distilled + (1 - weight) * cross_entropy_sum(logits, ids_MT)
