"""Looking ahead: operations, memory, and ten measured steps."""

from __future__ import annotations

import pytest
from headfold.errors import HeadfoldError, UsageError
from headfold.uptrain.dry_run import estimate_run, measure
from headfold.uptrain.estimate.cost import estimate_cost
from headfold.uptrain.estimate.model_size import ModelSize, model_without_weights
from headfold.uptrain.processes.launch import Layout


def test_a_plan_that_cannot_fit_is_refused(tiny_checkpoint, settings):
    rows = dict(estimate_run(tiny_checkpoint, settings(), Layout()))
    assert rows["tokens"] == "768"
    assert rows["teacher"] == "none"
    assert (
        int(rows["parameters"].replace(",", ""))
        == ModelSize.of(model_without_weights(tiny_checkpoint)[0], encoder_decoder=False).parameters
    )
    with pytest.raises(HeadfoldError, match=r"needs about .* GiB on each device, and a device has 0\.0 GiB"):
        estimate_run(tiny_checkpoint, settings(), Layout(), device_bytes=10_000)


@pytest.mark.parametrize(
    ("given", "layout", "gpu", "amx", "expected", "teacher_bytes"),
    [
        ({}, Layout(), False, False, "float32 on a CPU", 4),
        ({}, Layout(), False, True, "bf16 on a CPU", 2),
        ({"precision": "bf16"}, Layout(), False, False, "bf16 on a CPU", 2),
        ({"device": "auto"}, Layout(8, True), False, False, "bf16 on a GPU", 2),
        ({"device": "auto", "precision": "fp32"}, Layout(8, True), False, False, "float32 on a GPU", 2),
        ({"device": "auto"}, Layout(8, False, cpu=True), False, False, "float32 on a CPU", 4),
        ({"device": "auto"}, Layout(), True, False, "bf16 on a GPU", 2),
        ({"device": "cpu"}, Layout(), True, False, "float32 on a CPU", 4),
    ],
)
def test_the_estimate_counts_the_precision_of_the_run(
    given, layout, gpu, amx, expected, teacher_bytes, tiny_checkpoint, settings, monkeypatch
):
    """The teacher, bf16 on disk, is float32 on a CPU without bf16; activations in bf16 are three quarters as large."""
    from headfold.uptrain import dry_run

    monkeypatch.setattr(dry_run.torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(dry_run, "has_fast_bf16", lambda cpu: amx if cpu else gpu)
    monkeypatch.setattr(dry_run, "memory_bytes", lambda device: 10**12)
    plans = []
    monkeypatch.setattr(
        dry_run, "estimate_cost", lambda *a, **named: plans.append(estimate_cost(*a, **named)) or plans[-1]
    )
    wanted = settings(**{"precision": "auto", "batch": 8, "teacher": str(tiny_checkpoint), **given})
    rows = dict(estimate_run(tiny_checkpoint, wanted, layout))
    assert rows["forward pass in"] == expected
    shape = ModelSize.of(model_without_weights(tiny_checkpoint)[0], encoder_decoder=False)
    assert plans[0].memory["teacher"] == teacher_bytes * shape.parameters // (8 if layout.sharded else 1)
    per_number = plans[0].memory["activations"] / ((12 * shape.hidden + 5 * shape.inner) * shape.layers)
    blocks = 1 if layout.processes == 8 else 2
    assert per_number == pytest.approx((3 if "bf16" in expected else 4) * 16 * blocks)


def test_a_batch_that_the_processes_cannot_share_is_refused_before_the_run(tiny_checkpoint, settings):
    with pytest.raises(UsageError, match="batch of 4 sequences cannot be shared evenly by 8"):
        estimate_run(tiny_checkpoint, settings(), Layout(8, True))


@pytest.mark.parametrize(
    ("which", "given", "layout", "why"),
    [
        ("tiny_t5", {"optimizer": "adafactor"}, Layout(2, True), "Adafactor was not tried"),
        ("tiny_t5", {"isolate_documents": True}, Layout(), "models without an encoder"),
        ("tiny_checkpoint", {"target_column": "answer.back"}, Layout(), "LlamaForCausalLM has no encoder"),
        ("tiny_checkpoint", {"noise_density": 0.3}, Layout(), "LlamaForCausalLM has no encoder"),
        ("tiny_checkpoint", {"sequence_length": 65}, Layout(), "longer than the 64"),
    ],
)
def test_a_dry_run_refuses_what_a_run_refuses(which, given, layout, why, settings, request):
    checkpoint = request.getfixturevalue(which)
    with pytest.raises(HeadfoldError, match=why):
        estimate_run(checkpoint, settings(**given), layout)
    assert estimate_run(checkpoint, settings(), layout)


def test_without_a_config_the_budget_is_still_shown(settings, capfd):
    wanted = settings(steps=None, fraction=0.5, pretraining_tokens=1000, batch=8)
    rows = dict(estimate_run("some/nowhere", wanted, Layout(8, True)))
    assert rows == {"tokens": "512", "steps": "4", "tokens per step": "128", "processes": "8, weights shared (FSDP2)"}
    assert "no config.json" in capfd.readouterr().err


def test_ten_steps_are_measured_and_nothing_is_left(tiny_checkpoint, settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = dict(measure(tiny_checkpoint, settings(steps=1000), Layout(8, False)))
    assert float(rows["seconds per step, measured here"]) >= 0
    assert {"the whole run here", "on 8 such devices, at best"} < set(rows)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"data": "missing.jsonl"}, "There is no text file at missing.jsonl"),
        ({"data": ("stdlib=2", "missing.jsonl=1")}, "There is no text file at missing.jsonl"),
        ({"eval_data": "missing.jsonl"}, "There is no text file at missing.jsonl"),
        ({"data": "stdlib#test"}, "no split 'test'"),
    ],
)
def test_a_dry_run_refuses_missing_text(given, message, tiny_checkpoint, settings):
    with pytest.raises(UsageError, match=message):
        estimate_run(tiny_checkpoint, settings(**given), Layout())


def test_a_dry_run_does_not_ask_the_hub(tiny_checkpoint, settings):
    """It is for planning; and the network is blocked here, so that asking would fail."""
    rows = dict(estimate_run(tiny_checkpoint, settings(data="some/corpus", eval_data="some/corpus"), Layout()))
    assert rows["steps"] == "12"


def test_a_dry_run_refuses_a_tokenizer_without_sentinels(tiny_t5, tiny_checkpoint, settings, tmp_path):
    import shutil

    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(tiny_t5 / "config.json", bare)
    assert estimate_run(bare, settings(), Layout())  # a config alone will do
    for file in tiny_checkpoint.glob("tokenizer*"):
        shutil.copy(file, bare)
    with pytest.raises(HeadfoldError, match="sentinel"):
        estimate_run(bare, settings(), Layout())
    assert estimate_run(tiny_t5, settings(), Layout())


def test_a_dry_run_refuses_a_teacher_with_other_layers(tiny_checkpoint, settings, tmp_path):
    import json
    import shutil

    teacher = tmp_path / "teacher"
    shutil.copytree(tiny_checkpoint, teacher)
    config = json.loads((teacher / "config.json").read_text())
    (teacher / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    alike = settings(teacher=str(tiny_checkpoint), hidden_weight=1.0)
    assert estimate_run(tiny_checkpoint, alike, Layout())
    with pytest.raises(UsageError, match="hidden states cannot be compared"):
        estimate_run(tiny_checkpoint, alike.model_copy(update={"teacher": str(teacher)}), Layout())


def test_a_dry_run_refuses_a_missing_folder_and_tolerates_a_missing_hub(settings, tmp_path):
    with pytest.raises(UsageError):
        estimate_run(tmp_path / "typo", settings(), Layout())
    assert estimate_run("some/model", settings(), Layout())


def test_a_dry_run_refuses_a_teacher_of_another_vocabulary(tiny_checkpoint, settings, tmp_path):
    import json
    import shutil

    teacher = tmp_path / "teacher"
    shutil.copytree(tiny_checkpoint, teacher)
    config = json.loads((teacher / "config.json").read_text())
    (teacher / "config.json").write_text(json.dumps({**config, "vocab_size": config["vocab_size"] + 1}))
    with pytest.raises(UsageError, match="another vocabulary"):
        estimate_run(tiny_checkpoint, settings(teacher=str(teacher)), Layout())
