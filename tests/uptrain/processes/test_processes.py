"""Runs on two CPU processes (gloo), plain and sharded, against the same runs on one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from headfold.uptrain.run import uptrain_checkpoint
from safetensors.torch import load_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # half a minute of work, more on a busy machine
TOLERANCE = 1e-5  # relative, between curves of one process and of two: float32 sums in another order


def launch(processes: int) -> list[str]:
    """accelerate's launcher for ``processes`` CPU processes.

    ``--cpu`` would start a single process in silence; ``--multi_gpu`` is its name for launching several.
    """
    return [
        sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", str(processes),
        "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0",
        "--num_cpu_threads_per_process", "1",
    ]  # fmt: skip


def metrics(folder: Path, kind: str) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "headfold_metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def curve(folder: Path) -> list[float]:
    return [line["loss"] for line in metrics(folder, "train")]


@pytest.fixture(scope="module")
def few_t5(tiny_t5, tmp_path_factory) -> Path:
    """The T5 with two KV heads, of the type of our own."""
    from headfold import convert_checkpoint

    return convert_checkpoint(tiny_t5, tmp_path_factory.mktemp("few") / "t5", groups=2)


@pytest.fixture(scope="module")
def seeing(tiny_checkpoint, tmp_path_factory) -> Path:
    """A model that also sees, with the tokenizer of the tiny Llama."""
    import shutil

    from tiny import tiny_model

    folder = tmp_path_factory.mktemp("seeing") / "gemma3"
    tiny_model("gemma3", 4, 2).to(torch.bfloat16).save_pretrained(folder)
    for file in tiny_checkpoint.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module")
def two(tiny_checkpoint, text_file, tiny_t5, few_t5, pairs_file, seeing, tmp_path_factory) -> Path:
    """The folder with the results of two_processes.py."""
    folder = tmp_path_factory.mktemp("two")
    script = str(Path(__file__).with_name("two_processes.py"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    arguments = [tiny_checkpoint, text_file, folder, tiny_t5, few_t5, pairs_file, seeing]
    command = [*launch(2), script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=850, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def one(tiny_checkpoint, text_file, tmp_path_factory):
    """``one(**changes)``: the folder of the same run on one process."""
    from headfold.uptrain.settings import UptrainSettings

    made: dict[str, Path] = {}

    def run(**changes) -> Path:
        key = json.dumps(changes, sort_keys=True)
        if key not in made:
            values = {
                "data": str(text_file), "sequence_length": 16, "batch": 4, "micro_batch": 2, "learning_rate": 3e-3,
                "precision": "fp32", "device": "cpu", "log_every": 1, "save_every": 5, "seed": 3, "steps": 12,
                "eval_data": str(text_file), "eval_tokens": 400, "eval_every": 6, "teacher": None,
            }  # fmt: skip
            settings = UptrainSettings(**{**values, **changes})
            made[key] = uptrain_checkpoint(tiny_checkpoint, tmp_path_factory.mktemp("one") / "out", settings)
        return made[key]

    return run


@pytest.mark.parametrize(("name", "kind"), [("ddp", "MULTI_CPU"), ("fsdp", "FSDP2")])
def test_two_processes_follow_one(name, kind, two, one):
    """Same global batch: equal losses, learning rates and held-out points."""
    entry = json.loads((two / name / "headfold.json").read_text())["history"][-1]
    assert (entry["processes"], entry["distributed"]) == (2, kind)
    reference = one()
    assert curve(two / name) == pytest.approx(curve(reference), rel=TOLERANCE)
    rates = [[line["learning_rate"] for line in metrics(folder, "train")] for folder in (two / name, reference)]
    assert rates[0] == rates[1]
    points = [[line["perplexity"] for line in metrics(folder, "eval")] for folder in (two / name, reference)]
    assert points[0] == pytest.approx(points[1], rel=1e-4)


def test_ranks_with_unequal_numbers_of_targets_follow_one_process(two, one):
    """If documents are kept apart, blocks have as many targets fewer as documents open in them."""
    assert curve(two / "ddp-apart") == pytest.approx(curve(one(isolate_documents=True)), rel=TOLERANCE)
    assert curve(two / "ddp-apart") != pytest.approx(curve(one()), rel=1e-3)


@pytest.mark.parametrize("name", ["ddp-taught", "fsdp-taught"])
def test_a_teacher_gives_the_same_losses_with_shared_weights(name, two, one, tiny_checkpoint):
    """By its predictions and its hidden states; sharded where the student is."""
    reference = one(steps=6, teacher=str(tiny_checkpoint), distillation_weight=0.5, hidden_weight=2)
    assert curve(two / name) == pytest.approx(curve(reference), rel=TOLERANCE)
    for part in ("divergence", "hidden"):
        found = [[line[part] for line in metrics(folder, "train")] for folder in (two / name, reference)]
        assert found[0] == pytest.approx(found[1], rel=1e-3, abs=1e-6)
        assert found[0][-1] > 1e-3


@pytest.mark.parametrize("name", ["ddp-pairs", "fsdp-pairs", "fsdp-converted"])
def test_an_encoder_decoder_learns_the_same_pairs_on_two_processes(name, two, tiny_t5, few_t5, pairs_file, tmp_path):
    """Normalised by the target tokens of both processes; held-out pairs are shared out, too."""
    from headfold.uptrain.settings import UptrainSettings

    entry = json.loads((two / name / "headfold.json").read_text())["history"][-1]
    assert (entry["processes"], entry["distributed"]) == (2, "FSDP2" if "fsdp" in name else "MULTI_CPU")
    start = few_t5 if name == "fsdp-converted" else tiny_t5
    # the record is published, so it names files without their folders
    here = {"data": str(pairs_file), "eval_data": str(pairs_file), "teacher": str(tiny_t5)}
    alone = uptrain_checkpoint(start, tmp_path / "one", UptrainSettings.restored({**entry["settings"], **here}))
    assert curve(two / name) == pytest.approx(curve(alone), rel=TOLERANCE)
    points = [[line["perplexity"] for line in metrics(folder, "eval")] for folder in (two / name, alone)]
    assert points[0] == pytest.approx(points[1], rel=1e-4)
    assert curve(alone)[-1] < curve(alone)[0]


@pytest.mark.parametrize("stopped", ["resumed", "abandoned"])
@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_a_run_stopped_on_one_rank_resumes_to_equal_weights(name, stopped, two):
    """After a step, or in the middle of a long one. The same number of processes: here to the bit; promised is 1e-6."""
    whole, resumed = (load_file(two / folder / "model.safetensors") for folder in (name, f"{name}-{stopped}"))
    assert whole.keys() == resumed.keys()
    for tensor in whole:
        assert torch.allclose(whole[tensor].float(), resumed[tensor].float(), atol=1e-6), tensor
    assert curve(two / f"{name}-{stopped}") == pytest.approx(curve(two / name), rel=1e-6)


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_the_saved_checkpoint_has_every_weight_once(name, two, tiny_checkpoint):
    from transformers import AutoModelForCausalLM

    source = load_file(tiny_checkpoint / "model.safetensors")
    saved = load_file(two / name / "model.safetensors")
    assert {key: (one.shape, one.dtype) for key, one in saved.items()} == {
        key: (one.shape, one.dtype) for key, one in source.items()
    }
    _, report = AutoModelForCausalLM.from_pretrained(two / name, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["mismatched_keys"]


def test_one_process_continues_a_run_of_two(two, one, tiny_checkpoint, text_file):
    """The rest of a run that two began: the same text and learning rates as if one had begun it."""
    from headfold.uptrain.settings import UptrainSettings

    reference = one()
    values = json.loads((reference / "headfold.json").read_text())["history"][-1]["settings"]
    here = {"data": str(text_file), "eval_data": str(text_file)}
    out = uptrain_checkpoint(tiny_checkpoint, two / "handed-over", UptrainSettings.restored({**values, **here}))
    assert curve(out) == pytest.approx(curve(reference), rel=TOLERANCE)
    rates = [[line["learning_rate"] for line in metrics(folder, "train")] for folder in (out, reference)]
    assert rates[0] == rates[1]


@pytest.mark.parametrize("name", ["ddp-seeing", "fsdp-seeing"])
def test_towers_that_text_does_not_reach_stop_no_step_and_stay_as_they_are(name, two, seeing, text_file, tmp_path):
    """Each process would wait for the gradients of the vision tower, and fail at the second step."""
    from headfold.uptrain.settings import UptrainSettings

    entry = json.loads((two / name / "headfold.json").read_text())["history"][-1]
    assert entry["processes"] == 2
    assert entry["frozen"] == ["model.multi_modal_projector", "model.vision_tower"]
    # a record names files without their folders
    values = {**entry["settings"], "data": str(text_file), "eval_data": str(text_file)}
    alone = uptrain_checkpoint(seeing, tmp_path / "one", UptrainSettings.restored(values))
    assert curve(two / name) == pytest.approx(curve(alone), rel=TOLERANCE)
    source, saved = (load_file(folder / "model.safetensors") for folder in (seeing, two / name))
    assert source.keys() == saved.keys()
    towers = [key for key in source if "vision_tower" in key or "projector" in key]
    assert len(towers) > 10
    assert all(torch.equal(source[key], saved[key]) for key in towers)
    assert any(not torch.equal(source[key], saved[key]) for key in source.keys() - set(towers))
