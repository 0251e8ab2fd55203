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

from ..checkpoint.load import blank_language_model, load_language_model, load_tokenizer
from ..checkpoint.publish import refuse_occupied, refuse_overlap
from ..checkpoint.source import Checkpoint
from ..console import info
from ..errors import Interrupted, UnsupportedError, UsageError
from .budget import Budget, plan_budget, refuse_other_than_one
from .cost import flops_per_token
from .devices import make_accelerator, peak_flops
from .exercise import Exercise, choose_exercise
from .finish import whole_weights, write_trained
from .headloss import teach_in_chunks
from .hidden import Taps, refuse_unlike_layers
from .isolation import refuse_leaks
from .metrics import Clock, Metrics, say_progress
from .mixture import Mixture, Part, describe, open_mixture
from .optim import freeze_the_rest, make_optimizer, make_schedule
from .pretraining import resolve_pretraining
from .settings import UptrainSettings
from .signals import StopRequest, stop_on_signal
from .state import Progress, Saves
from .step import SpikeGuard, Stepper, StepResult
from .teacher import Teacher, converted_from, digest_of, load_teacher, resolve_teacher
from .trackers import chosen_trackers, logs_folder
from .watch import Watch, open_watch, recovered_share


def uptrain_checkpoint(
    checkpoint: str | Path,
    out: str | Path,
    settings: UptrainSettings,
    *,
    overwrite: bool = False,
    restart: bool = False,
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
        restart: throw an unfinished run away instead of continuing it.
        from_scratch: draw random weights from the config instead of reading them.

    Returns:
        ``out``.

    Raises:
        UsageError: ``out`` is in the way, no budget, or the unfinished run has other settings.
        DataError: too little text. TrainingError: the loss is not finite, or spiked. Interrupted: a signal came.
    """
    out = Path(out)
    refuse_occupied(out, overwrite)
    run = open_run(checkpoint, out, settings, from_scratch=from_scratch, trust_remote_code=trust_remote_code)
    run.prepare(restart)
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
    settings = resolve_teacher(settings, source)
    parts = open_mixture(settings.corpora, settings.columns)
    tokenizer = load_tokenizer(source.folder, trust_remote_code=trust_remote_code)
    set_seed(settings.seed)
    model = _build(source, from_scratch, trust_remote_code)
    _refuse_long_blocks(settings.block, model.config)
    exercise = choose_exercise(settings, tokenizer, model)
    if settings.isolate_documents:
        refuse_leaks(model)
    freeze_the_rest(model, settings.train)
    watch = open_watch(settings, tokenizer)
    accelerator = make_accelerator(settings, trackers, logs_folder(out))
    identity = {"checkpoint": source.digest(), "text": describe(parts), "teacher": digest_of(settings.teacher)}
    saves = Saves(out, settings, identity)
    text = _Text(parts, exercise, tokenizer, watch)
    return Run(accelerator, settings, budget, saves, source, model, text, from_scratch, trust_remote_code)


@dataclass(frozen=True)
class _Text:
    """What a run reads: the corpora, what it does with them, the tokenizer, and held-out text."""

    parts: Sequence[Part]
    exercise: Exercise
    tokenizer: Any
    watch: Watch | None


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
        text: _Text,
        from_scratch: bool,
        trust_remote_code: bool,
    ) -> None:
        self.accelerator, self.settings, self.budget, self.saves = accelerator, settings, budget, saves
        self.source, self.model = source, model
        self._text, self._from_scratch, self._trust = text, from_scratch, trust_remote_code

    def prepare(self, restart: bool = False) -> None:
        """Put everything on its device, and restore the newest save if there is one."""
        settings, student = self.settings, self.model
        self.teacher = self._load_teacher(settings)
        self._flops = flops_per_token(student, self.teacher.model if self.teacher else None)
        self._peak = peak_flops(self.accelerator.device)
        _speed_up(student, settings)
        taps = Taps(student) if settings.hidden_weight else None
        if taps is not None and self.teacher is not None and self.teacher.taps is not None:
            refuse_unlike_layers(taps, self.teacher.taps)
        if teach_in_chunks(student, taps).whole:
            info(f"{type(student).__name__} cannot be cut below its head: all logits of a micro-batch are in memory.")
        self.model, self._optimizer = self.accelerator.prepare(student, make_optimizer(student, settings))
        schedule = make_schedule(settings, self.budget.steps)
        self.stepper = Stepper(self.accelerator, self.model, self._optimizer, settings, schedule, self.teacher)
        # not earlier: what can be refused has been refused by now
        if restart and self.accelerator.is_main_process:
            self.saves.clear()
        self.accelerator.wait_for_everyone()
        progress = self.saves.load_newest(self.accelerator)
        self.step = progress.step if progress else 0
        self.stream = Mixture(
            self._text.parts, self._text.exercise, progress.positions if progress else None
        )
        self._guard = SpikeGuard(settings.spike, progress.losses if progress else ())
        self.accelerator.init_trackers("headfold", _plain(settings))
        file = self.saves.metrics if self.accelerator.is_main_process else None
        self.metrics = Metrics(file, self.step, lambda numbers, step: self.accelerator.log(numbers, step=step))
        if progress:
            info(f"Continuing at step {self.step} of {self.budget.steps}.")
        else:
            info(f"{self.budget.tokens:,} tokens: {self.budget.steps:,} steps of {self.budget.tokens_per_step:,}.")

    def _load_teacher(self, settings: UptrainSettings) -> Teacher | None:
        if settings.teacher is None:
            return None
        tokenizer, tapped = self._text.tokenizer, settings.hidden_weight > 0
        return load_teacher(settings.teacher, self.accelerator, self.model, tokenizer, self._trust, tapped)

    def train(self, stop: StopRequest) -> None:
        """Step until the budget is spent."""
        self.model.train()
        if self.step == 0:
            self._score_the_source()
            self._evaluate()
        clock = Clock(self.budget.steps - self.step)
        guard = self._guard
        since_log: list[StepResult] = []
        while self.step < self.budget.steps:
            result = self.next_step()
            guard.see(self.step, result.loss)
            since_log.append(result)
            last = self.step == self.budget.steps
            if last or self.step % self.settings.log_every == 0:
                self._log(clock, since_log)
                since_log = []
            if last or (self.settings.eval_every and self.step % self.settings.eval_every == 0):
                self._evaluate()
            stopping = self._anyone(bool(stop))
            due = last or self.step % self.settings.save_every == 0
            if (stopping or due) and guard.calm:
                self.saves.write(self.accelerator, Progress(self.step, self.stream.positions(), guard.losses))
            if stopping and not last:
                saved = "saved" if guard.calm else "not saved, since the loss was spiking"
                raise Interrupted(
                    f"Stopped by a signal at step {self.step} of {self.budget.steps}; {saved}.",
                    "Run the same command to go on from the newest save.",
                )

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
        held = [line["perplexity"] for line in self.metrics.lines if line["kind"] == "eval"]
        watch, texts = self._text.watch, describe(self._text.parts)
        return {
            "step": "pretrain" if self._from_scratch else "uptrain",
            "source": None if self._from_scratch else str(self.source.folder.resolve()),
            "settings": self.settings.model_dump(mode="json"),
            "tokens": self.budget.tokens,
            "steps": self.budget.steps,
            "data": texts[0] if len(texts) == 1 else texts,
            "epochs": self.stream.epochs()[0] if len(texts) == 1 else self.stream.epochs(),
            "processes": self.accelerator.num_processes,
            "distributed": "FSDP2" if self.accelerator.is_fsdp2 else self.accelerator.distributed_type.value,
            "device": str(self.accelerator.device.type),
            "mixed_precision": self.accelerator.mixed_precision,
            "final_loss_nats": train[-1]["loss"] if train else None,
            "heldout": {**watch.description, "perplexity": held[-1]} if watch and held else None,
            "recovered": recovered_share(self.metrics.lines),
        }

    def _log(self, clock: Clock, results: Sequence[StepResult]) -> None:
        rate, seconds_left = clock.lap(len(results), len(results) * self.budget.tokens_per_step)
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
            line["mfu"] = rate * self._flops / (self._peak * self.accelerator.num_processes)
        recovered = recovered_share(self.metrics.lines)
        if recovered is not None:
            line["recovered"] = recovered
        self.metrics.add("train", **line)
        say_progress(line, self.budget.steps, seconds_left)

    def _score_the_source(self) -> None:
        """Held-out perplexity of the teacher, or of the source where it is at hand: what is to be won back."""
        watch = self._text.watch
        if watch is None:
            return
        if self.teacher is not None:
            perplexity = watch.perplexity(self.teacher.model, self.accelerator)
        else:
            place = converted_from(self.source)
            if place is None:
                return
            perplexity = watch.perplexity_of(place, self.accelerator, self._trust)
        self.metrics.add("source", step=0, perplexity=perplexity)
        info(f"source · held-out perplexity {perplexity:.3f}")

    def _evaluate(self) -> None:
        """Held-out perplexity; every process must call this, since they share the windows."""
        if self._text.watch is None:
            return
        perplexity = self._text.watch.perplexity(self.accelerator.unwrap_model(self.model), self.accelerator)
        self.metrics.add("eval", step=self.step, tokens=self.step * self.budget.tokens_per_step, perplexity=perplexity)
        info(f"step {self.step}/{self.budget.steps} · held-out perplexity {perplexity:.3f}")

    def _anyone(self, asked: bool) -> bool:
        """True when any process was asked to stop, so that all stop at the same step."""
        if self.accelerator.num_processes == 1:
            return asked
        flag = torch.tensor(float(asked), device=self.accelerator.device)
        return bool(self.accelerator.reduce(flag, "sum") > 0)


def _build(source: Checkpoint, from_scratch: bool, trust_remote_code: bool) -> Any:
    """The model with float32 master weights; updates smaller than bf16's step size would be lost otherwise."""
    if not from_scratch:
        return load_language_model(source.folder, dtype=torch.float32, trust_remote_code=trust_remote_code)
    return blank_language_model(source.folder, dtype=torch.float32, trust_remote_code=trust_remote_code)


def _refuse_long_blocks(block: int, config: Any) -> None:
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and block > longest:
        raise UsageError(
            f"Blocks of {block} tokens are longer than the {longest} that the model can take.",
            f"Give --block {longest}.",
        )


def _speed_up(model: Any, settings: UptrainSettings) -> None:
    """Options that change speed and memory, not what is learnt."""
    if settings.gradient_checkpointing:
        if not model.supports_gradient_checkpointing:
            raise UnsupportedError(
                f"{type(model).__name__} cannot compute its activations again.", "Leave --gradient-checkpointing out."
            )
        model.activation_checkpointing_enable({"use_reentrant": False})
    if settings.compile:
        # layer by layer: they share one graph, and the head is called from outside
        kinds = set(getattr(model, "_no_split_modules", None) or [])
        for module in model.modules():
            if type(module).__name__ in kinds:
                module.compile()


def _plain(settings: UptrainSettings) -> dict[str, Any]:
    """Settings in the few types that every tracker takes."""
    values = settings.model_dump()
    return {
        name: value if isinstance(value, int | float | str | bool) else str(value) for name, value in values.items()
    }
