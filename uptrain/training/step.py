"""One optimizer step: micro-batches, normalised over all of them and over the processes, and clipped.

Letters of shapes: B sequences, T tokens, N target tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...errors import TrainingError
from ..data.batches import TrainingBatch
from ..loss.chunked import LossInputs
from ..loss.token_losses import LossSums, TrainingLoss
from ..models.teacher import Teacher
from ..monitor.progress import StepResult
from ..processes.devices import StopRequested, on_any_process
from ..settings import UptrainSettings

_PATIENCE_SECONDS = 2.0
"""After a signal, a step that ends within this time is finished, and a longer one is given up."""


class Stepper:
    """Turns one batch into one update of the weights.

    Args:
        model: the prepared student, with :func:`headfold.uptrain.loss.chunked.attach_chunked_loss`.
        learning_rate: of step 0, 1, …
        teacher: the model to distil from, if there is one.

    Attributes:
        stop_requested: whether this process should stop; called between micro-batches.
        logged_terms: names of the terms of the loss that the metrics show.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: Any,
        optimizer: Any,
        settings: UptrainSettings,
        learning_rate: Callable[[int], float],
        teacher: Teacher | None = None,
    ) -> None:
        self._accelerator, self._model, self._optimizer = accelerator, model, optimizer
        self._settings, self._teacher = settings, teacher
        self._loss = TrainingLoss.of(settings)
        self.learning_rate = learning_rate
        self.logged_terms = self._loss.logged_terms(has_teacher=teacher is not None)
        self.stop_requested: Callable[[], bool] = lambda: False
        self._ask_every = 1  # micro-batches

    def __call__(self, step: int, batch: TrainingBatch) -> StepResult:
        """Do step ``step`` with this process's share of its batch.

        Raises:
            TrainingError: the loss or the gradient is not finite; the weights are left as they were.
            StopRequested: a process should stop, and the step takes long.
        """
        began = time.perf_counter()
        totals, micro_batches = self._accumulate(batch, began)
        targets = max(1, batch.targets)  # of all processes; there may be none if documents of one token are isolated
        means: Tensor = self._accelerator.reduce(totals, "sum") / targets
        norm = self._accelerator.clip_grad_norm_(self._model.parameters(), self._settings.max_grad_norm)
        loss, *terms = means.tolist()
        named = dict(zip(LossSums._fields[1:], terms, strict=True))
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm  # of all shards
        result = StepResult(loss, named, float(norm), batch.targets)
        self._refuse_non_finite(step, result)
        for group in self._optimizer.param_groups:
            group["lr"] = self.learning_rate(step)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._ask_every = self._agree_when_to_ask(time.perf_counter() - began, micro_batches)
        return result

    def _accumulate(self, batch: TrainingBatch, began: float) -> tuple[Tensor, int]:
        """Add up the gradients of all micro-batches. Returns this process's sums, and the number of micro-batches."""
        random_state = _random_state()
        totals = torch.zeros(len(LossSums._fields), device=self._accelerator.device)
        micro_batches = list(batch.split(self._settings.micro_batch))
        for index, micro in enumerate(micro_batches):
            if index and index % self._ask_every == 0 and self._gives_up(began):
                self._optimizer.zero_grad()
                _set_random_state(random_state)
                raise StopRequested
            last = index == len(micro_batches) - 1
            # DDP exchanges gradients once, at the last micro-batch. FSDP2 must do so at each: it would otherwise hold
            # the whole gradient on every device
            exchange = last or self._accelerator.is_fsdp2
            with nullcontext() if exchange else self._accelerator.no_sync(self._model):
                sums = self._sums(micro.to(self._accelerator.device))
                # the targets are those of all processes, but DDP and FSDP divide by the number of processes again
                scale = self._accelerator.num_processes / max(1, batch.targets)
                self._accelerator.backward(sums.loss * scale)
            totals += torch.stack([one.detach() for one in sums])
        return totals, len(micro_batches)

    def _gives_up(self, began: float) -> bool:
        """Return whether a process should stop, and the step is too long to finish. Every process must call this."""
        late = time.perf_counter() - began >= _PATIENCE_SECONDS
        return on_any_process(self._accelerator, late and self.stop_requested())

    def _agree_when_to_ask(self, seconds: float, micro_batches: int) -> int:
        """Agree on the micro-batches until the processes ask each other again, in about half the time of patience."""
        if self._accelerator.num_processes == 1:
            return 1  # asking costs nothing
        mean = self._accelerator.reduce(torch.tensor(seconds, device=self._accelerator.device), "mean")
        return max(1, int(_PATIENCE_SECONDS / 2 * micro_batches / max(float(mean), 1e-9)))

    def _sums(self, micro: TrainingBatch) -> LossSums:
        """Compute the summed losses of one micro-batch, ``loss`` with its gradient."""
        inputs, scored_BT, targets_N = micro.inputs, micro.scored_BT, micro.targets_N
        teacher_N, split, layers_BTC = None, None, None
        if self._teacher is not None:
            teacher_BT, layers_BTC = self._teacher.head_inputs(**inputs)
            teacher_N, split = teacher_BT[scored_BT], self._teacher.split
        loss_inputs = LossInputs(self._loss, scored_BT, targets_N, teacher_N, split, layers_BTC)
        sums: LossSums = self._model(loss_inputs=loss_inputs, use_cache=False, **inputs)
        return sums

    def _refuse_non_finite(self, step: int, result: StepResult) -> None:
        if not torch.isfinite(torch.tensor([result.loss, result.gradient_norm])).all():
            raise TrainingError(
                f"At step {step + 1} the loss is {result.loss} and the gradient norm {result.gradient_norm}: "
                "the run diverged.",
                "The saves before are intact: continue from them with a lower --learning-rate or --max-grad-norm and "
                "--resume always, or begin anew with --resume never.",
            )


def _random_state() -> list[Tensor]:
    """Get the state of the generators that dropout draws from, on the CPU and on this process's GPU."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_available() else [])]


def _set_random_state(states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state)
