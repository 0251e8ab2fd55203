"""The recovered share, measured on one held-out text at a time."""

from __future__ import annotations

import math

import pytest
from headfold.uptrain.monitor.heldout import recovered_so_far
from headfold.uptrain.run import uptrain_checkpoint
from runs import metrics


def line(kind: str, perplexity: float, text: str = "a") -> dict:
    return {"kind": kind, "perplexity": perplexity, "text": text}


def test_the_share_is_that_of_the_gap_from_the_start_to_the_source():
    lines = [line("source", 10), line("eval", 40), line("train", 1), line("eval", 20)]
    assert recovered_so_far(lines, "a") == pytest.approx(0.5)
    assert recovered_so_far(lines[:2], "a") is None  # nothing was scored after the start
    assert recovered_so_far([line("source", 10), line("eval", 9), line("eval", 8)], "a") is None
    assert recovered_so_far(lines[1:], "a") is None


def test_measurements_on_another_text_do_not_count():
    old = [line("source", 10), line("eval", 40), line("eval", 20)]
    assert recovered_so_far(old, "b") is None
    new = [*old, line("source", 100, "b"), line("start", 400, "b"), line("eval", 200, "b")]
    assert recovered_so_far(new, "b") == pytest.approx(0.5)
    assert recovered_so_far([*new, line("eval", 100, "b")], "b") == pytest.approx(1)
    assert recovered_so_far(new, "a") == pytest.approx(0.5)


def test_a_run_resumed_with_another_held_out_text_measures_the_gap_anew(
    tiny_checkpoint, settings, text_file, tmp_path, cut_power, capfd
):
    """The start is the checkpoint as it was given, not as it is at step 5; the source is the teacher."""
    teacher = uptrain_checkpoint(tiny_checkpoint, tmp_path / "teacher", settings(steps=30, learning_rate=1e-2))
    wanted = settings(teacher=str(teacher), eval_data=str(text_file), eval_tokens=400, eval_every=6)
    out = tmp_path / "out"
    cut_power(7, tiny_checkpoint, out, wanted)
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join(text_file.read_text().splitlines()[200:210]))
    changed = wanted.model_copy(update={"eval_data": str(other)})
    capfd.readouterr()
    uptrain_checkpoint(tiny_checkpoint, out, changed)
    assert "how it is read, has changed" in capfd.readouterr().err.replace("\n", " ")
    alone = uptrain_checkpoint(tiny_checkpoint, tmp_path / "alone", changed)
    start = metrics(out, "start")
    assert [(one["step"], one["perplexity"]) for one in start] == [
        (5, pytest.approx(metrics(alone, "eval")[0]["perplexity"]))
    ]
    sources = [one["perplexity"] for one in metrics(out, "source")]
    assert sources[1] == pytest.approx(metrics(alone, "source")[0]["perplexity"])
    assert sources[1] != pytest.approx(sources[0], rel=1e-3)
    # 0 on the first text, 5 where the run went on with the second, 6 and 12 on that
    assert [one["step"] for one in metrics(out, "eval")] == [0, 5, 6, 12]
    last = metrics(out, "eval")[-1]["perplexity"]
    gap = math.log(start[0]["perplexity"] / sources[1])
    at_six = metrics(out, "eval")[2]["perplexity"]
    assert gap > 0
    told = metrics(out, "train")[-1]["recovered"]
    assert told == pytest.approx(math.log(start[0]["perplexity"] / at_six) / gap)
    assert last == pytest.approx(metrics(alone, "eval")[-1]["perplexity"], rel=1e-5)


def test_the_same_text_is_not_scored_again(tiny_checkpoint, settings, text_file, tmp_path, cut_power):
    wanted = settings(teacher=str(tiny_checkpoint), eval_data=str(text_file), eval_tokens=400, steps=8)
    cut_power(7, tiny_checkpoint, tmp_path / "out", wanted)
    uptrain_checkpoint(tiny_checkpoint, tmp_path / "out", wanted)
    assert len(metrics(tmp_path / "out", "source")) == 1
    assert metrics(tmp_path / "out", "start") == []
