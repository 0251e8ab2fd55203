from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch
from headfold.checkpoint.source import Checkpoint
from headfold.errors import UsageError
from headfold.uptrain.estimate.budget import plan_budget
from headfold.uptrain.estimate.pretraining import known_pretraining, resolve_pretraining
from headfold.uptrain.models.student import freeze_other_weights
from headfold.uptrain.settings import UptrainSettings
from headfold.uptrain.training.optim import make_optimizer, make_schedule
from tiny import tiny_model


def test_fraction_of_the_pretraining_tokens_rounds_up_to_whole_steps():
    budget = plan_budget(UptrainSettings(fraction=0.05, pretraining_tokens=1_000_000, sequence_length=512, batch=8))
    assert (budget.steps, budget.tokens_per_step, budget.tokens) == (13, 4096, 13 * 4096)
    assert budget.tokens - 50_000 < 4096


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "none was given"),
        ({"steps": 3, "tokens": 5}, "tokens and steps were given"),
        ({"fraction": 0.05}, "their number is not known"),
    ],
)
def test_a_budget_is_given_exactly_once(given, says):
    with pytest.raises(UsageError, match=says):
        plan_budget(UptrainSettings(**given))


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "warmup-stable-decay"])
def test_schedules_rise_to_the_peak_and_end_at_the_last_step(schedule):
    settings = UptrainSettings(schedule=schedule, learning_rate=1e-3, warmup=0.1, steps=100)
    rate = make_schedule(settings, 100)
    rates = [rate(step) for step in range(100)]
    assert rates[:10] == pytest.approx([1e-4 * (step + 1) for step in range(10)])
    assert max(rates) == rates[9]
    assert rates[-1] == pytest.approx(1e-3 if schedule == "constant" else 1e-4)
    assert all(later <= earlier for earlier, later in pairwise(rates[9:]))
    halfway = {"cosine": 5.5e-4, "linear": 5.5e-4, "constant": 1e-3, "warmup-stable-decay": 1e-3}
    assert rates[54] == pytest.approx(halfway[schedule], rel=1e-6)


def test_warmup_stable_decay_falls_in_the_last_fifth():
    settings = UptrainSettings(schedule="warmup-stable-decay", learning_rate=1.0, final_learning_rate=0, warmup=0)
    rate = make_schedule(settings, 101)
    assert [round(rate(step), 9) for step in (0, 79, 80, 85, 90, 100)] == [1, 1, 1, 0.75, 0.5, 0]


def test_without_warm_up_the_first_step_has_the_peak():
    for steps in (1, 2, 10):
        assert make_schedule(UptrainSettings(warmup=0, steps=steps, learning_rate=1e-3), steps)(0) == pytest.approx(
            1e-3
        )


def test_norms_and_biases_are_not_decayed():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3))
    decayed, spared = make_optimizer(model, UptrainSettings(weight_decay=0.3)).param_groups
    assert [tuple(weight.shape) for weight in decayed["params"]] == [(3, 3)]
    assert decayed["weight_decay"] == 0.3
    assert spared["weight_decay"] == 0
    assert len(spared["params"]) == 3


@pytest.mark.parametrize(
    ("train", "trained"),
    [
        ("all", {"embed_tokens", "q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "gate_proj", "lm_head"}),
        ("attention", {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"}),
        ("kv", {"k_proj", "v_proj", "k_norm"}),
    ],
)
def test_only_the_chosen_weights_are_trained(train, trained):
    model = tiny_model("qwen3")
    freeze_other_weights(model, train)
    kinds = {name.split(".")[-2] for name, weight in model.named_parameters() if weight.requires_grad}
    assert trained <= kinds
    assert train == "all" or trained == kinds
    counted = sum(len(group["params"]) for group in make_optimizer(model, UptrainSettings()).param_groups)
    assert counted == sum(weight.requires_grad for weight in model.parameters())


def test_keys_and_values_that_are_fused_with_queries_cannot_be_trained_alone():
    with pytest.raises(UsageError, match="no weights that `--train kv` means"):
        freeze_other_weights(tiny_model("phi3"), "kv")


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("meta-llama/Llama-2-7b-hf", 2e12),
        ("./somewhere/llama-2-13b-gqa8", 2e12),
        ("HuggingFaceTB/SmolLM2-1.7B-Instruct", 11e12),
        ("allenai/OLMo-1B-hf", 3e12),
        ("EleutherAI/pythia-1.4b-deduped", 299_892_736_000),
        ("my-model", None),
        ("not-llama-2-7b-at-all", None),
    ],
)
def test_pretraining_tokens_are_known_by_name(name, tokens):
    known = known_pretraining(name)
    assert (known and known.tokens) == tokens


def test_pretraining_tokens_are_known_from_the_record_of_a_conversion(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    history = [{"step": "convert", "source": "meta-llama/Llama-2-7b-hf"}]
    (tmp_path / "headfold.json").write_text(json.dumps({"schema": 1, "history": history}))
    settings = UptrainSettings(fraction=0.05)
    resolved = resolve_pretraining(settings, tmp_path, Checkpoint.open(tmp_path, weights=False))
    assert resolved.pretraining_tokens == 2e12
    assert resolve_pretraining(settings, "unknown").pretraining_tokens is None
    given = UptrainSettings(fraction=0.05, pretraining_tokens=7)
    assert resolve_pretraining(given, "meta-llama/Llama-2-7b-hf") is given


def test_adafactor_does_not_feel_the_unit_of_the_gradient():
    """Its second moment takes the unit away, down to gradients of large models."""
    ways = []
    for scale in (1.0, 1e-3, 1e-7):
        layer = torch.nn.Linear(8, 16)
        with torch.no_grad():
            layer.weight.copy_(torch.linspace(-1, 1, 128).view(16, 8))
            layer.bias.copy_(torch.linspace(1, 2, 16))
        begun = [weight.detach().clone() for weight in layer.parameters()]
        optimizer = make_optimizer(layer, UptrainSettings(optimizer="adafactor", learning_rate=1e-2, weight_decay=0.0))
        generator = torch.Generator().manual_seed(0)
        for _ in range(3):
            for weight in layer.parameters():
                weight.grad = scale * torch.randn(weight.shape, generator=generator)
            optimizer.step()
        ways.append([weight.detach() - start for weight, start in zip(layer.parameters(), begun, strict=True)])
    for way in ways[1:]:
        assert all(torch.allclose(one, other, rtol=1e-3) for one, other in zip(way, ways[0], strict=True))
    assert all(float(one.abs().max()) > 1e-3 for one in ways[0])


def test_adafactor_leaves_rows_without_a_gradient_finite():
    layer = torch.nn.Linear(8, 16, bias=False)
    optimizer = make_optimizer(layer, UptrainSettings(optimizer="adafactor", learning_rate=1e-2, weight_decay=0.0))
    for _ in range(2):
        layer.weight.grad = torch.zeros(16, 8)
        layer.weight.grad[3] = 1e-6
        optimizer.step()
    assert layer.weight.isfinite().all()
