"""The training loop: step, log, score held-out text, save, until the budget is spent or a signal comes."""

from __future__ import annotations

from typing import Any

from ...errors import Interrupted, TrainingError
from ..data.mixture import Mixture
from ..monitor.heldout import HeldoutMonitor
from ..monitor.metrics import Metrics
from ..monitor.progress import FlopsUtilisation, ProgressLog, StepResult
from ..monitor.spikes import SpikeDetector
from ..processes.devices import StopRequested, on_any_process
from ..processes.signals import StopSignal
from ..state import Progress
from .opening import OpenedRun
from .step import Stepper


class TrainingRun:
    """A run on its devices.

    Args:
        model: the student as accelerate prepared it.
        step: number of steps done, in earlier parts of the run.
        adjusted: settings that were changed on the way, see :class:`headfold.uptrain.state.Progress`.
    """

    def __init__(
        self,
        opened: OpenedRun,
        model: Any,
        stepper: Stepper,
        *,
        mixture: Mixture,
        spikes: SpikeDetector,
        metrics: Metrics,
        heldout: HeldoutMonitor,
        utilisation: FlopsUtilisation | None,
        step: int,
        adjusted: list[dict[str, Any]],
    ) -> None:
        self.opened, self.model, self.stepper = opened, model, stepper
        self.accelerator, self.budget = opened.accelerator, opened.budget
        self.mixture, self.metrics, self.heldout = mixture, metrics, heldout
        self.step, self.adjusted = step, adjusted
        self._spikes, self._utilisation = spikes, utilisation
        # the run was restored from this save, or has nothing to save yet
        self._last_saved = step
        self._tokens_read_before = mixture.read

    def train(self, stop: StopSignal) -> None:
        """Step until the budget is spent.

        Raises:
            Interrupted: a signal came; the work so far is saved.
            TrainingError: the run diverged.
        """
        # models are loaded in eval mode
        self.model.train()
        self.stepper.stop_requested = self.heldout.stop_requested = lambda: bool(stop)
        self._progress = self._current_progress()
        try:
            self.heldout.begin(self._student(), self.step, self._is_due(self.opened.settings.eval_every))
            self._train(stop)
        except StopRequested:
            raise Interrupted(
                f"Stopped by a signal at step {self.step} of {self.budget.steps}; {self._save()}.",
                "Run the same command to continue from the newest save.",
            ) from None
        except TrainingError:
            # the weights went wrong one step before the first spike, and a save may hold them
            self.opened.saves.set_aside(self.accelerator, self.step - self._spikes.spikes)
            raise

    def _train(self, stop: StopSignal) -> None:
        settings = self.opened.settings
        log = ProgressLog(
            self.metrics,
            self.budget,
            self.stepper.logged_terms,
            self._utilisation,
            step=self.step,
            tokens_read=self._tokens_read_before,
        )
        while self.step < self.budget.steps:
            result = self.next_step()
            self._spikes.check(self.step, result.loss)
            self._progress = self._current_progress()
            log.add(result)
            if self._is_due(settings.log_every):
                log.write(
                    self.step,
                    tokens_read=self.mixture.read,
                    learning_rate=self.stepper.learning_rate(self.step - 1),
                    recovered=self.heldout.recovered,
                )
            if self._is_due(settings.eval_every):
                self.heldout.evaluate(self._student(), self.step)
            if self._is_due(settings.save_every):
                self._save()
            # a run whose last step is done is finished, signal or not
            if on_any_process(self.accelerator, bool(stop)) and self.step < self.budget.steps:
                raise StopRequested
        # the weights of a spike must not be published
        self._spikes.refuse_end(self.step)

    def next_step(self) -> StepResult:
        """Draw a batch and learn from it."""
        rank, processes = self.accelerator.process_index, self.accelerator.num_processes
        batch = self.mixture.next_batch(self.opened.settings.batch, rank=rank, processes=processes)
        result = self.stepper(self.step, batch)
        self.step += 1
        return result

    def _current_progress(self) -> Progress:
        """Note the progress. It is noted before each step, because a step that is given up has drawn its batch."""
        return Progress(self.step, self.mixture.positions(), self._spikes.losses, self.adjusted)

    def _is_due(self, every: int) -> bool:
        """Tell whether something is due: at the last step, and every so many steps (0: at the last step alone)."""
        return self.step == self.budget.steps or bool(every and self.step % every == 0)

    def _student(self) -> Any:
        return self.accelerator.unwrap_model(self.model)

    def _save(self) -> str:
        """Save, unless the weights are those of a spike or are saved already. Returns what was done, in words."""
        if not self._spikes.calm:
            return "not saved, since the loss was spiking"
        if self.step != self._last_saved:
            self.opened.saves.write(self.accelerator, self._progress)
            self._last_saved = self.step
        return "saved" if self.step else "there was nothing to save"
