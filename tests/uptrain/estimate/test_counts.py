"""Speeds, MFU and the record count the tokens that were really read, where pairs do not fill their blocks."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace

import pytest
from headfold.checkpoint.load import load_language_model, load_tokenizer
from headfold.checkpoint.record import last_entry
from headfold.corpus import Columns
from headfold.uptrain import dry_run
from headfold.uptrain.data.mixture import Mixture, open_mixture
from headfold.uptrain.data.objective import Pairs
from headfold.uptrain.estimate.cost import flops_per_token
from headfold.uptrain.estimate.model_size import ModelSize
from headfold.uptrain.monitor import progress
from headfold.uptrain.processes.launch import Layout
from headfold.uptrain.run import uptrain_checkpoint
from headfold.uptrain.training import preparation
from runs import metrics

_PEAK = 1e9


class OneSecond:
    """A clock that says that every lap took one."""

    def __init__(self, steps_left: int) -> None:
        pass

    def lap(self, steps: int, tokens: int) -> tuple[float, float]:
        return float(tokens), 0.0


@pytest.fixture
def paired(settings, pairs_file):
    """Pairs of 3 to 10 tokens in blocks of 32, four a step."""
    return settings(
        data=str(pairs_file), source_column="input", target_column="answer.back", sequence_length=32, steps=6,
        save_every=2,
        teacher=None,
    )  # fmt: skip


@pytest.fixture
def by_hand(paired, tiny_t5, pairs_file):
    """(source tokens, target tokens) of each step."""
    objective = Pairs(load_tokenizer(tiny_t5), load_language_model(tiny_t5), sequence_length=32, seed=paired.seed)
    mixture = Mixture(open_mixture([str(pairs_file)], Columns("input", "answer.back")), objective)
    steps = [[next(mixture) for _ in range(4)] for _ in range(6)]
    return [tuple(sum(map(len, side)) for side in zip(*step, strict=True)) for step in steps]


def test_rates_count_the_real_tokens_of_short_pairs(paired, by_hand, tiny_t5, tmp_path, cut_power, monkeypatch):
    """Also over a stop between two lines of progress."""
    monkeypatch.setattr(progress, "Stopwatch", OneSecond)
    monkeypatch.setattr(preparation, "peak_flops", lambda device: _PEAK)
    cut_power(5, tiny_t5, tmp_path / "out", paired)
    out = uptrain_checkpoint(tiny_t5, tmp_path / "out", paired)
    lines = metrics(out, "train")
    assert [line["tokens_per_second"] for line in lines] == [read for read, _ in by_hand]
    shape = ModelSize.of(load_language_model(tiny_t5), encoder_decoder=True)
    flops = [read * flops_per_token(shape, targets=written / read) for read, written in by_hand]
    assert [line["mfu"] for line in lines] == pytest.approx([one / _PEAK for one in flops])
    entry = last_entry(out, "uptrain")
    assert entry["tokens_read"] == sum(read for read, _ in by_hand) < entry["tokens"] / 2
    assert entry["tokens"] == 6 * 4 * 32


def test_a_line_for_several_steps_counts_all_their_tokens(paired, by_hand, tiny_t5, tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "Stopwatch", OneSecond)
    out = uptrain_checkpoint(tiny_t5, tmp_path / "out", paired.model_copy(update={"log_every": 3}))
    reads = [read for read, _ in by_hand]
    assert [line["tokens_per_second"] for line in metrics(out, "train")] == [sum(reads[:3]), sum(reads[3:])]


def test_packed_sequences_have_no_padding(finished):
    entry = last_entry(finished, "uptrain")
    assert entry["tokens_read"] == entry["tokens"]


def test_measured_speed_counts_real_tokens(paired, by_hand, tiny_t5, monkeypatch):
    """The first two of three steps are left out."""
    monkeypatch.setattr(dry_run, "time", SimpleNamespace(perf_counter=count().__next__))
    rows = dict(dry_run.measure(tiny_t5, paired.model_copy(update={"steps": 3}), Layout()))
    assert rows["tokens per second, measured here"] == str(by_hand[2][0])
