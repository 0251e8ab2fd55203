"""What a run will take, before it starts: from config files alone, or with ten steps of the real thing."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.load import load_tokenizer
from ..checkpoint.source import Checkpoint
from ..console import human_bytes, human_seconds, info
from ..corpus import HELDOUT, is_local, open_corpus
from ..errors import HeadfoldError
from .data.mixture import name_of, open_mixture
from .data.objective import choose_objective, refuse_meaningless
from .estimate.budget import plan_budget, refuse_uneven
from .estimate.cost import Shape, estimate_cost, on_paper, refuse_what_cannot_fit
from .estimate.pretraining import resolve_pretraining
from .loss.hidden_states import LayerOutputs, refuse_unlike_layers
from .models.student import refuse_long_blocks
from .models.teacher import converted_from, other_vocabulary
from .processes.devices import has_fast_bf16, memory_bytes
from .processes.launch import Layout
from .settings import UptrainSettings
from .training.optim import freeze_the_rest, refuse_untried

_MEASURED_STEPS = 10
_FLOAT32 = 4


def look_ahead(
    checkpoint: str | Path,
    settings: UptrainSettings,
    layout: Layout,
    *,
    device_bytes: int | None = None,
    refuse: bool = True,
    trust_remote_code: bool = False,
) -> list[list[str]]:
    """Tokens, steps, operations and memory of a run.

    Args:
        device_bytes: memory of one device; the default is that of this machine's.
        refuse: raise where the plan does not fit.

    Returns:
        rows of a name and a value, to print.

    Raises:
        UsageError: no budget, a batch that the processes cannot share, or what a run would refuse for this model.
        HeadfoldError: the run cannot fit into the device.
    """
    source = _config_of(checkpoint)
    settings = resolve_pretraining(settings, checkpoint, source)
    budget = plan_budget(settings)
    refuse_uneven(settings.batch, layout.processes)
    refuse_untried(settings, layout.sharded and layout.processes > 1)
    rows = [
        ["tokens", f"{budget.tokens:,}"],
        ["steps", f"{budget.steps:,}"],
        ["tokens per step", f"{budget.tokens_per_step:,}"],
        ["processes", f"{layout.processes}, {'weights shared (FSDP2)' if layout.sharded else 'each with all weights'}"],
    ]
    if source is None:
        info(f"There is no config.json of {checkpoint} to be had, so operations and memory are not estimated.")
        return rows
    model, _ = on_paper(source.folder, trust_remote_code=trust_remote_code)
    _refuse_text(settings, source, model, trust_remote_code)
    refuse_long_blocks(settings.sequence_length, model.config)
    freeze_the_rest(model, settings.train)
    student = Shape.of(model)
    place = _teacher_on_paper(settings, source)
    taught_by, teacher_bytes = on_paper(place, trust_remote_code=trust_remote_code) if place else (None, 0)
    if place and taught_by is not None:
        _refuse_teacher(settings, model, place, taught_by)
    cpu, bf16 = _computing(settings, layout, here=device_bytes is None)
    plan = estimate_cost(
        settings,
        budget.tokens,
        student,
        Shape.of(taught_by) if taught_by is not None else None,
        teacher_bytes=teacher_bytes if bf16 or not cpu else _FLOAT32,  # as load_teacher has it
        processes=layout.processes,
        sharded=layout.sharded,
        bf16=bf16,
        cpu=cpu,
    )
    rows += [["forward pass in", f"{'bf16' if bf16 else 'float32'} on {'a CPU' if cpu else 'a GPU'}"]]
    rows += [["parameters", f"{student.parameters:,}"], ["teacher", place or "none"]]
    rows += [["operations", f"{plan.flops:.2e}"]]
    rows += [[f"memory for {name}", human_bytes(size)] for name, size in plan.memory.items()]
    rows += [["memory of one device", f"about {human_bytes(plan.bytes_per_device)}"]]
    available, where = device_bytes, "a device"
    if available is None and layout.processes == 1:
        available, where = memory_bytes(torch.device("cpu" if cpu else "cuda")), "this machine"
    elif available is None and not cpu and torch.cuda.is_available():
        available, where = memory_bytes(torch.device("cuda")), "a GPU of this machine (--device-memory for another's)"
    if refuse and available is not None:
        refuse_what_cannot_fit(plan, available, where)
    return rows


def _refuse_text(settings: UptrainSettings, source: Checkpoint, model: Any, trust_remote_code: bool) -> None:
    """Raise where the run would for its text, as far as that shows without weights and without the network.

    Raises:
        UsageError: a file is not there, or settings mean nothing for this model. UnsupportedError: the tokenizer has no
            sentinels for span corruption.
    """
    refuse_meaningless(settings, model)
    if all(is_local(name_of(spec)) for spec in settings.corpora):
        open_mixture(settings.corpora, settings.columns)
    if settings.eval_data is not None and is_local(settings.eval_data):
        open_corpus(settings.eval_data, HELDOUT, settings.columns)
    if any(source.folder.glob("tokenizer*")):  # a config alone is enough for the rest of a dry run
        choose_objective(settings, load_tokenizer(source.folder, trust_remote_code=trust_remote_code), model)


def _refuse_teacher(settings: UptrainSettings, model: Any, place: str, teacher: Any) -> None:
    """Raise where the run would for its teacher, as far as that shows without weights.

    Raises:
        UsageError: another vocabulary, or layers that cannot be compared where they are to be.
    """
    if Shape.of(teacher).vocabulary != Shape.of(model).vocabulary:
        raise other_vocabulary(place)
    if settings.hidden_weight:
        refuse_unlike_layers(LayerOutputs(model), LayerOutputs(teacher))


def _computing(settings: UptrainSettings, layout: Layout, here: bool) -> tuple[bool, bool]:
    """(on CPUs, in bf16) for a run on this machine, or else on GPUs, which all have bf16."""
    gpu_here = torch.cuda.is_available()
    cpu = settings.device == "cpu" or layout.cpu or (here and layout.processes == 1 and not gpu_here)
    fast = has_fast_bf16(cpu) if cpu or gpu_here else True
    return cpu, settings.precision == "bf16" or (settings.precision == "auto" and fast)


def _teacher_on_paper(settings: UptrainSettings, source: Checkpoint) -> str | None:
    """The teacher's place as far as it is known without its weights."""
    if settings.teacher in ("auto", "source"):
        return converted_from(source)
    return settings.teacher


def measure(
    checkpoint: str | Path, settings: UptrainSettings, layout: Layout, *, trust_remote_code: bool = False
) -> list[list[str]]:
    """Take ten real steps, save nothing, and say how long the whole run would last on as many devices as ``layout``.

    The first two steps are left out of the time: memory is claimed and kernels are chosen there.
    """
    from .training.loop import open_run

    with tempfile.TemporaryDirectory() as name:
        quiet = settings.model_copy(update={"tracker": ("none",), "eval_data": None})
        run = open_run(checkpoint, Path(name) / "out", quiet, trust_remote_code=trust_remote_code)
        run.prepare()
        run.model.train()
        seconds, read = [], []
        for _ in range(min(_MEASURED_STEPS, run.budget.steps)):
            began, before = time.perf_counter(), run.stream.read
            run.next_step()
            seconds.append(time.perf_counter() - began)
            read.append(run.stream.read - before)
        counted = seconds[2:] or seconds
        step = sum(counted) / len(counted)
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


def _config_of(checkpoint: str | Path) -> Checkpoint | None:
    try:
        return Checkpoint.open(checkpoint, weights=False)
    except HeadfoldError:
        if Path(checkpoint).exists() or str(checkpoint).startswith((".", "/", "~")):
            raise  # of this machine; an id of the hub may be out of reach from where a run is planned
        return None
