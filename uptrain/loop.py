"""The uptraining run: prepare, step, watch, save, finish. accelerate owns devices and processes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import set_seed
from transformers import AutoConfig, AutoModelForCausalLM

from ..checkpoint.load import load_causal_lm, load_tokenizer
from ..checkpoint.publish import refuse_occupied, refuse_overlap
from ..checkpoint.record import last_entry
from ..checkpoint.source import Checkpoint
from ..console import info
from ..corpus import HELDOUT, TRAIN, Corpus, Encoder, open_corpus
from ..errors import Interrupted, UsageError
from ..eval.perplexity import quick_perplexity
from ..eval.windows import TokenDocument, tokenize_documents
from .budget import Budget, plan_budget
from .data import BlockStream
from .finish import write_trained
from .metrics import Clock, Metrics, say_progress
from .optim import make_optimizer, make_schedule
from .settings import UptrainSettings
from .signals import stop_on_signal
from .state import Progress, Saves
from .step import Stepper


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
        DataError: too little text. TrainingError: the loss is no longer finite. Interrupted: a signal came.
    """
    out = Path(out)
    refuse_occupied(out, overwrite)
    budget = plan_budget(settings)
    source = Checkpoint.open(checkpoint, weights=not from_scratch)
    refuse_overlap(source.folder, out)
    settings = _resolve_teacher(settings, source)
    corpus = open_corpus(settings.data, TRAIN)
    tokenizer = load_tokenizer(source.folder, trust_remote_code=trust_remote_code)
    set_seed(settings.seed)
    model = _build(source, from_scratch, trust_remote_code)
    _refuse_long_blocks(settings.block, model.config)
    watch = _open_watch(settings, tokenizer)
    accelerator = make_accelerator(settings)
    saves = Saves(out, settings, {"checkpoint": source.digest(), "text": corpus.describe()})
    run = _Run(accelerator, settings, budget, saves, watch)
    run.prepare(model, corpus, tokenizer, restart, trust_remote_code)
    with stop_on_signal() as stop:
        run.train(stop)
    entry = run.entry(source, corpus, from_scratch)
    weights = accelerator.get_state_dict(run.model)  # collective
    if accelerator.is_main_process:
        trained = accelerator.unwrap_model(run.model)
        write_trained(
            trained,
            weights,
            source,
            out,
            entry,
            saves.metrics,
            overwrite=overwrite,
            trust_remote_code=trust_remote_code,
        )
        saves.clear()
    accelerator.wait_for_everyone()
    return out


@dataclass(frozen=True)
class _Watch:
    """The held-out text whose perplexity is followed during the run."""

    documents: list[TokenDocument]
    description: dict[str, str]


class _Run:
    """State of one run between its phases."""

    def __init__(
        self, accelerator: Accelerator, settings: UptrainSettings, budget: Budget, saves: Saves, watch: _Watch | None
    ) -> None:
        self.accelerator, self.settings, self.budget = accelerator, settings, budget
        self.saves, self.watch = saves, watch

    def prepare(self, model: Any, corpus: Corpus, tokenizer: Any, restart: bool, trust_remote_code: bool) -> None:
        """Put everything on its device, and restore the newest save if there is one."""
        teacher = _load_teacher(self.settings, self.accelerator, model, tokenizer, trust_remote_code)
        self.model, self.optimizer = self.accelerator.prepare(model, make_optimizer(model, self.settings))
        schedule = make_schedule(self.settings, self.budget.steps)
        self.stepper = Stepper(self.accelerator, self.model, self.optimizer, self.settings, schedule, teacher)
        # not earlier: what can be refused has been refused by now
        if restart and self.accelerator.is_main_process:
            self.saves.clear()
        self.accelerator.wait_for_everyone()
        progress = self.saves.load_newest(self.accelerator)
        self.step = progress.step if progress else 0
        self.stream = BlockStream(
            corpus,
            Encoder(tokenizer),
            block=self.settings.block,
            seed=self.settings.seed,
            position=progress.position if progress else None,
        )
        self.metrics = Metrics(self.saves.metrics if self.accelerator.is_main_process else None, self.step)
        if progress:
            info(f"Continuing at step {self.step} of {self.budget.steps}.")
        else:
            info(f"{self.budget.tokens:,} tokens: {self.budget.steps:,} steps of {self.budget.tokens_per_step:,}.")

    def train(self, stop: Any) -> None:
        """Step until the budget is spent."""
        self.model.train()
        self._evaluate(due=self.step == 0)
        clock = Clock(self.budget.steps - self.step)
        since_log, loss_sum = 0, torch.zeros((), device=self.accelerator.device)
        while self.step < self.budget.steps:
            ids_BT = self.stream.next_batch(
                self.settings.batch, rank=self.accelerator.process_index, processes=self.accelerator.num_processes
            )
            loss, norm = self.stepper(self.step, ids_BT)
            self.step += 1
            since_log, loss_sum = since_log + 1, loss_sum + loss
            last = self.step == self.budget.steps
            if last or self.step % self.settings.log_every == 0:
                self._log(clock, since_log, float(loss_sum) / since_log, norm)
                since_log, loss_sum = 0, torch.zeros_like(loss_sum)
            self._evaluate(due=last or bool(self.settings.eval_every and self.step % self.settings.eval_every == 0))
            stopping = self._anyone(bool(stop))
            if stopping or last or self.step % self.settings.save_every == 0:
                self.saves.write(self.accelerator, Progress(self.step, self.stream.position))
            if stopping and not last:
                raise Interrupted(
                    f"Stopped by a signal at step {self.step} of {self.budget.steps}; saved.",
                    "Run the same command to go on.",
                )

    def entry(self, source: Checkpoint, corpus: Corpus, from_scratch: bool) -> dict[str, Any]:
        """What the record says of this run."""
        train = [line for line in self.metrics.lines if line["kind"] == "train"]
        held = [line["perplexity"] for line in self.metrics.lines if line["kind"] == "eval"]
        return {
            "step": "pretrain" if from_scratch else "uptrain",
            "source": None if from_scratch else str(source.folder.resolve()),
            "settings": self.settings.model_dump(),
            "tokens": self.budget.tokens,
            "steps": self.budget.steps,
            "data": corpus.describe(),
            "epochs": self.stream.position.epoch,
            "processes": self.accelerator.num_processes,
            "device": str(self.accelerator.device.type),
            "mixed_precision": self.accelerator.mixed_precision,
            "final_loss_nats": train[-1]["loss"] if train else None,
            "heldout": {**self.watch.description, "perplexity": held[-1]} if self.watch and held else None,
        }

    def _log(self, clock: Clock, steps: int, loss: float, norm: float) -> None:
        rate, seconds_left = clock.lap(steps, steps * self.budget.tokens_per_step)
        line = {
            "step": self.step,
            "tokens": self.step * self.budget.tokens_per_step,
            "loss": loss,
            "learning_rate": self.stepper.learning_rate(self.step - 1),
            "gradient_norm": norm,
            "tokens_per_second": rate,
        }
        self.metrics.add("train", **line)
        say_progress(line, self.budget.steps, seconds_left)

    def _evaluate(self, *, due: bool) -> None:
        """Held-out perplexity where it is due; every process must call this, since they share the windows."""
        if self.watch is None or not due:
            return
        model = self.accelerator.unwrap_model(self.model)
        documents, window = self.watch.documents, self.settings.block
        perplexity = quick_perplexity(model, documents, window=window, accelerator=self.accelerator)
        self.metrics.add("eval", step=self.step, tokens=self.step * self.budget.tokens_per_step, perplexity=perplexity)
        info(f"step {self.step}/{self.budget.steps} · held-out perplexity {perplexity:.3f}")

    def _anyone(self, asked: bool) -> bool:
        """True when any process was asked to stop, so that all stop at the same step."""
        if self.accelerator.num_processes == 1:
            return asked
        flag = torch.tensor(float(asked), device=self.accelerator.device)
        return bool(self.accelerator.reduce(flag, "sum") > 0)


def make_accelerator(settings: UptrainSettings) -> Accelerator:
    """accelerate with the precision that was asked for; an earlier run of this process does not dictate its own."""
    AcceleratorState._reset_state()
    cpu = settings.device == "cpu" or not torch.accelerator.is_available()
    bf16 = settings.precision == "bf16" or (settings.precision == "auto" and _has_fast_bf16(cpu))
    return Accelerator(cpu=cpu, mixed_precision="bf16" if bf16 else "no")


def _has_fast_bf16(cpu: bool) -> bool:
    """bf16 pays on every accelerator that has it, and on CPUs with matrix units (AMX) for it."""
    if not cpu:
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", None)  # private: absent in some versions, then fp32
    return bool(has_amx and has_amx())


def _build(source: Checkpoint, from_scratch: bool, trust_remote_code: bool) -> Any:
    """The model with float32 master weights; updates smaller than bf16's step size would be lost otherwise."""
    if not from_scratch:
        return load_causal_lm(source.folder, dtype=torch.float32, trust_remote_code=trust_remote_code)
    config = AutoConfig.from_pretrained(source.folder, trust_remote_code=trust_remote_code)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code)


def _refuse_long_blocks(block: int, config: Any) -> None:
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and block > longest:
        raise UsageError(
            f"Blocks of {block} tokens are longer than the {longest} that the model can take.",
            f"Give --block {longest}.",
        )


def _resolve_teacher(settings: UptrainSettings, source: Checkpoint) -> UptrainSettings:
    """Replace the teacher ``source`` by the checkpoint that the conversion record names."""
    if settings.teacher != "source":
        return settings
    entry = last_entry(source.folder, "convert")
    if entry is None:
        raise UsageError(
            f"{source.folder} has no conversion record that says what its source is.",
            "Name the teacher: --teacher CHECKPOINT.",
        )
    folder = str(entry.get("source_folder", ""))
    return settings.model_copy(update={"teacher": folder if Path(folder).is_dir() else str(entry["source"])})


def _load_teacher(
    settings: UptrainSettings, accelerator: Accelerator, student: Any, tokenizer: Any, trust_remote_code: bool
) -> Any:
    """The frozen teacher on its device; refused where its tokens are not the student's."""
    if settings.teacher is None:
        return None
    teacher = load_causal_lm(settings.teacher, trust_remote_code=trust_remote_code)
    vocabulary = load_tokenizer(settings.teacher, trust_remote_code=trust_remote_code).get_vocab()
    widths = [model.get_output_embeddings().weight.shape[0] for model in (teacher, student)]
    if vocabulary != tokenizer.get_vocab() or widths[0] != widths[1]:
        raise UsageError(
            f"The teacher {settings.teacher} has another vocabulary than the checkpoint, so it cannot be followed.",
            "Distil from the checkpoint's own source, or leave --teacher out.",
        )
    return teacher.to(accelerator.device).eval().requires_grad_(False)


def _open_watch(settings: UptrainSettings, tokenizer: Any) -> _Watch | None:
    if settings.eval_data is None:
        return None
    corpus = open_corpus(settings.eval_data, HELDOUT)
    return _Watch(tokenize_documents(tokenizer, corpus, max_tokens=settings.eval_tokens), corpus.describe())
