"""Optimizers, and the course of the learning rate."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from headfold.uptrain.settings import UptrainSettings
from headfold.uptrain.training.optim import is_decayed, make_optimizer, make_schedule
from tiny import tiny_model


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
    ("model_type", "over", "part", "decayed"),
    [
        # norms of single heads are (H, D)
        ("cohere", {"use_qk_norm": True}, "q_norm.weight", False),
        ("stablelm", {"qk_layernorm": True}, "q_layernorm.norms.0.weight", False),
        ("inkling_text", {}, "self_attn.q_norm.weight", False),
        # biases and sinks beside weights of experts
        ("gpt_oss", {}, "experts.gate_up_proj_bias", False),
        ("gpt_oss", {}, "experts.down_proj", True),
        ("gpt_oss", {}, "self_attn.sinks", False),
        ("recurrent_gemma", {}, "rg_lru.input_gate_bias", False),
        ("recurrent_gemma", {}, "rg_lru.input_gate_weight", True),
        ("ernie4_5_moe", {}, "moe_statics.e_score_correction_bias", False),
        # state-space layers
        ("mamba", {}, "mixer.A_log", False),
        ("zamba", {}, "mamba.D", False),
        ("mamba", {}, "mixer.conv1d.weight", True),
        # matrices, also those of a single row, of experts and of embeddings
        ("qwen2_moe", {}, "mlp.shared_expert_gate.weight", True),
        ("mixtral", {}, "experts.gate_up_proj", True),
        ("llama", {}, "embed_tokens.weight", True),
        ("gpt2", {}, "attn.c_attn.weight", True),
        ("gpt2", {}, "attn.c_attn.bias", False),
    ],
)
def test_weight_decay_goes_by_the_kind_of_a_parameter_not_by_its_dimensions(model_type, over, part, decayed):
    model = tiny_model(model_type, **over)
    found = [name for name, _ in model.named_parameters() if name.endswith(part)]
    assert found
    assert {is_decayed(model, name) for name in found} == {decayed}


def test_the_table_of_a_relative_bias_is_not_decayed():
    model = tiny_model("t5")
    tables = [name for name, _ in model.named_parameters() if "relative_attention_bias" in name]
    assert len(tables) == 2
    assert not any(is_decayed(model, name) for name in tables)
    assert is_decayed(model, "shared.weight")


def test_every_parameter_is_in_one_group_and_tied_ones_once():
    model = tiny_model("llama", tie_word_embeddings=True)
    decayed, spared = make_optimizer(model, UptrainSettings()).param_groups
    counted = [id(weight) for group in (decayed, spared) for weight in group["params"]]
    assert sorted(counted) == sorted({id(weight) for weight in model.parameters()})


def test_adafactor_does_not_depend_on_the_scale_of_the_gradient():
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
