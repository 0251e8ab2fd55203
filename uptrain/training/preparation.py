"""Put an opened run on its devices, and restore its newest save if there is one."""

from __future__ import annotations

from typing import Any

from accelerate.utils import set_seed

from ...console import counted, info
from ..data.mixture import Mixture
from ..estimate.model_size import ModelSize
from ..loss.chunked import attach_chunked_loss
from ..loss.hidden_states import LayerOutputs, refuse_unlike_layers
from ..models.dropout import keep_all_layers
from ..models.liger import apply_liger
from ..models.student import fit_for_sharding, speed_up
from ..models.teacher import Teacher, converted_from, load_teacher
from ..models.unread import describe_unread, unread_tensors
from ..monitor.heldout import HeldoutMonitor
from ..monitor.metrics import Metrics
from ..monitor.progress import FlopsUtilisation
from ..monitor.spikes import SpikeDetector
from ..monitor.trackers import as_plain_values
from ..processes.devices import peak_flops
from ..settings import Resume
from ..state import Progress
from .loop import TrainingRun
from .opening import OpenedRun
from .optim import make_optimizer, make_schedule
from .step import Stepper


def prepare_run(opened: OpenedRun, resume: Resume = "auto") -> TrainingRun:
    """Put everything on its device, and restore the newest save if there is one. Every process must call this.

    Raises:
        UsageError: there is no save to continue, or it belongs to another run.
    """
    if resume == "always":
        opened.saves.require_one()
    teacher = _load_teacher(opened)
    utilisation = _utilisation(opened, teacher)  # while the parameters are whole: sharding splits them
    _modify_student(opened, teacher)
    model, stepper = _make_stepper(opened, teacher)
    progress = _restore(opened, resume)
    step = progress.step if progress else 0
    metrics = _open_metrics(opened, step)
    run = TrainingRun(
        opened,
        model,
        stepper,
        mixture=Mixture(opened.corpora, opened.objective, progress.positions if progress else None),
        spikes=SpikeDetector(opened.settings.spike, progress.losses if progress else ()),
        metrics=metrics,
        heldout=_make_heldout_monitor(opened, teacher, metrics),
        utilisation=utilisation,
        step=step,
        adjusted=progress.adjusted if progress else [],
    )
    _tell(opened, progress)
    return run


def _load_teacher(opened: OpenedRun) -> Teacher | None:
    settings = opened.settings
    if settings.teacher is None:
        return None
    return load_teacher(
        settings.teacher,
        opened.accelerator,
        opened.model,
        opened.tokenizer,
        opened.trust_remote_code,
        compares_layers=settings.hidden_weight > 0,
        isolates_documents=settings.isolate_documents,
    )


def _utilisation(opened: OpenedRun, teacher: Teacher | None) -> FlopsUtilisation | None:
    peak = peak_flops(opened.accelerator.device)
    if peak is None:
        return None
    student_size = ModelSize.of(opened.model, opened.encoder_decoder)
    teacher_size = ModelSize.of(teacher.model, opened.encoder_decoder) if teacher else None
    return FlopsUtilisation(student_size, teacher_size, peak * opened.accelerator.num_processes)


def _modify_student(opened: OpenedRun, teacher: Teacher | None) -> None:
    """Attach the loss, and apply what changes the student's code or modules."""
    student, settings = opened.model, opened.settings
    # processes wait for the gradients of every layer, and hidden states are compared layer by layer
    needs_all_layers = opened.accelerator.num_processes > 1 or settings.hidden_weight > 0
    if needs_all_layers and keep_all_layers(student):
        info("Layer drop is off: several processes and --hidden-weight need every layer in every step.")
    speed_up(student, settings)
    outputs = LayerOutputs(student) if settings.hidden_weight else None
    if outputs is not None and teacher is not None and teacher.outputs is not None:
        refuse_unlike_layers(outputs, teacher.outputs)
    if attach_chunked_loss(student, outputs).whole:
        info(f"{type(student).__name__} cannot be split below its head: all logits of a micro-batch are in memory.")
    if settings.liger:  # after the trials of attach_chunked_loss, which run on the CPU
        apply_liger(student)
    if opened.accelerator.is_fsdp2:
        fit_for_sharding(student, opened.encoder_decoder)


def _make_stepper(opened: OpenedRun, teacher: Teacher | None) -> tuple[Any, Stepper]:
    settings, accelerator = opened.settings, opened.accelerator
    model, optimizer = accelerator.prepare(opened.model, make_optimizer(opened.model, settings))
    schedule = make_schedule(settings, opened.budget.steps)
    return model, Stepper(accelerator, model, optimizer, settings, schedule, teacher)


def _restore(opened: OpenedRun, resume: Resume) -> Progress | None:
    """Load the newest save, or discard all saves if the run shall begin anew."""
    # this comes late on purpose: everything that can be refused has been refused by now, and the saves were safe
    if resume == "never" and opened.accelerator.is_main_process:
        opened.saves.clear()
    opened.accelerator.wait_for_everyone()
    set_seed(opened.settings.seed, device_specific=True)  # dropout differs between processes
    return opened.saves.load_newest(opened.accelerator, adjusting=resume == "always")


def _open_metrics(opened: OpenedRun, step: int) -> Metrics:
    accelerator = opened.accelerator
    accelerator.init_trackers("headfold", as_plain_values(opened.settings))
    file = opened.saves.metrics if accelerator.is_main_process else None
    return Metrics(file, step, lambda numbers, step: accelerator.log(numbers, step=step))


def _make_heldout_monitor(opened: OpenedRun, teacher: Teacher | None, metrics: Metrics) -> HeldoutMonitor:
    return HeldoutMonitor(
        opened.heldout,
        opened.accelerator,
        metrics,
        source=teacher.model if teacher else converted_from(opened.source),
        start=None if opened.from_scratch else opened.source.folder,
        tokens_per_step=opened.budget.tokens_per_step,
        trust_remote_code=opened.trust_remote_code,
    )


def _tell(opened: OpenedRun, progress: Progress | None) -> None:
    accelerator, budget = opened.accelerator, opened.budget
    precision = "bf16" if accelerator.mixed_precision == "bf16" else "float32"
    if opened.frozen.places:
        info(f"Frozen: {opened.frozen.describe()}. They are published as they are in the source.")
    unread = unread_tensors(opened.model, opened.source)
    if unread:
        info(f"{describe_unread(unread)} They are not trained, and are copied into the result as they are.")
    info(f"Computing in {precision} on {accelerator.num_processes} × {accelerator.device.type}.")
    if progress:
        info(f"Continuing at step {progress.step} of {budget.steps}.")
    else:
        info(f"{counted(budget.tokens, 'token')}: {counted(budget.steps, 'step')} of {budget.tokens_per_step:,}.")
