"""Options of a run, each in a short one."""

from __future__ import annotations

import json

import pytest
import torch
from headfold.errors import UsageError
from headfold.uptrain.run import uptrain_checkpoint
from headfold.uptrain.training import preparation
from runs import metrics, same, weights
from safetensors.torch import save_file


def test_float16_checkpoints_are_trained_in_float32_and_saved_in_float16(
    tiny_checkpoint, settings, tmp_path, monkeypatch
):
    import shutil

    half = tmp_path / "half"
    shutil.copytree(tiny_checkpoint, half)
    config = json.loads((half / "config.json").read_text())
    (half / "config.json").write_text(json.dumps({**config, "dtype": "float16"}))
    halves = {name: tensor.half() for name, tensor in weights(half).items()}
    save_file(halves, half / "model.safetensors", metadata={"format": "pt"})
    seen = []
    real = preparation.make_optimizer

    def spy(model, wanted):
        seen.extend(parameter.dtype for parameter in model.parameters())
        return real(model, wanted)

    monkeypatch.setattr(preparation, "make_optimizer", spy)
    out = uptrain_checkpoint(half, tmp_path / "out", settings(steps=2))
    assert set(seen) == {torch.float32}
    assert {tensor.dtype for tensor in weights(out).values()} == {torch.float16}


@pytest.mark.parametrize("train", ["kv", "attention"])
def test_weights_that_are_not_trained_keep_their_bits(train, tiny_checkpoint, settings, tmp_path, cut_power):
    """Also through a save and a resume, and with activations computed again."""
    wanted = settings(train=train, steps=8, gradient_checkpointing=True, teacher=str(tiny_checkpoint))
    wanted = wanted.model_copy(update={"distillation_weight": 0.5})
    cut_power(6, tiny_checkpoint, tmp_path / "out", wanted)
    before, after = weights(tiny_checkpoint), weights(uptrain_checkpoint(tiny_checkpoint, tmp_path / "out", wanted))
    changed = {name.split(".")[-2] for name in before if not torch.equal(before[name], after[name])}
    expected = {"kv": {"k_proj", "v_proj"}, "attention": {"q_proj", "k_proj", "v_proj", "o_proj"}}
    assert changed == expected[train]


def test_gradient_checkpointing_changes_no_bit(finished, tiny_checkpoint, settings, text_file, tmp_path):
    wanted = settings(gradient_checkpointing=True)
    assert same(weights(uptrain_checkpoint(tiny_checkpoint, tmp_path / "out", wanted)), weights(finished))


def test_compile_compiles_every_layer_and_nothing_else(tiny_checkpoint, settings, tmp_path, monkeypatch):
    """Compiling itself needs a compiler and a minute; here it is noted instead."""
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: compiled.append(type(self).__name__))
    uptrain_checkpoint(tiny_checkpoint, tmp_path / "out", settings(steps=1, compile=True))
    assert compiled == ["LlamaDecoderLayer"] * 2


def test_metrics_also_go_to_the_trackers(tiny_checkpoint, settings, tmp_path):
    tensorboard = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    uptrain_checkpoint(tiny_checkpoint, tmp_path / "out", settings(steps=3, tracker=("tensorboard",)))
    events = tensorboard.EventAccumulator(str(next((tmp_path / "out.logs").rglob("events*")).parent))
    events.Reload()
    losses = [line["loss"] for line in metrics(tmp_path / "out", "train")]
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx(losses)
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3]


def test_a_tracker_that_is_not_there_is_named(monkeypatch):
    from headfold.uptrain.monitor import trackers

    with pytest.raises(UsageError, match="no tracker 'abacus'"):
        trackers.chosen_trackers(["abacus"])
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    assert trackers.chosen_trackers(["auto"]) == trackers.chosen_trackers(["none"]) == []
    with pytest.raises(UsageError, match="wandb is not installed"):
        trackers.chosen_trackers(["wandb"])
    monkeypatch.setattr(trackers, "find_spec", lambda name: name)
    assert trackers.chosen_trackers(["auto", "wandb"]) == ["tensorboard", "wandb"]


def test_a_mixture_is_trained_and_recorded(tiny_checkpoint, settings, text_file, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("theta eta zeta " * 40)
    data = (f"{text_file}=3", str(other))
    entry = json.loads(
        (
            uptrain_checkpoint(tiny_checkpoint, tmp_path / "out", settings(data=data, steps=2)) / "headfold.json"
        ).read_text()
    )["history"][-1]
    assert [(text["corpus"], text["weight"]) for text in entry["data"]] == [(text_file.name, 3.0), (other.name, 1.0)]
