from __future__ import annotations

import numpy as np
import pytest
import torch
from eval_models import random_documents
from headfold.errors import UsageError
from headfold.eval.scoring.resume import SavedMeasurements
from headfold.eval.scoring.score_loop import ScoreLoop, _SaveTimer

DOCUMENTS = random_documents([40, 7, 23, 31])


def values_of(batch) -> torch.Tensor:
    """Compute two rows that tell every scored token apart."""
    return torch.stack([batch.places_N.float(), batch.targets_N.float()])


def read(saved: SavedMeasurements, stop_after: int | None = None) -> tuple[torch.Tensor, int]:
    seen = 0

    def compute(batch):
        nonlocal seen
        if seen == stop_after:
            raise KeyboardInterrupt
        seen += 1
        return values_of(batch)

    return ScoreLoop(16, 8, 2, saved=saved).values("scores", 2, DOCUMENTS, compute), seen


def test_scoring_continues_where_it_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(_SaveTimer, "EVERY_SECONDS", 0.0)
    expected, batches = read(SavedMeasurements(tmp_path / "whole", {}))
    assert batches == 5
    assert expected[0].tolist() == list(range(97))
    with pytest.raises(KeyboardInterrupt):
        read(SavedMeasurements(tmp_path / "out", {"a": 1}), stop_after=4)
    found, seen = read(SavedMeasurements(tmp_path / "out", {"a": 1}))
    assert seen == 1
    assert torch.equal(found, expected)
    assert read(SavedMeasurements(tmp_path / "out", {"a": 1}))[1] == 0  # a third try has nothing to do
    assert read(SavedMeasurements(tmp_path / "out", {"a": 2}))[1] == 5  # measured otherwise: from the start


def test_scores_of_all_processes_are_put_together(tmp_path):
    saved = SavedMeasurements(tmp_path / "out", {})
    for rank, places in ((0, [0, 2]), (1, [3])):
        saved._rank = rank
        saved.save_scores("s", np.array(places), np.array([places], np.float32), np.arange(4) == rank)
    saved._rank = 0
    values, done = saved.scores("s", 1, 5, 4)
    assert values.tolist() == [[0, 0, 2, 3, 0]]
    assert done.tolist() == [True, True, False, False]


def test_a_measurement_is_made_once(tmp_path):
    calls = []
    for _ in range(2):
        saved = SavedMeasurements(tmp_path / "out", {})
        assert saved.once("sizes", lambda: calls.append(1) or {"bytes": 3}) == {"bytes": 3}
    assert len(calls) == 1
    saved.clear()
    assert not (tmp_path / "out.partial").exists()


def test_a_folder_that_is_not_ours_is_left_alone(tmp_path):
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "mine.txt").write_text("x")
    with pytest.raises(UsageError, match="in the way"):
        SavedMeasurements(tmp_path / "out", {})
    assert (tmp_path / "out.partial" / "mine.txt").exists()
