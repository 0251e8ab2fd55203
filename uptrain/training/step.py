"""One optimizer step: micro-batches, exact normalisation over them and over processes, clipping.

Letters of shapes: B blocks, M blocks of a micro-batch, T tokens of a block.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...errors import TrainingError
from ..data.batches import TrainingBatch
from ..estimate.budget import refuse_uneven
from ..loss.chunked import Lesson
from ..loss.token_losses import LossSums, TrainingLoss
from ..models.teacher import Teacher
from ..processes.devices import StopRequested, anyone
from ..settings import UptrainSettings
from .optim import set_learning_rate


@dataclass(frozen=True)
class StepResult:
    """Means over the step's target tokens and all processes, their number, and the gradient's norm before clipping.

    The losses are in nats; ``hidden``, the distance of hidden states, has no unit.
    """

    loss: float
    cross_entropy: float
    divergence: float
    hidden: float
    gradient_norm: float
    targets: int


_PATIENCE_SECONDS = 2.0
"""A step that will be over by then is finished when a signal comes."""


class Stepper:
    """Turns one batch of blocks into one update of the weights.

    Args:
        model: the prepared student, taught in chunks (:func:`headfold.uptrain.loss.chunked.teach_in_chunks`).
        learning_rate: of step 0, 1, …
        teacher: what to distil from, or None.

    Attributes:
        asked: says whether this process was asked to stop; looked at between micro-batches.
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
        refuse_uneven(settings.batch, accelerator.num_processes)
        self._accelerator, self._model, self._optimizer = accelerator, model, optimizer
        self._settings, self._teacher = settings, teacher
        self._objective = TrainingLoss(
            settings.distillation_weight, settings.temperature, settings.divergence, settings.hidden_weight
        )
        self.learning_rate = learning_rate
        self.asked: Callable[[], bool] = lambda: False
        self._look_every = 1

    def __call__(self, step: int, batch: TrainingBatch) -> StepResult:
        """Do step ``step`` with this process's share of its batch.

        Raises:
            TrainingError: the loss or the gradient is not finite; the weights are left as they were.
            StopRequested: a process was asked to stop, and the step takes long.
        """
        began, random_state = time.perf_counter(), _random_state()
        targets = batch.targets  # of all processes
        totals = torch.zeros(len(LossSums._fields), device=self._accelerator.device)
        micro_batches = list(batch.split(self._settings.micro_batch))
        for index, micro in enumerate(micro_batches):
            if index and index % self._look_every == 0 and self._abandons(began):
                self._optimizer.zero_grad()
                _set_random_state(random_state)
                raise StopRequested
            last = index == len(micro_batches) - 1
            # FSDP2 would keep the whole gradient on every device where it does not share it out at once
            together = last or self._accelerator.is_fsdp2
            with nullcontext() if together else self._accelerator.no_sync(self._model):
                sums = self._sums(micro.to(self._accelerator.device))
                # DDP and FSDP average gradients over processes; the division by all targets counted them already
                self._accelerator.backward(sums.loss * (self._accelerator.num_processes / max(1, targets)))
            totals += torch.stack([one.detach() for one in sums])
        means: Tensor = self._accelerator.reduce(totals, "sum") / max(1, targets)
        norm = self._accelerator.clip_grad_norm_(self._model.parameters(), self._settings.max_grad_norm)
        loss, cross_entropy, divergence, hidden = means.tolist()
        result = StepResult(loss, cross_entropy, divergence, hidden, float(_whole(norm)), targets)
        self._refuse_what_is_no_number(step, result)
        set_learning_rate(self._optimizer, self.learning_rate(step))
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._look_every = self._agree_on_looks(time.perf_counter() - began, len(micro_batches))
        return result

    def _abandons(self, began: float) -> bool:
        """Collective: some process was asked to stop, and the step has lasted so long that it will not be finished."""
        late = time.perf_counter() - began >= _PATIENCE_SECONDS
        return anyone(self._accelerator, late and self.asked())

    def _agree_on_looks(self, seconds: float, micro_batches: int) -> int:
        """After how many micro-batches the processes ask each other again, about twice in the time of patience."""
        if self._accelerator.num_processes == 1:
            return 1
        mean = self._accelerator.reduce(torch.tensor(seconds, device=self._accelerator.device), "mean")
        return max(1, int(_PATIENCE_SECONDS / 2 * micro_batches / max(float(mean), 1e-9)))

    def _sums(self, micro: TrainingBatch) -> LossSums:
        """Summed losses of one micro-batch, ``loss`` with its gradient."""
        inputs, keep_MT, targets_N = micro.inputs, micro.keep_BT, micro.targets_N
        teacher_NX, split, layers_MTC = None, None, None
        if self._teacher is not None:
            states_MTX, layers_MTC = self._teacher.features(**inputs)
            teacher_NX, split = states_MTX[keep_MT], self._teacher.split
        lesson = Lesson(self._objective, keep_MT, targets_N, teacher_NX, split, layers_MTC)
        sums: LossSums = self._model(lesson=lesson, use_cache=False, **inputs)
        return sums

    def _refuse_what_is_no_number(self, step: int, result: StepResult) -> None:
        if not torch.isfinite(torch.tensor([result.loss, result.gradient_norm])).all():
            raise TrainingError(
                f"At step {step + 1} the loss is {result.loss} and the gradient norm {result.gradient_norm}: "
                "the run diverged.",
                "The saves before are intact: go on from them with a lower --learning-rate or --max-grad-norm and "
                "--resume always, or begin anew with --resume never.",
            )


def _random_state() -> list[Tensor]:
    """What dropout draws from, on the CPU and on this process's GPU."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_available() else [])]


def _set_random_state(states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state)


def _whole(norm: Any) -> Any:
    """The norm over all shards."""
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


_AFTER_A_SPIKE = (
    "The saves are from before: go on from them with a lower --learning-rate or --max-grad-norm and --resume always, "
    "or look at the text of these steps. --spike 0 goes on regardless."
)


class SpikeGuard:
    """Watches the loss for a rise that does not pass.

    Args:
        factor: how many times the median of the last losses counts as a spike, where it is also a nat more: a small
            divergence may well triple while the learning rate rises. 0 watches nothing.
        losses: of the steps before, where a run goes on.
    """

    WINDOW, ENOUGH, PATIENCE = 50, 20, 3  # losses to compare with, the fewest of them, and spikes in a row to stop at
    RISE_NATS = 1.0

    def __init__(self, factor: float, losses: Sequence[float] = ()) -> None:
        self._factor = factor
        self._calm = list(losses)
        self._spikes = 0

    @property
    def losses(self) -> list[float]:
        """What the next loss is compared with, in nats."""
        return self._calm

    @property
    def calm(self) -> bool:
        """False while the last loss was a spike; weights of such a moment are not worth a save."""
        return not self._spikes

    def see(self, step: int, loss: float) -> None:
        """Take in the loss of a step.

        Raises:
            TrainingError: it is the third spike in a row.
        """
        usual = median(self._calm) if self._factor and len(self._calm) >= self.ENOUGH else None
        if usual is None or loss <= max(self._factor * usual, usual + self.RISE_NATS):
            self._calm = [*self._calm, loss][-self.WINDOW :]
            self._spikes = 0
            return
        self._spikes += 1
        if self._spikes == self.PATIENCE:
            raise TrainingError(
                f"At step {step} the loss is {loss:.3f}, and it has been over {self._factor:g} times the usual "
                f"{usual:.3f} for {self.PATIENCE} steps.",
                _AFTER_A_SPIKE,
            )

    def refuse_end(self, step: int) -> None:
        """Raise where the run would end in a spike.

        Raises:
            TrainingError: the last loss was one.
        """
        if not self.calm:
            raise TrainingError(f"The run ends at step {step} in a spike of the loss.", _AFTER_A_SPIKE)

    @property
    def spikes(self) -> int:
        """In a row, up to the last loss."""
        return self._spikes
