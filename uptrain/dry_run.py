"""Estimate the cost of a run before it starts: from config files alone, or from ten measured steps."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.backbone import is_encoder_decoder
from ..checkpoint.load import load_tokenizer
from ..checkpoint.source import Checkpoint
from ..console import human_bytes, human_seconds, info
from ..corpus import HELDOUT, is_local, open_corpus
from ..errors import HeadfoldError
from .data.mixture import name_of, open_mixture
from .data.objective import choose_objective, refuse_unfit_settings
from .estimate.budget import Budget, plan_budget, refuse_uneven
from .estimate.cost import CostEstimate, estimate_cost, refuse_what_cannot_fit
from .estimate.model_size import ModelSize, model_without_weights
from .estimate.pretraining import resolve_pretraining
from .loss.hidden_states import LayerOutputs, refuse_unlike_layers
from .models.disk_layout import refuse_unpublishable
from .models.reach import freeze_unreached
from .models.student import freeze_other_weights, refuse_long_sequences
from .models.teacher import converted_from, other_vocabulary
from .models.unread import describe_unread, unread_tensors
from .processes.devices import has_fast_bf16, memory_bytes, refuse_untested_optimizer
from .processes.launch import Layout
from .settings import UptrainSettings
from .training.opening import open_run
from .training.preparation import prepare_run

_MEASURED_STEPS = 10
_FLOAT32 = 4


def estimate_run(
    checkpoint: str | Path,
    settings: UptrainSettings,
    layout: Layout,
    *,
    device_bytes: int | None = None,
    refuse: bool = True,
    trust_remote_code: bool = False,
) -> list[list[str]]:
    """Estimate tokens, steps, operations and memory of a run from config files alone.

    Args:
        device_bytes: memory of one device; the default is the memory of this machine's.
        refuse: raise an error if the run does not fit.

    Returns:
        rows of a name and a value, to print.

    Raises:
        UsageError: no budget, a batch that the processes cannot share, or anything that a run would refuse for this
            model.
        HeadfoldError: the run does not fit into the device.
    """
    source = _open_config(checkpoint)
    settings = resolve_pretraining(settings, checkpoint, source)
    budget = plan_budget(settings)
    refuse_uneven(settings.batch, layout.processes)
    refuse_untested_optimizer(settings, layout.sharded and layout.processes > 1)
    rows = _budget_rows(budget, layout)
    if source is None:
        info(f"There is no config.json of {checkpoint} here, so operations and memory are not estimated.")
        return rows
    cpu, bf16 = _device_and_precision(settings, layout, here=device_bytes is None)
    place, student, teacher, teacher_bytes, untrained = _model_sizes(settings, source, trust_remote_code)
    cost = estimate_cost(
        settings,
        budget.tokens,
        student,
        teacher,
        teacher_bytes=teacher_bytes if bf16 or not cpu else _FLOAT32,  # see load_teacher
        processes=layout.processes,
        sharded=layout.sharded,
        bf16=bf16,
        cpu=cpu,
    )
    if refuse:
        _refuse_what_does_not_fit(cost, layout, device_bytes, cpu)
    return [
        *rows,
        ["forward pass in", f"{'bf16' if bf16 else 'float32'} on {'a CPU' if cpu else 'a GPU'}"],
        ["parameters", f"{student.parameters:,}"],
        *untrained,
        ["teacher", place or "none"],
        ["operations", f"{cost.flops:.2e}"],
        *([f"memory for {name}", human_bytes(size)] for name, size in cost.memory.items()),
        ["memory of one device", f"about {human_bytes(cost.bytes_per_device)}"],
    ]


def _budget_rows(budget: Budget, layout: Layout) -> list[list[str]]:
    return [
        ["tokens", f"{budget.tokens:,}"],
        ["steps", f"{budget.steps:,}"],
        ["tokens per step", f"{budget.tokens_per_step:,}"],
        ["processes", f"{layout.processes}, {'weights shared (FSDP2)' if layout.sharded else 'each with all weights'}"],
    ]


def _model_sizes(
    settings: UptrainSettings, source: Checkpoint, trust_remote_code: bool
) -> tuple[str | None, ModelSize, ModelSize | None, int, list[list[str]]]:
    """Check the models of a run as far as they show without weights.

    Returns:
        (place of the teacher, size of the student, size of the teacher, bytes of one of the teacher's weights, rows
        about weights that are not trained).

    Raises:
        UsageError, UnsupportedError: a run would refuse the settings for these models.
    """
    model, _ = model_without_weights(source.folder, trust_remote_code=trust_remote_code)
    encoder_decoder = is_encoder_decoder(model)
    _refuse_text(settings, source, model, encoder_decoder, trust_remote_code)
    refuse_long_sequences(settings.sequence_length, model.config)
    freeze_other_weights(model, settings.train)
    untrained = _untrained_rows(model, source)
    student = ModelSize.of(model, encoder_decoder)
    place = _teacher_place(settings, source)
    if place is None:
        return None, student, None, 0, untrained
    teacher, teacher_bytes = model_without_weights(place, trust_remote_code=trust_remote_code)
    size = ModelSize.of(teacher, encoder_decoder)
    # a run also compares the tokens; without a tokenizer only the number is known
    if size.vocabulary != student.vocabulary:
        raise other_vocabulary(place)
    if settings.hidden_weight:
        refuse_unlike_layers(LayerOutputs(model), LayerOutputs(teacher))
    return place, student, size, teacher_bytes, untrained


def _untrained_rows(model: Any, source: Checkpoint) -> list[list[str]]:
    """Freeze what text does not reach, and describe it and what the class does not load.

    Raises:
        UnsupportedError: the trained model would be saved with other tensors than its source.
    """
    frozen, rows = freeze_unreached(model), []
    if frozen.places:
        rows.append(["frozen", frozen.describe()])
    try:
        stored = Checkpoint.open(source.folder)
    except HeadfoldError:  # a config alone is enough for a dry run
        return rows
    refuse_unpublishable(model, stored)
    unread = unread_tensors(model, stored)
    if unread:
        rows.append(["copied untrained", describe_unread(unread)])
    return rows


def _refuse_what_does_not_fit(cost: CostEstimate, layout: Layout, device_bytes: int | None, cpu: bool) -> None:
    """Compare the cost with the device that the user named, or with this machine if the run can be meant for it.

    Raises:
        HeadfoldError: the run does not fit.
    """
    if device_bytes is not None:
        refuse_what_cannot_fit(cost, device_bytes, "a device")
    elif layout.processes == 1:
        refuse_what_cannot_fit(cost, memory_bytes(torch.device("cpu" if cpu else "cuda")), "this machine")
    elif not cpu and torch.cuda.is_available():
        where = "a GPU of this machine (--device-memory for another's)"
        refuse_what_cannot_fit(cost, memory_bytes(torch.device("cuda")), where)


def _refuse_text(
    settings: UptrainSettings, source: Checkpoint, model: Any, encoder_decoder: bool, trust_remote_code: bool
) -> None:
    """Check the text of a run as far as possible without weights and without the network.

    Raises:
        UsageError: a file does not exist, or settings do not fit the model.
        UnsupportedError: the tokenizer has no sentinels for span corruption.
        DataError: the first part of a text cannot be used.
    """
    refuse_unfit_settings(settings, model, encoder_decoder)
    local = all(is_local(name_of(spec)) for spec in settings.corpora)
    mixture = open_mixture(settings.corpora, settings.columns) if local else []
    if settings.eval_data is not None and is_local(settings.eval_data):
        open_corpus(settings.eval_data, HELDOUT, settings.columns)
    if any(source.folder.glob("tokenizer*")):  # a config alone is enough for the rest of a dry run
        tokenizer = load_tokenizer(source.folder, trust_remote_code=trust_remote_code)
        objective = choose_objective(settings, tokenizer, model, encoder_decoder)
        for part in mixture:  # the first chunk of each text: broken lines, unknown tokens, too little text
            next(objective.stream(part.corpus, None))


def _device_and_precision(settings: UptrainSettings, layout: Layout, here: bool) -> tuple[bool, bool]:
    """Tell whether the run is (on CPUs, in bf16). A run elsewhere is taken to be on GPUs, which all have bf16."""
    gpu_here = torch.cuda.is_available()
    cpu = settings.device == "cpu" or layout.cpu or (here and layout.processes == 1 and not gpu_here)
    fast = has_fast_bf16(cpu) if cpu or gpu_here else True
    return cpu, settings.precision == "bf16" or (settings.precision == "auto" and fast)


def _teacher_place(settings: UptrainSettings, source: Checkpoint) -> str | None:
    """Find the place of the teacher, as far as it is known without its weights."""
    if settings.teacher in ("auto", "source"):
        return converted_from(source)
    return settings.teacher


def measure(
    checkpoint: str | Path, settings: UptrainSettings, layout: Layout, *, trust_remote_code: bool = False
) -> list[list[str]]:
    """Take ten real steps, save nothing, and estimate how long the whole run would last on the devices of ``layout``.

    The first two steps are left out of the time, because memory is claimed and kernels are chosen in them.
    """
    with tempfile.TemporaryDirectory() as name:
        # ten steps must not appear as a run in a tracker
        quiet = settings.model_copy(update={"tracker": ("none",), "eval_data": None})
        run = prepare_run(open_run(checkpoint, Path(name) / "out", quiet, trust_remote_code=trust_remote_code))
        run.model.train()
        seconds, read = [], []
        for _ in range(min(_MEASURED_STEPS, run.budget.steps)):
            began, before = time.perf_counter(), run.mixture.read
            run.next_step()
            seconds.append(time.perf_counter() - began)
            read.append(run.mixture.read - before)
        # a run of one or two steps has no others
        counted = seconds[2:] or seconds
        step = sum(counted) / len(counted)
        # an estimate for the launch file, measured on the processes that are here
        shared = layout.processes / run.accelerator.num_processes
    rows = [
        ["seconds per step, measured here", f"{step:.2f}"],
        ["tokens per second, measured here", f"{sum(read[-len(counted) :]) / sum(counted):,.0f}"],
        ["the whole run here", human_seconds(step * run.budget.steps)],
    ]
    if shared > 1:
        ideal = human_seconds(step * run.budget.steps / shared)
        rows.append([f"on {layout.processes} such devices, at best", ideal])
    return rows


def _open_config(checkpoint: str | Path) -> Checkpoint | None:
    try:
        return Checkpoint.open(checkpoint, weights=False)
    except HeadfoldError:
        if Path(checkpoint).exists() or str(checkpoint).startswith((".", "/", "~")):
            raise  # a folder of this machine; but the hub may be out of reach from where a run is planned
        return None
