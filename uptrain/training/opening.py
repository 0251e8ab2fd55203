"""Open everything that a run needs, and check it before anything is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from ...checkpoint.backbone import is_encoder_decoder
from ...checkpoint.folder.side_files import announce
from ...checkpoint.load import load_tokenizer
from ...checkpoint.publish import refuse_overlap
from ...checkpoint.source import Checkpoint
from ..data.mixture import WeightedCorpus, describe_mixture, open_mixture
from ..data.objective import TrainingObjective, choose_objective
from ..estimate.budget import Budget, plan_budget, refuse_uneven, require_one_budget
from ..estimate.pretraining import resolve_pretraining
from ..models.disk_layout import refuse_unpublishable
from ..models.dropout import set_dropout
from ..models.isolation import refuse_leaks
from ..models.liger import refuse_liger
from ..models.reach import FrozenParts, freeze_unreached
from ..models.student import build_student, freeze_other_weights, refuse_long_sequences
from ..models.teacher import digest_of, resolve_teacher
from ..monitor.heldout import HeldoutText, open_heldout
from ..monitor.trackers import chosen_trackers, logs_folder
from ..processes.devices import make_accelerator, refuse_untested_optimizer
from ..settings import UptrainSettings
from ..state import TrainingSaves


@dataclass(frozen=True)
class OpenedRun:
    """The parts of a run that has been checked.

    Attributes:
        settings: with the teacher and the pretraining tokens filled in.
        model: the student, on the CPU.
        encoder_decoder: the model reads one sequence and writes another.
        frozen: the part of the model that text does not reach.
        heldout: None if no held-out text is named.
        from_scratch: the weights were drawn, not read.
    """

    accelerator: Accelerator
    settings: UptrainSettings
    budget: Budget
    saves: TrainingSaves
    source: Checkpoint
    model: Any
    encoder_decoder: bool
    tokenizer: Any
    corpora: Sequence[WeightedCorpus]
    objective: TrainingObjective
    frozen: FrozenParts
    heldout: HeldoutText | None
    from_scratch: bool
    trust_remote_code: bool


def open_run(
    checkpoint: str | Path,
    out: Path,
    settings: UptrainSettings,
    *,
    from_scratch: bool = False,
    trust_remote_code: bool = False,
) -> OpenedRun:
    """Open and check everything, the cheap checks first, and write nothing.

    Raises:
        UsageError, UnsupportedError, DataError, CheckpointError: something does not fit.
    """
    require_one_budget(settings)
    source = Checkpoint.open(checkpoint, weights=not from_scratch)
    refuse_overlap(source.folder, out)
    announce(source.folder, source.left_out)
    settings = resolve_pretraining(settings, checkpoint, source)
    budget = plan_budget(settings)
    accelerator = _open_devices(settings, source, out)
    settings = resolve_teacher(settings, source)
    corpora = open_mixture(settings.corpora, settings.columns)
    tokenizer = load_tokenizer(source.folder, trust_remote_code=trust_remote_code)
    model = _open_student(settings, source, from_scratch, trust_remote_code)
    encoder_decoder = is_encoder_decoder(model)
    objective = choose_objective(settings, tokenizer, model, encoder_decoder)
    if settings.isolate_documents:  # while the model is on the CPU, where the trial's tensors are
        refuse_leaks(model)
    freeze_other_weights(model, settings.train)
    frozen = freeze_unreached(model)
    if source.tensors:
        refuse_unpublishable(model, source)
    heldout = open_heldout(settings, tokenizer, encoder_decoder)
    # The others find the hashes of the first in the user's cache.
    with accelerator.local_main_process_first():
        digests = {"checkpoint": source.digest(), "teacher": digest_of(settings.teacher)}
    identity = {**digests, "text": describe_mixture(corpora)}
    return OpenedRun(
        accelerator=accelerator,
        settings=settings,
        budget=budget,
        saves=TrainingSaves(out, settings, identity),
        source=source,
        model=model,
        encoder_decoder=encoder_decoder,
        tokenizer=tokenizer,
        corpora=corpora,
        objective=objective,
        frozen=frozen,
        heldout=heldout,
        from_scratch=from_scratch,
        trust_remote_code=trust_remote_code,
    )


def _open_devices(settings: UptrainSettings, source: Checkpoint, out: Path) -> Accelerator:
    """Set accelerate up, and check that trackers, kernels and optimizer work on these devices."""
    trackers = chosen_trackers(settings.tracker)
    if settings.liger:
        refuse_liger(str(source.config.get("model_type")), settings.device != "cpu" and torch.cuda.is_available())
    accelerator = make_accelerator(settings, trackers, logs_folder(out))
    refuse_uneven(settings.batch, accelerator.num_processes)
    refuse_untested_optimizer(settings, accelerator.is_fsdp2)
    return accelerator


def _open_student(settings: UptrainSettings, source: Checkpoint, from_scratch: bool, trust_remote_code: bool) -> Any:
    """Make the model, with the dropout of the settings."""
    set_seed(settings.seed)  # weights from scratch are the same on every process
    model = build_student(source, from_scratch, trust_remote_code)
    if settings.dropout is not None:
        set_dropout(model, settings.dropout)
    refuse_long_sequences(settings.sequence_length, model.config)
    return model
