"""The uptraining run: prepare, step, watch, save, finish. accelerate owns devices and processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from ...checkpoint.backbone import is_encoder_decoder
from ...checkpoint.load import load_tokenizer
from ...checkpoint.publish import refuse_occupied, refuse_overlap
from ...checkpoint.source import Checkpoint
from ...console import info
from ...errors import Interrupted, TrainingError
from ..data.mixture import Mixture, Part, describe, open_mixture
from ..data.objective import TrainingObjective, choose_objective
from ..estimate.budget import Budget, plan_budget, refuse_other_than_one
from ..estimate.cost import Shape, flops_per_token
from ..estimate.pretraining import resolve_pretraining
from ..loss.chunked import teach_in_chunks
from ..loss.hidden_states import LayerOutputs, refuse_unlike_layers
from ..models.dropout import keep_all_layers, set_dropout
from ..models.export import whole_weights, write_trained
from ..models.isolation import refuse_leaks
from ..models.liger import apply_liger, refuse_liger
from ..models.student import build_student, refuse_long_blocks, speed_up
from ..models.teacher import Teacher, converted_from, digest_of, load_teacher, resolve_teacher
from ..monitor.heldout import Follower, HeldoutText, open_heldout
from ..monitor.metrics import Clock, Metrics, say_progress
from ..monitor.trackers import chosen_trackers, logs_folder
from ..processes.devices import StopRequested, anyone, make_accelerator, peak_flops
from ..processes.signals import StopRequest, stop_on_signal
from ..settings import Resume, UptrainSettings
from ..state import Progress, Saves
from .optim import freeze_the_rest, make_optimizer, make_schedule, refuse_untried
from .step import SpikeGuard, Stepper, StepResult


def uptrain_checkpoint(
    checkpoint: str | Path,
    out: str | Path,
    settings: UptrainSettings,
    *,
    overwrite: bool = False,
    resume: Resume = "auto",
    from_scratch: bool = False,
    trust_remote_code: bool = False,
) -> Path:
    """Train a checkpoint on packed text and write the result as an ordinary checkpoint.

    The paper's uptraining (Ainslie et al. 2023, §2.2): the pretraining goes on with its own objective for a share of
    its tokens. With a teacher the objective is the KL divergence to the source's predictions instead.
    An interrupted run continues from its newest save when the same call is made again.

    Args:
        checkpoint: folder or hub id.
        out: folder of the result; ``<out>.training`` beside it holds saves and metrics until the end.
        resume: what to do about an unfinished run, see :data:`headfold.uptrain.settings.Resume`.
        from_scratch: draw random weights from the config instead of reading them.

    Returns:
        ``out``.

    Raises:
        UsageError: ``out`` is in the way, no budget, the unfinished run has other settings, or there is none to go on
            with.
        DataError: too little text. TrainingError: the loss is not finite, or spiked. Interrupted: a signal came.
    """
    out = Path(out)
    refuse_occupied(out, overwrite)
    run = open_run(checkpoint, out, settings, from_scratch=from_scratch, trust_remote_code=trust_remote_code)
    run.prepare(resume)
    try:
        with stop_on_signal() as stop:
            run.train(stop)
    finally:
        for tracker in run.accelerator.trackers:  # its end_training would end the processes' group as well
            tracker.finish()
    weights = whole_weights(run.accelerator, run.model)  # collective
    if run.accelerator.is_main_process:
        write_trained(
            run.accelerator.unwrap_model(run.model),
            weights,
            run.source,
            out,
            run.entry(),
            run.saves.metrics,
            overwrite=overwrite,
            trust_remote_code=trust_remote_code,
        )
        run.saves.clear()
    run.accelerator.wait_for_everyone()
    return out


def open_run(
    checkpoint: str | Path,
    out: Path,
    settings: UptrainSettings,
    *,
    from_scratch: bool = False,
    trust_remote_code: bool = False,
) -> Run:
    """Everything that a run needs, opened and checked; nothing is written."""
    refuse_other_than_one(settings)
    source = Checkpoint.open(checkpoint, weights=not from_scratch)
    refuse_overlap(source.folder, out)
    settings = resolve_pretraining(settings, checkpoint, source)
    budget = plan_budget(settings)
    trackers = chosen_trackers(settings.tracker)
    if settings.liger:
        refuse_liger(str(source.config.get("model_type")), settings.device != "cpu" and torch.cuda.is_available())
    accelerator = make_accelerator(settings, trackers, logs_folder(out))
    refuse_untried(settings, accelerator.is_fsdp2)
    settings = resolve_teacher(settings, source)
    parts = open_mixture(settings.corpora, settings.columns)
    tokenizer = load_tokenizer(source.folder, trust_remote_code=trust_remote_code)
    set_seed(settings.seed)
    model = build_student(source, from_scratch, trust_remote_code)
    if settings.dropout is not None:
        set_dropout(model, settings.dropout)
    refuse_long_blocks(settings.sequence_length, model.config)
    objective = choose_objective(settings, tokenizer, model)
    if settings.isolate_documents:
        refuse_leaks(model)
    freeze_the_rest(model, settings.train)
    watch = open_heldout(settings, tokenizer, model)
    identity = {"checkpoint": source.digest(), "text": describe(parts), "teacher": digest_of(settings.teacher)}
    saves = Saves(out, settings, identity)
    text = _TrainingText(parts, objective, tokenizer, watch)
    return Run(accelerator, settings, budget, saves, source, model, text, from_scratch, trust_remote_code)


@dataclass(frozen=True)
class _TrainingText:
    """What a run reads: the corpora, what it does with them, the tokenizer, and held-out text."""

    parts: Sequence[Part]
    objective: TrainingObjective
    tokenizer: Any
    watch: HeldoutText | None


class Run:
    """State of one run between its phases."""

    def __init__(
        self,
        accelerator: Accelerator,
        settings: UptrainSettings,
        budget: Budget,
        saves: Saves,
        source: Checkpoint,
        model: Any,
        text: _TrainingText,
        from_scratch: bool,
        trust_remote_code: bool,
    ) -> None:
        self.accelerator, self.settings, self.budget, self.saves = accelerator, settings, budget, saves
        self.source, self.model = source, model
        self._text, self._from_scratch, self._trust = text, from_scratch, trust_remote_code

    def prepare(self, resume: Resume = "auto") -> None:
        """Put everything on its device, and restore the newest save if there is one."""
        if resume == "always":
            self.saves.require_one()
        settings, student = self.settings, self.model
        self.teacher = self._load_teacher(settings)
        self._shapes = Shape.of(student), Shape.of(self.teacher.model) if self.teacher else None
        self._peak = peak_flops(self.accelerator.device)
        needs_all = self.accelerator.num_processes > 1 or settings.hidden_weight > 0
        if needs_all and keep_all_layers(student):
            info("Layer drop is off: several processes and --hidden-weight need every layer in every step.")
        speed_up(student, settings)
        taps = LayerOutputs(student) if settings.hidden_weight else None
        if taps is not None and self.teacher is not None and self.teacher.taps is not None:
            refuse_unlike_layers(taps, self.teacher.taps)
        if teach_in_chunks(student, taps).whole:
            info(f"{type(student).__name__} cannot be cut below its head: all logits of a micro-batch are in memory.")
        if settings.liger:
            apply_liger(student)
        if self.accelerator.is_fsdp2:
            _fit_sharding(student)
        self.model, self._optimizer = self.accelerator.prepare(student, make_optimizer(student, settings))
        schedule = make_schedule(settings, self.budget.steps)
        self.stepper = Stepper(self.accelerator, self.model, self._optimizer, settings, schedule, self.teacher)
        # not earlier: what can be refused has been refused by now
        if resume == "never" and self.accelerator.is_main_process:
            self.saves.clear()
        self.accelerator.wait_for_everyone()
        set_seed(self.settings.seed, device_specific=True)  # every process drops out units of its own
        progress = self.saves.load_newest(self.accelerator, adjusting=resume == "always")
        self._adjusted = progress.adjusted if progress else []
        self.step = progress.step if progress else 0
        self._saved = self.step
        self.stream = Mixture(self._text.parts, self._text.objective, progress.positions if progress else None)
        self._read = self.stream.read
        self._guard = SpikeGuard(settings.spike, progress.losses if progress else ())
        self.accelerator.init_trackers("headfold", _plain(settings))
        file = self.saves.metrics if self.accelerator.is_main_process else None
        self.metrics = Metrics(file, self.step, lambda numbers, step: self.accelerator.log(numbers, step=step))
        self.follower = Follower(
            self._text.watch,
            self.accelerator,
            self.metrics,
            source=self.teacher.model if self.teacher else converted_from(self.source),
            start=None if self._from_scratch else self.source.folder,
            tokens_per_step=self.budget.tokens_per_step,
            trust_remote_code=self._trust,
        )
        acc = self.accelerator
        precision = "bf16" if acc.mixed_precision == "bf16" else "float32"
        info(f"Computing in {precision} on {acc.num_processes} × {acc.device.type}.")
        if progress:
            info(f"Continuing at step {self.step} of {self.budget.steps}.")
        else:
            info(f"{self.budget.tokens:,} tokens: {self.budget.steps:,} steps of {self.budget.tokens_per_step:,}.")

    def _load_teacher(self, settings: UptrainSettings) -> Teacher | None:
        if settings.teacher is None:
            return None
        tokenizer, tapped = self._text.tokenizer, settings.hidden_weight > 0
        return load_teacher(
            settings.teacher, self.accelerator, self.model, tokenizer, self._trust, tapped, settings.isolate_documents
        )

    def train(self, stop: StopRequest) -> None:
        """Step until the budget is spent.

        Raises:
            Interrupted: a signal came; what was done is saved.
        """
        self.model.train()
        self.stepper.asked = self.follower.asked = lambda: bool(stop)
        self._progress = self._reached()
        try:
            self.follower.begin(self._student(), self.step, self._due(self.settings.eval_every))
            self._train(stop)
        except StopRequested:
            raise Interrupted(
                f"Stopped by a signal at step {self.step} of {self.budget.steps}; {self._save()}.",
                "Run the same command to go on from the newest save.",
            ) from None
        except TrainingError:
            self.saves.set_aside(self.accelerator, self.step - self._guard.spikes)
            raise

    def _train(self, stop: StopRequest) -> None:
        clock = Clock(self.budget.steps - self.step)
        since_log: list[StepResult] = []
        while self.step < self.budget.steps:
            result = self.next_step()
            self._guard.see(self.step, result.loss)
            self._progress = self._reached()
            since_log.append(result)
            if self._due(self.settings.log_every):
                self._log(clock, since_log)
                since_log = []
            if self._due(self.settings.eval_every):
                self.follower.evaluate(self._student(), self.step)
            if self._due(self.settings.save_every):
                self._save()
            if anyone(self.accelerator, bool(stop)) and self.step < self.budget.steps:
                raise StopRequested
        self._guard.refuse_end(self.step)

    def _reached(self) -> Progress:
        return Progress(self.step, self.stream.positions(), self._guard.losses, self._adjusted)

    def _due(self, every: int) -> bool:
        """At the last step, and every so many; 0: at the last alone."""
        return self.step == self.budget.steps or bool(every and self.step % every == 0)

    def _student(self) -> Any:
        return self.accelerator.unwrap_model(self.model)

    def next_step(self) -> StepResult:
        """Draw a batch and learn from it."""
        rank, processes = self.accelerator.process_index, self.accelerator.num_processes
        batch = self.stream.next_batch(self.settings.batch, rank=rank, processes=processes)
        result = self.stepper(self.step, batch)
        self.step += 1
        return result

    def entry(self) -> dict[str, Any]:
        """What the record says of this run."""
        train = [line for line in self.metrics.lines if line["kind"] == "train"]
        texts = describe(self._text.parts)
        return {
            "step": "pretrain" if self._from_scratch else "uptrain",
            "source": None if self._from_scratch else str(self.source.folder.resolve()),
            "settings": self.settings.model_dump(mode="json"),
            "tokens": self.budget.tokens,
            "tokens_read": self.stream.read,
            "steps": self.budget.steps,
            "adjusted": self._adjusted,
            "data": texts[0] if len(texts) == 1 else texts,
            "epochs": self.stream.epochs()[0] if len(texts) == 1 else self.stream.epochs(),
            "processes": self.accelerator.num_processes,
            "distributed": "FSDP2" if self.accelerator.is_fsdp2 else self.accelerator.distributed_type.value,
            "device": str(self.accelerator.device.type),
            "mixed_precision": self.accelerator.mixed_precision,
            "final_loss_nats": train[-1]["loss"] if train else None,
            "heldout": self.follower.heldout,
            "recovered": self.follower.recovered,
        }

    def _log(self, clock: Clock, results: Sequence[StepResult]) -> None:
        """A line of progress; its rates count real tokens, its ``tokens`` those of the budget."""
        read, self._read = self.stream.read - self._read, self.stream.read
        rate, seconds_left = clock.lap(len(results), read)
        line: dict[str, Any] = {
            "step": self.step,
            "tokens": self.step * self.budget.tokens_per_step,
            "loss": fmean(result.loss for result in results),
            "learning_rate": self.stepper.learning_rate(self.step - 1),
            "gradient_norm": results[-1].gradient_norm,
            "tokens_per_second": rate,
        }
        if self.teacher is not None:
            line["divergence"] = fmean(result.divergence for result in results)
        if self.settings.hidden_weight:
            line["hidden"] = fmean(result.hidden for result in results)
        if self._peak is not None:
            flops = flops_per_token(*self._shapes, targets=sum(result.targets for result in results) / read)
            line["mfu"] = rate * flops / (self._peak * self.accelerator.num_processes)
        if self.follower.recovered is not None:
            line["recovered"] = self.follower.recovered
        self.metrics.add("train", **line)
        say_progress(line, self.budget.steps, seconds_left)

    def _save(self) -> str:
        """Save unless the weights are those of a spike or saved already; what was done, in words."""
        if not self._guard.calm:
            return "not saved, since the loss was spiking"
        if self.step != self._saved:
            self.saves.write(self.accelerator, self._progress)
            self._saved = self.step
        return "saved" if self.step else "there was nothing to save"


def _fit_sharding(model: Any) -> None:
    """Get a model ready for FSDP."""
    if is_encoder_decoder(model):
        # both sides then use the very same module, not only its weight, which must not be in two groups of FSDP
        model.set_input_embeddings(model.get_input_embeddings())


def _plain(settings: UptrainSettings) -> dict[str, Any]:
    """Settings in the few types that every tracker takes."""
    values = settings.model_dump()
    return {
        name: value if isinstance(value, int | float | str | bool) else str(value) for name, value in values.items()
    }
