from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from headfold.errors import UsageError
from headfold.uptrain.budget import plan_budget
from headfold.uptrain.optim import make_optimizer, make_schedule
from headfold.uptrain.settings import UptrainSettings


def test_fraction_of_the_pretraining_tokens_rounds_up_to_whole_steps():
    budget = plan_budget(UptrainSettings(fraction=0.05, pretraining_tokens=1_000_000, block=512, batch=8))
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
def test_schedules_rise_to_the_peak_and_end_where_they_should(schedule):
    settings = UptrainSettings(schedule=schedule, learning_rate=1e-3, final_learning_rate=0.1, warmup=0.1, steps=100)
    rate = make_schedule(settings, 100)
    rates = [rate(step) for step in range(100)]
    assert rates[0] == pytest.approx(1.9e-4 if schedule == "warmup-stable-decay" else 1e-4)
    assert max(rates) == pytest.approx(1e-3)
    assert rates[9] == pytest.approx(1e-3)
    ends = {"cosine": 1e-4, "linear": 0.0, "constant": 1e-3, "warmup-stable-decay": 1e-4}
    assert rates[-1] == pytest.approx(ends[schedule], abs=2e-5)
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(rates[9:]))


def test_without_warm_up_the_first_step_has_the_peak():
    assert make_schedule(UptrainSettings(warmup=0, steps=10), 10)(0) == pytest.approx(1e-3)


def test_norms_and_biases_are_not_decayed():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3))
    decayed, spared = make_optimizer(model, UptrainSettings(weight_decay=0.3)).param_groups
    assert [tuple(weight.shape) for weight in decayed["params"]] == [(3, 3)]
    assert decayed["weight_decay"] == 0.3
    assert spared["weight_decay"] == 0
    assert len(spared["params"]) == 3
