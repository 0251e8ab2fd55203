"""Uptrain a checkpoint: open the run, train it, and publish the result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..checkpoint.publish import claiming
from ..checkpoint.record import named_source
from ..local_paths import expanded
from .data.mixture import describe_mixture
from .models.export import whole_weights, write_trained
from .processes.signals import stop_on_signal
from .settings import Resume, UptrainSettings
from .training.loop import TrainingRun
from .training.opening import open_run
from .training.preparation import prepare_run


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

    This is the uptraining of Ainslie et al. 2023, §2.2: the pretraining continues with its own objective for a share of
    its tokens. With a teacher, the loss is the KL divergence to the teacher's predictions instead.
    Call the function again with the same arguments to continue a run that was interrupted.

    Args:
        checkpoint: folder or hub id.
        out: folder of the result. The folder ``<out>.training`` beside it holds saves and metrics until the end.
        resume: what to do about an unfinished run, see :data:`headfold.uptrain.settings.Resume`.
        from_scratch: draw random weights from the config instead of reading them.

    Returns:
        ``out``.

    Raises:
        UsageError: ``out`` is in the way, there is no budget, the unfinished run has other settings, or there is none
            to continue.
        DataError: there is too little text.
        TrainingError: the loss is not finite, or it spiked.
        Interrupted: a signal came.
    """
    out = expanded(out)
    # before anything is loaded
    with claiming(out, overwrite=overwrite):
        opened = open_run(checkpoint, out, settings, from_scratch=from_scratch, trust_remote_code=trust_remote_code)
        _train(prepare_run(opened, resume), out, overwrite)
    return out


def _train(run: TrainingRun, out: Path, overwrite: bool) -> None:
    try:
        with stop_on_signal() as stop:
            run.train(stop)
    finally:
        # one by one: accelerate's own end_training would end the group of processes as well
        for tracker in run.accelerator.trackers:
            tracker.finish()
    _publish(run, out, overwrite)


def _publish(run: TrainingRun, out: Path, overwrite: bool) -> None:
    """Write the result, and remove the saves. Every process must call this."""
    opened = run.opened
    weights = whole_weights(run.accelerator, run.model)
    if run.accelerator.is_main_process:
        write_trained(
            run.accelerator.unwrap_model(run.model),
            weights,
            opened.source,
            out,
            _record_entry(run),
            opened.saves.metrics,
            overwrite=overwrite,
            trust_remote_code=opened.trust_remote_code,
        )
        # only after the result is published
        opened.saves.clear()
    run.accelerator.wait_for_everyone()


def _record_entry(run: TrainingRun) -> dict[str, Any]:
    """Describe the run for the record beside the weights."""
    opened, accelerator = run.opened, run.accelerator
    logged = [line for line in run.metrics.lines if line["kind"] == "train"]
    texts, epochs = describe_mixture(opened.corpora), run.mixture.epochs()
    return {
        "step": "pretrain" if opened.from_scratch else "uptrain",
        **({"source": None} if opened.from_scratch else named_source(opened.source.folder)),
        "settings": opened.settings.model_dump(mode="json"),
        "tokens": run.budget.tokens,
        "tokens_read": run.mixture.read,
        "steps": run.budget.steps,
        "adjusted": run.adjusted,
        "data": texts[0] if len(texts) == 1 else texts,
        "epochs": epochs[0] if len(texts) == 1 else epochs,
        "frozen": list(opened.frozen.places),
        "processes": accelerator.num_processes,
        "distributed": "FSDP2" if accelerator.is_fsdp2 else accelerator.distributed_type.value,
        "device": str(accelerator.device.type),
        "mixed_precision": accelerator.mixed_precision,
        "final_loss_nats": logged[-1]["loss"] if logged else None,
        "heldout": run.heldout.for_record,
        "recovered": run.heldout.recovered,
    }
