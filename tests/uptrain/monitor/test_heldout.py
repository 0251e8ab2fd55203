"""The recovered share, measured on one held-out text at a time."""

from __future__ import annotations

import math

import pytest
from headfold.uptrain.monitor.heldout import recovered_so_far
from headfold.uptrain.run import uptrain_checkpoint
from runs import metrics


def line(kind: str, perplexity: float, text: str = "a", *, least_loss: float | None = 0.1) -> dict:
    return {"kind": kind, "perplexity": perplexity, "text": text, "least_loss": least_loss}


def test_the_share_is_that_of_the_gap_from_the_start_to_the_source():
    lines = [line("source", 10), line("eval", 40), line("train", 1), line("eval", 20)]
    assert recovered_so_far(lines, "a") == pytest.approx(0.5)
    assert recovered_so_far(lines[:2], "a") is None  # nothing was scored after the start
    assert recovered_so_far(lines[1:], "a") is None


@pytest.mark.parametrize("least_loss", [0.0, -0.3, None])
def test_a_start_that_is_not_certainly_worse_has_no_recovered_share(least_loss):
    """A start of 10.01 against a source of 10 gave 2252 % recovered."""
    lines = [line("source", 10), line("eval", 10.01, least_loss=least_loss), line("eval", 9.8)]
    assert recovered_so_far(lines, "a") is None
    anew = [line("source", 10), line("start", 10.01, least_loss=least_loss), line("eval", 9.8)]
    assert recovered_so_far(anew, "a") is None


def test_lines_of_an_earlier_version_have_no_recovered_share():
    lines = [line("source", 10), line("eval", 40), line("eval", 20)]
    del lines[1]["least_loss"]
    assert recovered_so_far(lines, "a") is None


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
    # the model is its own source, which lost nothing
    assert metrics(tmp_path / "out", "eval")[0]["least_loss"] == 0
    assert all("recovered" not in one for one in metrics(tmp_path / "out", "train"))
    assert metrics(tmp_path / "out", "start") == []
