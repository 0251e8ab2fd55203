from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from headfold.checkpoint.source import Checkpoint
from headfold.errors import HeadfoldError, Interrupted, TrainingError, UsageError
from headfold.uptrain import loop
from headfold.uptrain.loop import uptrain_checkpoint
from safetensors.torch import load_file, save_file


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def metrics(folder: Path, kind: str) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "headfold_metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


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


@pytest.fixture(scope="module")
def finished(tiny_checkpoint, text_file, tmp_path_factory):
    """One uninterrupted run, which several tests look at."""
    from headfold.uptrain.settings import UptrainSettings

    torch.set_num_threads(1)
    settings = UptrainSettings(
        data=str(text_file), steps=12, block=16, batch=4, micro_batch=2, learning_rate=3e-3, precision="fp32",
        device="cpu", log_every=1, save_every=5, seed=3, eval_data=str(text_file), eval_tokens=400, eval_every=6,
    )  # fmt: skip
    return uptrain_checkpoint(tiny_checkpoint, tmp_path_factory.mktemp("run") / "out", settings)


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


def test_gq022_gq035_side_files_and_config_keep_their_bytes(finished, tiny_checkpoint):
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (finished / name).read_bytes() == (tiny_checkpoint / name).read_bytes()


def test_the_record_tells_the_run(finished, tiny_checkpoint, text_file):
    entry = json.loads((finished / "headfold.json").read_text())["history"][-1]
    assert entry["step"] == "uptrain"
    assert entry["source"] == str(tiny_checkpoint)
    assert (entry["steps"], entry["tokens"]) == (12, 12 * 4 * 16)
    assert entry["data"]["corpus"] == str(text_file)
    assert entry["settings"]["seed"] == 3
    assert entry["versions"]["torch"] == torch.__version__
    assert entry["heldout"]["perplexity"] == metrics(finished, "eval")[-1]["perplexity"]


def test_held_out_points_stand_at_the_start_at_intervals_and_at_the_end(finished):
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


def test_gq085_a_broken_save_is_passed_over(finished, tiny_checkpoint, settings, text_file, tmp_path, cut_power, capfd):
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
    assert uptrain_checkpoint(tiny_checkpoint, tmp_path / "out", settings(learning_rate=1e-3), restart=True).exists()


def test_gq086_sigterm_saves_once_and_says_how_to_go_on(
    finished, tiny_checkpoint, settings, text_file, tmp_path, monkeypatch
):
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


def test_gq072_a_loss_that_is_no_number_stops_the_run_and_keeps_the_save(
    tiny_checkpoint, settings, tmp_path, monkeypatch
):
    real = loop.Stepper._loss_sum
    calls = []

    def poisoned(self, ids):
        calls.append(1)
        return real(self, ids) * (float("nan") if len(calls) > 2 * 6 else 1.0)

    monkeypatch.setattr(loop.Stepper, "_loss_sum", poisoned)
    with pytest.raises(TrainingError, match="At step 7 the loss is nan"):
        uptrain_checkpoint(tiny_checkpoint, tmp_path / "out", settings())
    assert [save.name for save in (tmp_path / "out.training").glob("step-*")] == ["step-00000005"]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("micro_batch", [1, 3, 4])
def test_gq065_micro_batches_change_nothing_but_rounding(micro_batch, finished, tiny_checkpoint, settings, tmp_path):
    out = uptrain_checkpoint(tiny_checkpoint, tmp_path / "out", settings(micro_batch=micro_batch))
    found = [line["loss"] for line in metrics(out, "train")]
    assert found == pytest.approx([line["loss"] for line in metrics(finished, "train")], rel=1e-5)


def test_gq071_master_weights_are_float32_and_small_updates_survive(tiny_checkpoint, settings, tmp_path):
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


def test_a_restart_that_is_refused_keeps_the_saves(tiny_checkpoint, settings, tmp_path):
    save = tmp_path / "out.training" / "step-00000005"
    save.mkdir(parents=True)
    with pytest.raises(HeadfoldError):
        uptrain_checkpoint(tiny_checkpoint, tmp_path / "out", settings(teacher=str(tmp_path / "typo")), restart=True)
    assert save.exists()


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


def test_the_teacher_named_source_is_the_one_of_the_conversion_record(tiny_checkpoint, settings, tmp_path):
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


def test_gq023_a_generation_config_that_cannot_be_saved_does_not_stop_the_end(tiny_checkpoint, settings, tmp_path):
    import shutil

    odd = tmp_path / "odd"
    shutil.copytree(tiny_checkpoint, odd)
    (odd / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.9}')
    out = uptrain_checkpoint(odd, tmp_path / "out", settings(steps=2))
    assert (out / "generation_config.json").read_text() == '{"do_sample": false, "temperature": 0.9}'


def test_blocks_longer_than_the_context_are_refused(tiny_checkpoint, settings, tmp_path):
    with pytest.raises(UsageError, match="Blocks of 128 tokens are longer than the 64"):
        uptrain_checkpoint(tiny_checkpoint, tmp_path / "out", settings(block=128))


def launch(arguments: list[str], processes: int) -> list[str]:
    """The command of a run on ``processes`` CPU processes under accelerate's launcher.

    ``--cpu`` would start a single process in silence; ``--multi_gpu`` is its name for launching several.
    """
    accelerate = [
        sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", str(processes),
        "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0",
        "--num_cpu_threads_per_process", "1",
    ]  # fmt: skip
    return [*accelerate, "-m", "headfold", *arguments]


@pytest.mark.slow
def test_gq066_gq069_gq075_two_processes_follow_one(finished, tiny_checkpoint, text_file, tmp_path):
    """Same global batch: equal losses to 1e-5 relative, equal learning rates, equal held-out points."""
    arguments = [
        "uptrain", str(tiny_checkpoint), "-o", str(tmp_path / "out"), "--data", str(text_file), "--steps", "12",
        "--block", "16", "--batch", "4", "--micro-batch", "2", "--lr", "3e-3", "--precision", "fp32", "--device", "cpu",
        "--log-every", "1", "--save-every", "5", "--seed", "3", "--eval-data", str(text_file), "--eval-tokens", "400",
        "--eval-every", "6",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(launch(arguments, 2), capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    entry = json.loads((tmp_path / "out" / "headfold.json").read_text())["history"][-1]
    assert entry["processes"] == 2
    one, two = metrics(finished, "train"), metrics(tmp_path / "out", "train")
    assert [line["loss"] for line in two] == pytest.approx([line["loss"] for line in one], rel=1e-5)
    assert [line["learning_rate"] for line in two] == [line["learning_rate"] for line in one]
    assert [line["perplexity"] for line in metrics(tmp_path / "out", "eval")] == pytest.approx(
        [line["perplexity"] for line in metrics(finished, "eval")], rel=1e-4
    )


@pytest.mark.slow
def test_a_run_killed_with_sigkill_resumes_to_equal_bits(tiny_checkpoint, text_file, settings, tmp_path):
    arguments = [
        "uptrain", str(tiny_checkpoint), "-o", str(tmp_path / "out"), "--data", str(text_file), "--steps", "60",
        "--block", "16", "--batch", "4", "--micro-batch", "2", "--lr", "3e-3", "--precision", "fp32", "--device", "cpu",
        "--log-every", "1", "--save-every", "7", "--seed", "3",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "headfold", *arguments]
    run = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not list((tmp_path / "out.training").glob("step-????????/complete.json")) and time.monotonic() < deadline:
        time.sleep(0.02)
    run.send_signal(signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Continuing at step" in done.stderr
    reference = uptrain_checkpoint(tiny_checkpoint, tmp_path / "reference", settings(steps=60, save_every=7))
    assert same(weights(tmp_path / "out"), weights(reference))
