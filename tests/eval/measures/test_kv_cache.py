from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from eval_models import tiny_llama
from headfold.errors import UnsupportedError
from headfold.eval.measures import kv_cache
from headfold.eval.measures.intervals import Estimate, paired_ratio
from headfold.eval.measures.kv_cache import (
    _decode_once,
    cache_formula,
    measure_cache,
    measure_decoding,
)
from headfold.eval.results import DecodeSettings, RepeatSpread
from headfold.eval.vs_source import _speed_ratio
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cache_bytes_fall_with_the_kv_heads(kv_heads, dtype):
    model = tiny_llama(kv_heads=kv_heads).to(dtype)
    found = measure_cache(model)
    assert found.bytes_per_token == 2 * 2 * kv_heads * 8 * dtype.itemsize  # keys and values, layers, heads, head dim
    assert found.bytes_per_token == cache_formula(model.config, dtype.itemsize)
    assert found.kv_heads == [kv_heads, kv_heads]
    assert found.total(100) == 100 * found.bytes_per_token


@pytest.mark.parametrize("model_type", ["gpt2", "mistral", "gpt_neox"])
def test_cache_bytes_of_other_families(model_type):
    config = AutoConfig.for_model(
        model_type,
        vocab_size=32,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        max_position_embeddings=64,
        sliding_window=16,
        bos_token_id=1,
        eos_token_id=2,
    )
    heads = 2 if model_type == "mistral" else 4
    assert measure_cache(AutoModelForCausalLM.from_config(config)).bytes_per_token == 2 * 2 * heads * 8 * 4


def test_timed_decoding_equals_generate(monkeypatch):
    """The timed tokens equal those of generate(), so the cache is used correctly."""
    model = tiny_llama()
    fed = []
    model.register_forward_pre_hook(lambda _, args, kwargs: fed.append(kwargs["input_ids"].clone()), with_kwargs=True)
    _decode_once(model, 10, 2, 5)
    assert [ids.shape[1] for ids in fed] == [10, 1, 1, 1, 1, 1]
    timed = torch.cat(fed, dim=1)
    prompt = timed[:, :10]
    expected = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=5,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert torch.equal(timed, expected)


def test_models_take_turns():
    settings = DecodeSettings(contexts=(6, 2), batches=(1, 3), new_tokens=4, repeats=2)
    models, order = [tiny_llama(kv_heads=4), tiny_llama(kv_heads=1)], []
    for name, model in enumerate(models):
        model.register_forward_hook(lambda *_, name=name: order.append(name))
    first, second = measure_decoding(models, settings)
    assert [(times.context, times.batch) for times in first] == [(2, 1), (2, 3), (6, 1), (6, 3)]
    assert [times.batch for times in second] == [1, 3, 1, 3]
    assert all(len(times.decode_seconds) == 2 for times in first + second)
    assert all(seconds > 0 for times in first + second for seconds in times.decode_seconds + times.first_token_seconds)
    assert first[1].tokens_per_second[0] == 3 * 4 / first[1].decode_seconds[0]
    # per point: one run untimed, two timed, of which the second begins with the other model
    assert order == [model for model in (0, 1, 0, 1, 1, 0) for _ in range(5)] * 4


def ranges_that_hold_one(monkeypatch, repeats: int, *, drift: float, second: float, outliers: float) -> float:
    """Time a model against itself on a machine with noise, and return the share of ranges that hold 1.

    Args:
        drift: share by which the machine slows down in each run.
        second: share by which the model that does not go first is faster, as caches are warm.
        outliers: share of runs that take twice as long.
    """
    draw, runs = np.random.default_rng(repeats), []

    def timed(*_):
        runs.append(None)
        place = len(runs) - 3  # two untimed runs come first
        seconds = (1 + drift * place) * math.exp(draw.normal(0, 0.03)) * (1 - second * (place % 2))
        return 0.1, seconds * (2 if draw.random() < outliers else 1)

    monkeypatch.setattr(kv_cache, "_decode_once", timed)
    model, held = nn.Linear(1, 1), []
    model.device = torch.device("cpu")
    for _ in range(300):
        runs.clear()
        one, other = measure_decoding([model, model], DecodeSettings((8,), (1,), 4, repeats))
        gain = _speed_ratio(one[0], other[0]).decode
        held.append(gain.low <= 1 <= gain.high)
    return float(np.mean(held))


@pytest.mark.parametrize("repeats", [2, 3, 6, 10])
@pytest.mark.parametrize(
    "machine",
    [
        {"drift": 0.0, "second": 0.0, "outliers": 0.0},
        {"drift": 0.05, "second": 0.0, "outliers": 0.0},
        {"drift": 0.0, "second": 0.05, "outliers": 0.0},
        {"drift": 0.01, "second": 0.02, "outliers": 0.1},
    ],
)
def test_a_model_against_itself_is_as_fast_as_its_range_says(repeats, machine, monkeypatch):
    """The 95 % range of the ratio holds 1 in 92 % of runs at least, also on a machine that drifts."""
    assert ranges_that_hold_one(monkeypatch, repeats, **machine) >= 0.92


def test_always_going_first_would_give_a_range_without_one(monkeypatch):
    """The control: without taking turns, a machine that slows down favours whoever goes first."""
    monkeypatch.setattr(kv_cache, "reversed", lambda pairs: pairs, raising=False)
    assert ranges_that_hold_one(monkeypatch, 10, drift=0.0, second=0.05, outliers=0.0) < 0.5


def test_a_ratio_from_one_timing_has_no_range():
    assert paired_ratio([1.3]) == Estimate(1.3, None, None)
    found = paired_ratio([1.2, 1.3, 1.4])
    assert found.value == 1.3
    assert found.low < 1.2
    assert found.high > 1.4


def test_timings_are_reported_as_median_and_range():
    assert RepeatSpread.of([3.0, 1.0, 2.0]) == RepeatSpread(median=2.0, min=1.0, max=3.0)


def test_no_cache_to_measure(monkeypatch):
    model = tiny_llama()
    own = type(model).forward

    def without_cache(self, *args, **kwargs):
        outputs = own(self, *args, **kwargs)
        for name in ("cache", "past_key_values"):
            if name in outputs:
                outputs[name].layers.clear()
        return outputs

    monkeypatch.setattr(type(model), "forward", without_cache)
    with pytest.raises(UnsupportedError, match="no KV cache"):
        measure_cache(model)
