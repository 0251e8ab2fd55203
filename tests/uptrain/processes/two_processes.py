"""The runs of test_processes.py on two processes: all in one start, since importing the libraries takes long.

accelerate launch --multi_gpu --num_processes 2 two_processes.py CHECKPOINT TEXT FOLDER T5 CONVERTED PAIRS SEEING
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from headfold.errors import Interrupted
from headfold.uptrain.run import uptrain_checkpoint
from headfold.uptrain.settings import UptrainSettings
from headfold.uptrain.training import loop, step

RANK = int(os.environ["RANK"])
FSDP = {
    "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true", "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
}  # fmt: skip


def stopped_at(step: int, *arguments) -> None:
    """A run in which one rank alone gets a SIGTERM as a step begins; all must stop after it."""
    real = loop.Stepper.__call__

    def signalled(self, now, batch):
        if now == step and RANK == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, now, batch)

    loop.Stepper.__call__ = signalled
    try:
        with pytest.raises(Interrupted, match=f"at step {step + 1} of"):
            uptrain_checkpoint(*arguments)
    finally:
        loop.Stepper.__call__ = real


def abandoned_at(at: int, *arguments) -> None:
    """A run in which one rank alone gets a SIGTERM between the micro-batches of a step that takes long."""
    real = loop.Stepper._sums
    seen = []

    def signalled(self, micro):
        seen.append(micro)
        if len(seen) == 2 * at + 1 and RANK == 1:  # two micro-batches a step on each rank
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, micro)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Stepper, "_sums", signalled)
        patch.setattr(step, "_PATIENCE_SECONDS", 0.0)
        with pytest.raises(Interrupted, match=f"at step {at} of"):
            uptrain_checkpoint(*arguments)
    assert len(seen) == 2 * at + 1


def pairs(checkpoint: str, t5: str, pairs_file: str, folder: Path) -> None:
    """An encoder-decoder on pairs, of which the processes have unequal numbers of targets."""
    common = {
        "data": pairs_file, "source_column": "input", "target_column": "answer.back", "sequence_length": 16, "batch": 4,
        "micro_batch": 1, "learning_rate": 1e-2, "precision": "fp32", "device": "cpu", "log_every": 1, "seed": 3,
        "eval_data": pairs_file, "eval_tokens": 100, "steps": 4, "tracker": ("none",), "teacher": t5,
        "distillation_weight": 0.5,
    }  # fmt: skip
    uptrain_checkpoint(checkpoint, folder, UptrainSettings(**common))


def main(checkpoint: str, text: str, folder: Path, t5: str, converted: str, pairs_file: str, seeing: str) -> None:
    torch.set_num_threads(1)
    common = {
        "data": text, "sequence_length": 16, "batch": 4, "micro_batch": 1, "learning_rate": 3e-3, "precision": "fp32",
        "device": "cpu", "log_every": 1, "save_every": 5, "seed": 3, "eval_data": text, "eval_tokens": 400,
        "eval_every": 6, "steps": 12, "tracker": ("none",),
    }  # fmt: skip
    plain = UptrainSettings(**common, teacher=None)
    apart = UptrainSettings(**common, teacher=None, isolate_documents=True)
    with_teacher = UptrainSettings(
        **{**common, "steps": 6}, teacher=checkpoint, distillation_weight=0.5, hidden_weight=2
    )
    uptrain_checkpoint(checkpoint, folder / "ddp", plain)
    stopped_at(7, checkpoint, folder / "ddp-resumed", plain)
    uptrain_checkpoint(checkpoint, folder / "ddp-resumed", plain)
    stopped_at(7, checkpoint, folder / "handed-over", plain)
    uptrain_checkpoint(checkpoint, folder / "ddp-apart", apart)
    uptrain_checkpoint(checkpoint, folder / "ddp-taught", with_teacher)
    abandoned_at(7, checkpoint, folder / "ddp-abandoned", plain)
    uptrain_checkpoint(checkpoint, folder / "ddp-abandoned", plain)
    pairs(t5, t5, pairs_file, folder / "ddp-pairs")
    blind = UptrainSettings(**{**common, "steps": 4}, teacher=None)
    uptrain_checkpoint(seeing, folder / "ddp-seeing", blind)
    os.environ.update(FSDP)
    uptrain_checkpoint(seeing, folder / "fsdp-seeing", blind)
    pairs(t5, t5, pairs_file, folder / "fsdp-pairs")
    pairs(converted, t5, pairs_file, folder / "fsdp-converted")
    uptrain_checkpoint(checkpoint, folder / "fsdp", plain)
    stopped_at(7, checkpoint, folder / "fsdp-resumed", plain)
    uptrain_checkpoint(checkpoint, folder / "fsdp-resumed", plain)
    uptrain_checkpoint(checkpoint, folder / "fsdp-taught", with_teacher)
    abandoned_at(7, checkpoint, folder / "fsdp-abandoned", plain)
    uptrain_checkpoint(checkpoint, folder / "fsdp-abandoned", plain)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), *sys.argv[4:])
