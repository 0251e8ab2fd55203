from __future__ import annotations

import json

import pytest
import torch
from headfold.checkpoint.source import Checkpoint
from headfold.errors import HeadfoldError, TrainingError, UsageError
from headfold.uptrain import run
from headfold.uptrain.run import uptrain_checkpoint
from headfold.uptrain.training import loop
from runs import metrics, same, weights
from safetensors.torch import save_file


def test_a_run_learns_and_writes_an_ordinary_checkpoint(finished, tiny_checkpoint):
    from transformers import AutoModelForCausalLM

    losses = [line["loss"] for line in metrics(finished, "train")]
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 0.3
    assert losses[0] == pytest.approx(torch.tensor(10.0).log().item(), abs=0.2)  # ten words, a random model
    source, trained = Checkpoint.open(tiny_checkpoint), Checkpoint.open(finished)
    assert {name: (t.dtype, t.shape) for name, t in source.tensors.items()} == {
        name: (t.dtype, t.shape) for name, t in trained.tensors.items()
    }
    assert AutoModelForCausalLM.from_pretrained(finished).dtype == torch.bfloat16
    assert not finished.with_name("out.training").exists()


def test_side_files_and_config_keep_their_bytes(finished, tiny_checkpoint):
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (finished / name).read_bytes() == (tiny_checkpoint / name).read_bytes()


def test_the_record_describes_the_run(finished, tiny_checkpoint, text_file):
    entry = json.loads((finished / "headfold.json").read_text())["history"][-1]
    assert entry["step"] == "uptrain"
    assert entry["source"] == tiny_checkpoint.name
    assert (entry["steps"], entry["tokens"]) == (12, 12 * 4 * 16)
    assert entry["data"]["corpus"] == text_file.name
    assert entry["settings"]["seed"] == 3
    assert entry["versions"]["torch"] == torch.__version__
    assert entry["heldout"]["perplexity"] == metrics(finished, "eval")[-1]["perplexity"]


def test_held_out_text_is_scored_at_the_start_at_intervals_and_at_the_end(finished):
    points = metrics(finished, "eval")
    assert [(line["step"], line["tokens"]) for line in points] == [(0, 0), (6, 384), (12, 768)]
    assert points[-1]["perplexity"] < points[0]["perplexity"]


def test_a_resumed_run_ends_with_equal_bits(finished, tiny_checkpoint, settings, text_file, tmp_path, cut_power):
    """Stopped after step 7, with a save at step 5: the same final weights and the same loss curve."""
    wanted = settings(eval_data=str(text_file), eval_tokens=400, eval_every=6)
    cut_power(7, tiny_checkpoint, tmp_path / "out", wanted)
    assert not (tmp_path / "out").exists()
    resumed = uptrain_checkpoint(tiny_checkpoint, tmp_path / "out", wanted)
    assert same(weights(resumed), weights(finished))
    assert [line["loss"] for line in metrics(resumed, "train")] == [line["loss"] for line in metrics(finished, "train")]
    assert metrics(resumed, "eval") == metrics(finished, "eval")


def test_another_seed_gives_other_weights(finished, tiny_checkpoint, settings, tmp_path):
    """The control for the equality above."""
    assert not same(weights(uptrain_checkpoint(tiny_checkpoint, tmp_path / "out", settings(seed=4))), weights(finished))


def test_a_broken_save_is_not_used(finished, tiny_checkpoint, settings, text_file, tmp_path, cut_power, capfd):
    wanted = settings(eval_data=str(text_file), eval_tokens=400, eval_every=6)
    cut_power(11, tiny_checkpoint, tmp_path / "out", wanted)
    saves = sorted((tmp_path / "out.training").glob("step-*"))
    assert [save.name for save in saves] == ["step-00000005", "step-00000010"]
    optimizer = saves[1] / "optimizer.bin"
    optimizer.write_bytes(optimizer.read_bytes()[:100])
    (tmp_path / "out.training" / "step-00000011.tmp").mkdir()
    resumed = uptrain_checkpoint(tiny_checkpoint, tmp_path / "out", wanted)
    assert "step-00000010 is incomplete" in capfd.readouterr().err.replace("\n", "")
    assert same(weights(resumed), weights(finished))


def test_other_settings_do_not_continue_a_run(tiny_checkpoint, settings, tmp_path, cut_power):
    cut_power(6, tiny_checkpoint, tmp_path / "out", settings())
    with pytest.raises(UsageError, match=r"learning_rate was 0\.003 and is now 0\.001"):
        uptrain_checkpoint(tiny_checkpoint, tmp_path / "out", settings(learning_rate=1e-3))
    assert uptrain_checkpoint(tiny_checkpoint, tmp_path / "out", settings(learning_rate=1e-3), resume="never").exists()


def test_saves_are_ordered_by_number_and_copies_are_ignored(
    finished, tiny_checkpoint, settings, text_file, tmp_path, cut_power
):
    """Not by the order of their names; and someone's copy of one is none."""
    import shutil

    wanted = settings(eval_data=str(text_file), eval_tokens=400, eval_every=6)
    cut_power(7, tiny_checkpoint, tmp_path / "out", wanted)
    folder = tmp_path / "out.training"
    shutil.copytree(folder / "step-00000005", folder / "step-00000005 copy")
    (folder / "step-100000001").mkdir()  # a digit more, and broken: it is looked at first
    resumed = uptrain_checkpoint(tiny_checkpoint, tmp_path / "out", wanted)
    assert same(weights(resumed), weights(finished))


def test_a_loss_of_nan_stops_the_run_and_keeps_the_save(tiny_checkpoint, settings, tmp_path, monkeypatch):
    real = loop.Stepper._sums
    calls = []

    def poisoned(self, micro):
        calls.append(1)
        sums = real(self, micro)
        return sums._replace(loss=sums.loss * (float("nan") if len(calls) > 2 * 6 else 1.0))

    monkeypatch.setattr(loop.Stepper, "_sums", poisoned)
    with pytest.raises(TrainingError, match="At step 7 the loss is nan"):
        uptrain_checkpoint(tiny_checkpoint, tmp_path / "out", settings())
    assert [save.name for save in (tmp_path / "out.training").glob("step-*")] == ["step-00000005"]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("micro_batch", [1, 3, 4])
def test_micro_batches_change_nothing_but_rounding(micro_batch, finished, tiny_checkpoint, settings, tmp_path):
    out = uptrain_checkpoint(tiny_checkpoint, tmp_path / "out", settings(micro_batch=micro_batch))
    found = [line["loss"] for line in metrics(out, "train")]
    assert found == pytest.approx([line["loss"] for line in metrics(finished, "train")], rel=1e-5)


def test_master_weights_are_float32_and_small_updates_survive(tiny_checkpoint, settings, tmp_path):
    """A learning rate below bfloat16's step: with bf16 weights nothing would ever change."""
    small = settings(learning_rate=2e-5, steps=12, warmup=0, schedule="constant", weight_decay=0)
    trained, source = weights(uptrain_checkpoint(tiny_checkpoint, tmp_path / "out", small)), weights(tiny_checkpoint)
    name = "model.layers.0.mlp.up_proj.weight"
    changed = (trained[name] != source[name]).float().mean()
    assert trained[name].dtype == torch.bfloat16
    assert changed > 0.3


def test_another_checkpoint_or_text_does_not_continue_a_run(tiny_checkpoint, settings, text_file, tmp_path, cut_power):
    import shutil

    source, text = tmp_path / "source", tmp_path / "text.jsonl"
    shutil.copytree(tiny_checkpoint, source)
    shutil.copy(text_file, text)
    wanted = settings(data=str(text))
    cut_power(6, source, tmp_path / "out", wanted)
    original = text.read_text()
    text.write_text(original + '{"text": "alpha beta"}\n')
    with pytest.raises(UsageError, match="whose text had other contents"):
        uptrain_checkpoint(source, tmp_path / "out", wanted)
    text.write_text(original)
    changed = {name: tensor.clone() for name, tensor in weights(source).items()}
    changed["model.norm.weight"][0] += 1
    save_file(changed, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match="whose checkpoint had other contents"):
        uptrain_checkpoint(source, tmp_path / "out", wanted)


def test_another_teacher_does_not_continue_a_run(tiny_checkpoint, settings, tmp_path, cut_power):
    import shutil

    teacher = tmp_path / "teacher"
    shutil.copytree(tiny_checkpoint, teacher)
    wanted = settings(teacher=str(teacher))
    cut_power(6, tiny_checkpoint, tmp_path / "out", wanted)
    original = (teacher / "model.safetensors").read_bytes()
    changed = {name: tensor.clone() for name, tensor in weights(teacher).items()}
    changed["model.norm.weight"][0] += 1
    save_file(changed, teacher / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match="whose teacher had other contents"):
        uptrain_checkpoint(tiny_checkpoint, tmp_path / "out", wanted)
    (teacher / "model.safetensors").write_bytes(original)
    assert uptrain_checkpoint(tiny_checkpoint, tmp_path / "out", wanted).exists()


def test_a_restart_that_is_refused_keeps_the_saves(tiny_checkpoint, settings, tmp_path):
    save = tmp_path / "out.training" / "step-00000005"
    save.mkdir(parents=True)
    with pytest.raises(HeadfoldError):
        uptrain_checkpoint(tiny_checkpoint, tmp_path / "out", settings(teacher=str(tmp_path / "typo")), resume="never")
    assert save.exists()


def test_resume_always_continues_and_never_begins(finished, tiny_checkpoint, settings, text_file, tmp_path, cut_power):
    """A job script that is started again must not train from the beginning because its output path has a typo."""
    wanted = settings(eval_data=str(text_file), eval_tokens=400, eval_every=6)
    cut_power(7, tiny_checkpoint, tmp_path / "out", wanted)
    with pytest.raises(UsageError, match=r"typo\.training has no complete save"):
        uptrain_checkpoint(tiny_checkpoint, tmp_path / "typo", wanted, resume="always")
    assert not list(tmp_path.glob("typo*"))
    resumed = uptrain_checkpoint(tiny_checkpoint, tmp_path / "out", wanted, resume="always")
    assert same(weights(resumed), weights(finished))


@pytest.mark.parametrize("fault", ["cut short", "a copy"])
def test_resume_always_needs_a_complete_save(fault, tiny_checkpoint, settings, tmp_path, cut_power):
    cut_power(6, tiny_checkpoint, tmp_path / "out", settings())
    save = tmp_path / "out.training" / "step-00000005"
    if fault == "a copy":
        save.rename(save.with_name("step-00000005 copy"))
    else:
        (save / "optimizer.bin").write_bytes(b"")
    with pytest.raises(UsageError, match="no complete save"):
        uptrain_checkpoint(tiny_checkpoint, tmp_path / "out", settings(), resume="always")


def test_a_diverged_run_continues_with_gentler_settings(tiny_checkpoint, settings, tmp_path, cut_power):
    """Nothing else may change, and the record tells what did."""
    cut_power(7, tiny_checkpoint, tmp_path / "out", settings())
    with pytest.raises(UsageError, match=r"seed was 3 and is now 4"):
        uptrain_checkpoint(tiny_checkpoint, tmp_path / "out", settings(seed=4), resume="always")
    careful = settings(learning_rate=1e-3, max_grad_norm=0.5)
    out = uptrain_checkpoint(tiny_checkpoint, tmp_path / "out", careful, resume="always")
    entry = json.loads((out / "headfold.json").read_text())["history"][-1]
    assert entry["adjusted"] == [{"step": 5, "learning_rate": [3e-3, 1e-3], "max_grad_norm": [1.0, 0.5]}]
    rates = {line["step"]: line["learning_rate"] for line in metrics(out, "train")}
    assert rates[5] > 2e-3 > 1e-3 >= rates[6]


def test_a_save_of_weights_that_were_shared_is_refused_by_name(tiny_checkpoint, settings, tmp_path, cut_power):
    cut_power(7, tiny_checkpoint, tmp_path / "out", settings())
    marker = tmp_path / "out.training" / "step-00000005" / "complete.json"
    content = json.loads(marker.read_text())
    assert content["identity"]["way of sharing weights"] == "none"
    content["identity"]["way of sharing weights"] = "FSDP2"
    marker.write_text(json.dumps(content))
    with pytest.raises(UsageError, match="way of sharing weights was FSDP2 and is now none"):
        uptrain_checkpoint(tiny_checkpoint, tmp_path / "out", settings())


def test_tensors_that_the_class_does_not_use_are_left_out_and_named(tiny_checkpoint, settings, tmp_path):
    """Old Llama checkpoints carry rotary buffers, and some store the tied head a second time."""
    import shutil

    old = tmp_path / "old"
    shutil.copytree(tiny_checkpoint, old)
    tensors = weights(old)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    tied = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file({**tensors, **extra, **tied}, old / "model.safetensors", metadata={"format": "pt"})
    out = uptrain_checkpoint(old, tmp_path / "out", settings(steps=2))
    assert set(weights(out)) == set(tensors)
    entry = json.loads((out / "headfold.json").read_text())["history"][-1]
    assert entry["tensors_left_out"] == ["lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"]


@pytest.mark.parametrize("fault", ["empty", "missing", "another shape"])
def test_incomplete_weights_are_not_written(fault, tiny_checkpoint, settings, tmp_path, monkeypatch):
    """As a sharded state dict that was gathered on one process alone would give them; the saves are kept."""
    name, real = "model.layers.1.self_attn.k_proj.weight", run.whole_weights

    def broken(*given):
        found = real(*given)
        whole = found.pop(name)
        return found if fault == "missing" else {**found, name: whole[:0] if fault == "empty" else whole[:-1]}

    monkeypatch.setattr(run, "whole_weights", broken)
    with pytest.raises(HeadfoldError, match=name.replace(".", r"\.") if fault != "missing" else None):
        uptrain_checkpoint(tiny_checkpoint, tmp_path / "out", settings(steps=2))
    assert [path.name for path in tmp_path.iterdir()] == ["out.training"]
    monkeypatch.undo()
    assert uptrain_checkpoint(tiny_checkpoint, tmp_path / "out", settings(steps=2)).exists()


def test_a_teacher_with_another_vocabulary_is_refused(tiny_checkpoint, settings, tmp_path):
    import shutil

    other = tmp_path / "other"
    shutil.copytree(tiny_checkpoint, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["alpha"], vocabulary["beta"] = vocabulary["beta"], vocabulary["alpha"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UsageError, match="another vocabulary"):
        uptrain_checkpoint(tiny_checkpoint, tmp_path / "out", settings(teacher=str(other)))


@pytest.mark.parametrize("inside", ["source", "source/deeper"])
def test_the_output_may_not_replace_the_source(inside, tiny_checkpoint, settings, tmp_path):
    import shutil

    shutil.copytree(tiny_checkpoint, tmp_path / "source")
    with pytest.raises(UsageError, match="overlap"):
        uptrain_checkpoint(tmp_path / "source", tmp_path / inside, settings(), overwrite=True)
    assert (tmp_path / "source" / "model.safetensors").exists()


def test_distillation_moves_towards_the_teacher(tiny_checkpoint, settings, tmp_path):
    """A student with one damaged matrix learns from the text's inputs to predict what the teacher predicts."""
    import shutil

    student = tmp_path / "student"
    shutil.copytree(tiny_checkpoint, student)
    damaged = weights(student)
    generator = torch.Generator().manual_seed(1)
    name = "model.layers.1.self_attn.v_proj.weight"
    damaged[name] = torch.randn(damaged[name].shape, generator=generator).bfloat16()
    save_file(damaged, student / "model.safetensors", metadata={"format": "pt"})
    out = uptrain_checkpoint(student, tmp_path / "out", settings(teacher=str(tiny_checkpoint), steps=30))
    losses = [line["loss"] for line in metrics(out, "train")]
    assert 0 < losses[-1] < 0.3 * losses[0]


def test_the_teacher_named_source_needs_a_conversion_record(tiny_checkpoint, settings, tmp_path):
    with pytest.raises(UsageError, match="no conversion record"):
        uptrain_checkpoint(tiny_checkpoint, tmp_path / "out", settings(teacher="source"))


def test_training_from_scratch_needs_no_weights(tiny_checkpoint, settings, tmp_path):
    import shutil

    blank = tmp_path / "blank"
    shutil.copytree(tiny_checkpoint, blank, ignore=shutil.ignore_patterns("*.safetensors"))
    out = uptrain_checkpoint(blank, tmp_path / "out", settings(steps=3), from_scratch=True)
    entry = json.loads((out / "headfold.json").read_text())["history"][-1]
    assert (entry["step"], entry["source"]) == ("pretrain", None)
    assert weights(out)["model.norm.weight"].dtype == torch.bfloat16
    with pytest.raises(HeadfoldError):
        uptrain_checkpoint(blank, tmp_path / "other", settings(steps=3))


def test_a_generation_config_that_transformers_refuses_is_copied(tiny_checkpoint, settings, tmp_path):
    import shutil

    odd = tmp_path / "odd"
    shutil.copytree(tiny_checkpoint, odd)
    (odd / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.9}')
    out = uptrain_checkpoint(odd, tmp_path / "out", settings(steps=2))
    assert (out / "generation_config.json").read_text() == '{"do_sample": false, "temperature": 0.9}'


def test_sequences_longer_than_the_context_are_refused(tiny_checkpoint, settings, tmp_path):
    with pytest.raises(UsageError, match="Sequences of 128 tokens are longer than the 64"):
        uptrain_checkpoint(tiny_checkpoint, tmp_path / "out", settings(sequence_length=128))
