"""A signal between steps, in the middle of one, and while held-out text is scored."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from headfold.errors import Interrupted
from headfold.uptrain.monitor import heldout as watch
from headfold.uptrain.run import uptrain_checkpoint
from headfold.uptrain.training import loop
from runs import metrics, same, weights


def test_sigterm_saves_once_and_the_run_resumes(finished, tiny_checkpoint, settings, text_file, tmp_path, monkeypatch):
    wanted = settings(eval_data=str(text_file), eval_tokens=400, eval_every=6)
    real = loop.Stepper.__call__

    def signal_at_seven(self, step, ids):
        if step == 7:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, step, ids)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(loop.Stepper, "__call__", signal_at_seven)
    with pytest.raises(Interrupted) as stopped:
        uptrain_checkpoint(tiny_checkpoint, tmp_path / "out", wanted)
    assert stopped.value.exit_code == 75
    assert signal.getsignal(signal.SIGTERM) == before
    assert (tmp_path / "out.training" / "step-00000008" / "complete.json").exists()
    monkeypatch.setattr(loop.Stepper, "__call__", real)
    assert same(weights(uptrain_checkpoint(tiny_checkpoint, tmp_path / "out", wanted)), weights(finished))


@pytest.mark.parametrize("at", [0, 7])
def test_a_long_step_is_given_up_and_done_again(
    at, finished, tiny_checkpoint, settings, text_file, tmp_path, monkeypatch
):
    """A signal between two micro-batches: the save holds the text and the random state from before the step."""
    wanted, out = settings(eval_data=str(text_file), eval_tokens=400, eval_every=6), tmp_path / "out"
    real, seen, random = loop.Stepper._sums, [], []

    def signalled(self, micro):
        seen.append(micro)
        if len(seen) == 2 * at + 1:
            random.append(torch.get_rng_state())
            os.kill(os.getpid(), signal.SIGTERM)
            torch.rand(3)  # as dropout would draw
        return real(self, micro)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Stepper, "_sums", signalled)
        patch.setattr("headfold.uptrain.training.step._PATIENCE_SECONDS", 0.0)
        with pytest.raises(Interrupted, match=f"at step {at} of 12; {'saved' if at else 'there was nothing to save'}"):
            uptrain_checkpoint(tiny_checkpoint, out, wanted)
    assert len(seen) == 2 * at + 1
    assert torch.equal(torch.get_rng_state(), random[0])
    saves = sorted(save.name for save in (tmp_path / "out.training").glob("step-*"))
    assert saves == (["step-00000005", "step-00000007"] if at else [])
    assert same(weights(uptrain_checkpoint(tiny_checkpoint, out, wanted)), weights(finished))


@pytest.mark.parametrize("at", [0, 6, 12])
def test_an_evaluation_is_given_up_and_done_again(
    at, finished, tiny_checkpoint, settings, text_file, tmp_path, monkeypatch
):
    """A signal while held-out text is scored, at the start, in the middle and at the end."""
    wanted, out = settings(eval_data=str(text_file), eval_tokens=400, eval_every=6), tmp_path / "out"
    real, portions = watch.score, []

    def signalled(*given, **named):
        portions.append(1)
        if len(portions) == 25 * at // 6 + 2:  # 25 portions of a block's tokens or somewhat more
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*given, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch, "_PORTION_WINDOWS", 1)
        patch.setattr(watch, "score", signalled)
        with pytest.raises(Interrupted, match=f"at step {at} of 12; {'saved' if at else 'there was nothing to save'}"):
            uptrain_checkpoint(tiny_checkpoint, out, wanted)
    resumed = uptrain_checkpoint(tiny_checkpoint, out, wanted)
    assert same(weights(resumed), weights(finished))
    assert [line["step"] for line in metrics(resumed, "eval")] == [0, 6, 12]
    points = [[line["perplexity"] for line in metrics(folder, "eval")] for folder in (resumed, finished)]
    assert points[0] == pytest.approx(points[1], rel=1e-6)
