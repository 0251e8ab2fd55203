from __future__ import annotations

import json

import pytest
from headfold.checkpoint.source import Checkpoint
from headfold.errors import UsageError
from headfold.uptrain.estimate.budget import plan_budget
from headfold.uptrain.estimate.pretraining import known_pretraining, resolve_pretraining
from headfold.uptrain.settings import UptrainSettings


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
