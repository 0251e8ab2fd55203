"""Settings of a short run, on one thread."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from headfold.uptrain.run import uptrain_checkpoint
from headfold.uptrain.settings import UptrainSettings
from headfold.uptrain.training import loop

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _one_thread():
    """Some tests run two processes on two cores. And equality of bits must not depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def settings(text_file):
    """Settings of a short run: 12 steps of 4 blocks of 16 tokens."""

    def make(**changes) -> UptrainSettings:
        values = {
            "data": str(text_file), "steps": 12, "sequence_length": 16, "batch": 4, "micro_batch": 2,
            "learning_rate": 3e-3,
            "precision": "fp32", "device": "cpu", "log_every": 1, "save_every": 5, "seed": 3, "tracker": ("none",),
        }  # fmt: skip
        return UptrainSettings(**{**values, **changes})

    return make


@pytest.fixture
def plain_loss():
    """An objective by PyTorch's own losses, for autograd to differentiate."""

    def loss(objective, logits, targets, teacher):
        text = F.cross_entropy(logits, targets, reduction="sum")
        if teacher is None:
            return text
        log_q = F.log_softmax(logits / objective.temperature, -1)
        log_p = F.log_softmax(teacher / objective.temperature, -1)
        log_p, log_q = (log_p, log_q) if objective.direction == "forward" else (log_q, log_p)
        apart = (log_p.exp() * (log_p - log_q)).sum() * objective.temperature**2
        return objective.weight * apart + (1 - objective.weight) * text

    return loss


@pytest.fixture
def cut_power():
    """``cut_power(step, checkpoint, out, settings)``: a run that dies as step ``step`` begins."""

    def cut(at: int, *arguments) -> None:
        real = loop.Stepper.__call__

        def die(self, step, ids):
            if step == at:
                raise RuntimeError("power cut")
            return real(self, step, ids)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop.Stepper, "__call__", die)
            with pytest.raises(RuntimeError, match="power cut"):
                uptrain_checkpoint(*arguments)

    return cut


@pytest.fixture(scope="session")
def finished(tiny_checkpoint, text_file, tmp_path_factory):
    """One uninterrupted run, which several tests look at."""
    torch.set_num_threads(1)
    settings = UptrainSettings(
        data=str(text_file), steps=12, sequence_length=16, batch=4, micro_batch=2, learning_rate=3e-3, precision="fp32",
        device="cpu", log_every=1, save_every=5, seed=3, eval_data=str(text_file), eval_tokens=400, eval_every=6,
        tracker=("none",),
    )  # fmt: skip
    return uptrain_checkpoint(tiny_checkpoint, tmp_path_factory.mktemp("run") / "out", settings)
