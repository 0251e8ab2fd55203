"""Runs that die: by SIGKILL at random moments, by a full disk, by a loss that jumps."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from headfold.errors import HeadfoldError, Interrupted, TrainingError
from headfold.uptrain import state
from headfold.uptrain.run import uptrain_checkpoint
from headfold.uptrain.training import loop
from safetensors.torch import load_file


def same_weights(one: Path, other: Path) -> bool:
    first, second = (load_file(folder / "model.safetensors") for folder in (one, other))
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "headfold_metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "train"]


@pytest.mark.slow
@pytest.mark.timeout(900)  # half a minute of work, more on a busy machine
def test_twenty_kills_at_random_moments_change_no_bit(tiny_checkpoint, text_file, tmp_path):
    """SIGKILL, also while a save is written: every resumed run ends with the weights and the losses of one that
    was left alone. Losses that are equal to the bit mean tokens in the same order."""
    script = Path(__file__).with_name("kill_driver.py")
    command = [sys.executable, str(script), str(tiny_checkpoint), str(text_file), str(tmp_path / "runs"), "20", "7"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=850, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["killed"] == 20
    assert told["writing"] >= 3
    assert told["went on"] >= 5  # beginning anew each time would give the same bits, too
    for number in range(told["finished"]):
        out = tmp_path / "runs" / f"run-{number}"
        assert same_weights(out, tmp_path / "runs" / "reference")
        assert losses(out) == losses(tmp_path / "runs" / "reference")


@pytest.mark.parametrize("moment", ["files", "marker"])
def test_a_full_disk_during_a_save_loses_nothing(moment, tiny_checkpoint, settings, tmp_path, monkeypatch, capfd):
    """The save at step 10 finds no space: the one of step 5 stays whole, and the run ends as if nothing had been."""
    reference = uptrain_checkpoint(tiny_checkpoint, tmp_path / "reference", settings())
    saves = []
    if moment == "files":
        real = state.Accelerator.save_state

        def save_state(self, folder, *arguments, **named):
            real(self, folder, *arguments, **named)
            saves.append(folder)
            if len(saves) == 2:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(state.Accelerator, "save_state", save_state)
    else:
        real_fsync = os.fsync

        def fsync(descriptor):
            saves.append(descriptor)
            if list((tmp_path / "out.training").glob("step-00000010.tmp")):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real_fsync(descriptor)

        monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(HeadfoldError, match="save at step 10 failed"):
        uptrain_checkpoint(tiny_checkpoint, tmp_path / "out", settings())
    assert len(saves) > 1
    assert [save.name for save in (tmp_path / "out.training").glob("step-*")] == ["step-00000005"]
    monkeypatch.undo()
    assert same_weights(uptrain_checkpoint(tiny_checkpoint, tmp_path / "out", settings()), reference)


def test_a_lasting_spike_stops_the_run_before_it_is_saved(tiny_checkpoint, settings, tmp_path, monkeypatch):
    """From step 28 on the loss is ten times as high; the save due at step 30 is left out."""
    real = loop.Stepper.__call__

    def jump(self, step, batch):
        result = real(self, step, batch)
        return type(result)(result.loss * 10, *list(vars(result).values())[1:]) if step >= 28 else result

    monkeypatch.setattr(loop.Stepper, "__call__", jump)
    wanted = settings(steps=40, save_every=6)
    with pytest.raises(TrainingError, match=r"At step 31 the loss is .* over 3 times the usual .* for 3 steps"):
        uptrain_checkpoint(tiny_checkpoint, tmp_path / "out", wanted)
    saves = sorted(save.name for save in (tmp_path / "out.training").glob("step-*"))
    assert saves == ["step-00000018", "step-00000024"]
    monkeypatch.undo()
    assert uptrain_checkpoint(tiny_checkpoint, tmp_path / "out", wanted).exists()


def test_a_run_that_ends_in_a_spike_publishes_nothing(tiny_checkpoint, settings, tmp_path, monkeypatch):
    real = loop.Stepper.__call__

    def jump(self, step, batch):
        result = real(self, step, batch)
        return dataclasses.replace(result, loss=result.loss + 100) if step >= 38 else result

    monkeypatch.setattr(loop.Stepper, "__call__", jump)
    wanted, out = settings(steps=40, save_every=6), tmp_path / "out"
    with pytest.raises(TrainingError, match="ends at step 40 in a spike"):
        uptrain_checkpoint(tiny_checkpoint, out, wanted)
    assert not out.exists()
    assert (tmp_path / "out.training" / "step-00000036").exists()
    assert uptrain_checkpoint(tiny_checkpoint, out, wanted.model_copy(update={"spike": 0.0})).exists()


def test_a_save_whose_weights_may_have_spoilt_the_loss_is_set_aside(
    tiny_checkpoint, settings, tmp_path, monkeypatch, capfd
):
    """The loss of step 31 is that of the weights saved after step 30."""
    real = loop.Stepper.__call__

    def jump(self, step, batch):
        result = real(self, step, batch)
        return dataclasses.replace(result, loss=result.loss + 100) if step >= 30 else result

    monkeypatch.setattr(loop.Stepper, "__call__", jump)
    with pytest.raises(TrainingError, match="At step 33"):
        uptrain_checkpoint(tiny_checkpoint, tmp_path / "out", settings(steps=40, save_every=6))
    saves = sorted(save.name for save in (tmp_path / "out.training").glob("s*-*"))
    assert saves == ["step-00000024", "suspect-step-00000030"]
    assert "may have spoilt the loss" in " ".join(capfd.readouterr().err.split())


def test_a_run_stopped_in_a_spike_keeps_the_save_and_the_losses_before_it(
    tiny_checkpoint, settings, tmp_path, monkeypatch
):
    wanted, out = settings(steps=40, save_every=22), tmp_path / "out"
    real = loop.Stepper.__call__

    def spiking(self, step, batch):
        result = real(self, step, batch)
        if step == 24:
            os.kill(os.getpid(), signal.SIGTERM)
        return dataclasses.replace(result, loss=result.loss + 100) if step >= 24 else result

    monkeypatch.setattr(loop.Stepper, "__call__", spiking)
    with pytest.raises(Interrupted, match="at step 25 of 40; not saved"):
        uptrain_checkpoint(tiny_checkpoint, out, wanted)
    saves = list((tmp_path / "out.training").glob("step-*"))
    assert [save.name for save in saves] == ["step-00000022"]
    assert len(json.loads((saves[0] / "complete.json").read_text())["losses"]) == 22
    monkeypatch.setattr(loop.Stepper, "__call__", lambda *given: dataclasses.replace(real(*given), loss=100.0))
    with pytest.raises(TrainingError, match="At step 25"):  # at once, not after twenty losses more
        uptrain_checkpoint(tiny_checkpoint, out, wanted)
