"""Checks before a run begins."""

from __future__ import annotations

import pytest
from headfold.errors import HeadfoldError, UsageError
from headfold.uptrain.run import uptrain_checkpoint


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


def test_a_decoder_has_no_targets_to_write(tiny_checkpoint, settings, pairs_file, tmp_path):
    wanted = settings(data=str(pairs_file), source_column="input", target_column="answer.back")
    with pytest.raises(UsageError, match="has no encoder"):
        uptrain_checkpoint(tiny_checkpoint, tmp_path / "out", wanted)
    with pytest.raises(UsageError, match="no encoder"):
        uptrain_checkpoint(tiny_checkpoint, tmp_path / "out", settings(noise_density=0.3))


def test_plain_text_may_be_mixed_with_a_column_of_other_text(tiny_checkpoint, settings, pairs_file, tmp_path):
    plain = tmp_path / "plain.txt"
    plain.write_text("alpha beta gamma delta " * 40)
    columns = {"source_column": "input", "steps": 1}
    wanted = settings(data=(str(pairs_file), str(plain)), eval_data=str(plain), **columns)
    assert uptrain_checkpoint(tiny_checkpoint, tmp_path / "out", wanted).exists()
    with pytest.raises(UsageError, match="no columns"):
        uptrain_checkpoint(tiny_checkpoint, tmp_path / "idle", settings(data=str(plain), **columns))
