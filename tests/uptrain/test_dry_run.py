"""Looking ahead: operations, memory, and ten measured steps."""

from __future__ import annotations

import pytest
from headfold.errors import HeadfoldError, UsageError
from headfold.uptrain.dry_run import estimate_run, measure
from headfold.uptrain.estimate.cost import ModelSize, estimate_cost, model_without_weights
from headfold.uptrain.processes.launch import Layout
from headfold.uptrain.settings import UptrainSettings


def test_operations_and_memory_of_a_known_model():
    """Llama-2-7B: 6.74 G parameters, 16 bytes each for weights, gradient and moments, 2 more for a copy in bf16."""
    llama = ModelSize(6_738_415_616, 6_738_415_616, 131_072_000, 32, 4096, 11008, 32000)
    settings = UptrainSettings(sequence_length=4096, micro_batch=1, gradient_checkpointing=True)
    alone = estimate_cost(settings, 10**9, llama, llama, bf16=True)
    multiplied = 6_738_415_616 - 131_072_000
    assert alone.flops == 8 * multiplied * 10**9
    held = sum(alone.memory[name] for name in ("weights", "gradients", "optimizer"))
    assert held == 16 * 6_738_415_616
    assert alone.memory["teacher"] == 2 * 6_738_415_616
    assert alone.memory["weights in bf16"] == 2 * 6_738_415_616
    shared = estimate_cost(settings, 10**9, llama, llama, processes=8, sharded=True, bf16=True)
    assert "weights in bf16" not in shared.memory
    assert shared.memory["weights"] == alone.memory["weights"] // 8
    assert shared.memory["activations"] == alone.memory["activations"]
    kept = estimate_cost(settings.model_copy(update={"gradient_checkpointing": False}), 10**9, llama, bf16=True)
    assert kept.memory["activations"] > 10 * alone.memory["activations"] / 4
    hidden = settings.model_copy(update={"hidden_weight": 1.0})
    assert estimate_cost(hidden, 10**9, llama, llama, bf16=True).memory["hidden states"] == 32 * 4096 * 4096 * 4
    small = estimate_cost(settings.model_copy(update={"micro_batch": 64, "batch": 1}), 10**9, llama, llama, bf16=True)
    assert small.memory["activations"] == alone.memory["activations"]  # no more than the batch


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "t5", "bart"])
def test_activations_are_what_autograd_keeps(model_type, bf16):
    """Within a factor of two for layers of a usual shape; in bf16 with a copy of each weight that is multiplied."""
    import torch
    from headfold.checkpoint.backbone import Backbone
    from tiny import tiny_model, tiny_pair

    pair = model_type in ("t5", "bart")
    wide = {"d_ff": 256, "encoder_ffn_dim": 256, "decoder_ffn_dim": 256}
    model = tiny_pair(model_type, **wide) if pair else tiny_model(model_type, heads=8, intermediate_size=352)
    model.train()
    ids = torch.ones(4, 64, dtype=torch.long)
    backbone, inputs = Backbone.of(model), {"input_ids": ids, **({"decoder_input_ids": ids} if pair else {})}
    kept: dict[int, int] = {}
    weights = {one.untyped_storage().data_ptr() for one in model.parameters()}

    def keep(tensor):
        place = tensor.untyped_storage().data_ptr()
        if place not in weights:
            kept[place] = tensor.untyped_storage().nbytes()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        states = backbone(**inputs, use_cache=False).last_hidden_state
        found = sum(kept.values())
        del states
    shape = ModelSize.of(model, encoder_decoder=pair)
    wanted = UptrainSettings(sequence_length=64, micro_batch=4, target_column="answer" if pair else None)
    plan = estimate_cost(wanted, 1, shape, bf16=bf16)
    head = shape.vocabulary * shape.hidden
    copied = 2 * (shape.parameters - shape.looked_up - head) if bf16 else 0  # of the layers alone
    assert found / 2 < plan.memory["activations"] + copied < found * 2


@pytest.mark.parametrize(("kind", "embeddings"), [("shared", 1), ("one a side", 2), ("and a head of its own", 3)])
def test_what_is_multiplied_and_what_is_looked_up(kind, embeddings):
    """Marian's tables by hand: positions and embeddings are looked up, the head is multiplied once a target."""
    from tiny import tiny_pair

    model = tiny_pair(
        "marian", share_encoder_decoder_embeddings=embeddings == 1, tie_word_embeddings=embeddings < 3,
        max_position_embeddings=40,
    )  # fmt: skip
    width, rows, inner = 64, 300, 48
    attention, norm, head = 4 * (width**2 + width), 2 * width, rows * width
    feed_forward = 2 * width * inner + width + inner
    source = 2 * (width**2 + width)  # keys and values of what was read
    read = 2 * (attention + feed_forward + 2 * norm) + 2 * source
    written = 2 * (2 * attention + feed_forward + 3 * norm) - 2 * source + head
    shape = ModelSize.of(model, encoder_decoder=True)
    assert sum(one.numel() for one in model.parameters()) == shape.parameters
    assert shape.looked_up == (embeddings - 1) * head + 2 * 40 * width
    assert (shape.written, shape.per_token(1.0)) == (written, read + written)
    assert shape.per_token(0.25) == round(read + written / 4)


def test_positions_of_a_decoder_are_looked_up_too():
    from tiny import tiny_model

    gpt2 = tiny_model("gpt2", n_positions=40)
    assert ModelSize.of(gpt2, encoder_decoder=False).looked_up == gpt2.transformer.wpe.weight.numel() == 40 * 64


def test_hidden_states_stand_in_memory_for_what_is_written(tiny_t5):
    """Those of the two decoder layers at 114 targets for 512 tokens read, against those of a decoder for all 512."""
    shape = ModelSize.of(model_without_weights(tiny_t5)[0], encoder_decoder=True)
    wanted = UptrainSettings(sequence_length=512, micro_batch=2, hidden_weight=1.0)
    assert estimate_cost(wanted, 1, shape, shape).memory["hidden states"] == 2 * 2 * 114 * 32 * 4
    pairs = wanted.model_copy(update={"target_column": "answer"})
    assert estimate_cost(pairs, 1, shape, shape).memory["hidden states"] == 2 * 2 * 512 * 32 * 4


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
def test_what_a_run_computes_in_is_what_is_counted(
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
def test_what_a_run_refuses_is_refused_before_it(which, given, layout, why, settings, request):
    checkpoint = request.getfixturevalue(which)
    with pytest.raises(HeadfoldError, match=why):
        estimate_run(checkpoint, settings(**given), layout)
    assert estimate_run(checkpoint, settings(), layout)


def test_adafactor_is_refused_under_fsdp_before_a_model_is_read(tiny_t5, settings, tmp_path, monkeypatch):
    from headfold.uptrain.training import opening

    real, sharded = opening.make_accelerator, []

    def accelerate(*arguments):
        monkeypatch.setattr(type(made := real(*arguments)), "is_fsdp2", bool(sharded), raising=True)
        return made

    monkeypatch.setattr(opening, "make_accelerator", accelerate)
    wanted = settings(optimizer="adafactor")
    assert opening.open_run(tiny_t5, tmp_path / "out", wanted)
    sharded.append(True)
    monkeypatch.setattr(opening, "build_student", lambda *arguments: pytest.fail("read"))
    with pytest.raises(HeadfoldError, match="Adafactor was not tried"):
        opening.open_run(tiny_t5, tmp_path / "out", wanted)
    assert list(tmp_path.iterdir()) == []


def test_without_a_config_the_budget_is_still_told(settings, capfd):
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
def test_a_dry_run_refuses_text_that_is_not_there(given, message, tiny_checkpoint, settings):
    with pytest.raises(UsageError, match=message):
        estimate_run(tiny_checkpoint, settings(**given), Layout())


def test_a_dry_run_leaves_the_hub_alone(tiny_checkpoint, settings):
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


def test_a_dry_run_refuses_a_checkpoint_that_is_not_there_and_lets_the_hub_be_away(settings, tmp_path):
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
