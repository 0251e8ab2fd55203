"""Conversion with text: statistics, method and refinement in one call, on a tiny model with a real tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from calibrated import calibration_text, convert_calibrated
from headfold import cli
from headfold.checkpoint.record import last_entry
from headfold.checkpoint.source import Checkpoint
from headfold.convert.calibration.statistics import Statistics
from headfold.convert.refinement.fit import RefineSettings
from headfold.convert.run import plan_conversion, run_plan
from headfold.errors import CheckpointError, UnsupportedError, UsageError
from transformers import AutoModelForCausalLM


@pytest.fixture
def plan(tiny_checkpoint):
    def make(method: str = "folded", groups: int = 1, grouping: str = "contiguous"):
        return plan_conversion(tiny_checkpoint, groups=groups, method=method, grouping=grouping)

    return make


def logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(input_ids=ids).logits


def text(text_file: Path, **changes) -> dict:
    return calibration_text(str(text_file), **{"tokens": 2048, "sequence_length": 32, "refine": 0, **changes})


def test_text_brings_the_result_closer_and_refinement_closer_still(plan, tiny_checkpoint, text_file, tmp_path):
    """Distances of logits are measured on text that calibration did not see."""
    run_plan(plan("mean"), tmp_path / "mean")
    convert_calibrated(plan(), tmp_path / "folded", text(text_file))
    convert_calibrated(plan(), tmp_path / "refined", text(text_file, refine=40))
    ids = torch.randint(2, 10, (8, 32), generator=torch.Generator().manual_seed(0))
    wanted = logits(tiny_checkpoint, ids)
    away = {name: float((logits(tmp_path / name, ids) - wanted).norm()) for name in ("mean", "folded", "refined")}
    assert away["refined"] < away["folded"] < away["mean"]


def test_the_record_names_the_calibration_text_and_the_fits(plan, text_file, tmp_path):
    out = convert_calibrated(plan(), tmp_path / "out", text(text_file, refine=3))
    entry = last_entry(out, "convert")
    assert entry is not None
    assert entry["method"] == "folded"
    assert entry["statistics"]["corpus"] == text_file.name
    assert entry["statistics"]["tokens"] == "2048"
    assert entry["refinement"]["settings"]["steps"] == 3
    assert [layer["layer"] for layer in entry["refinement"]["layers"]] == [0, 1]


def test_saved_statistics_serve_another_conversion(plan, text_file, tmp_path, capfd):
    file = tmp_path / "moments.safetensors"
    first = convert_calibrated(plan(), tmp_path / "first", text(text_file, statistics=file))
    bytes_before = file.read_bytes()
    again = convert_calibrated(plan(), tmp_path / "again", calibration_text(None, statistics=file))
    assert "Statistics of 2,048 tokens" in capfd.readouterr().err.replace("\n", "")
    assert file.read_bytes() == bytes_before
    assert (first / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()


def test_statistics_of_another_checkpoint_are_refused(plan, text_file, tmp_path):
    file = tmp_path / "moments.safetensors"
    converted = convert_calibrated(plan(), tmp_path / "out", text(text_file, statistics=file))
    halved = plan_conversion(converted, groups=1, method="folded")
    with pytest.raises(UsageError):
        Statistics.open(file).require_source(halved.source.digest(), len(halved.family.layers))


def test_statistics_of_other_text_are_refused(plan, text_file, tmp_path):
    file = tmp_path / "moments.safetensors"
    convert_calibrated(plan(), tmp_path / "out", text(text_file, statistics=file))
    with pytest.raises(UsageError, match="statistics of other text"):
        convert_calibrated(plan(), tmp_path / "next", text(text_file, tokens=1024, statistics=file))


@pytest.mark.parametrize(
    ("calibration", "error"),
    [
        (calibration_text(None, refine=5), UsageError),
        (calibration_text(None, statistics=Path("nowhere.safetensors")), UsageError),
        (calibration_text("./missing.txt"), UsageError),
        (calibration_text("stdlib", device="nonsense"), UsageError),
    ],
)
def test_missing_text_is_refused_before_anything_is_written(calibration, error, plan, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error):
        convert_calibrated(plan(), tmp_path / "out", calibration)
    assert list(tmp_path.iterdir()) == []


def test_a_refinement_that_fails_publishes_nothing(plan, text_file, tmp_path, monkeypatch):
    def fail(*arguments, **named):
        raise CheckpointError("cannot")

    monkeypatch.setattr("headfold.convert.refinement.start.refine_folder", fail)
    with pytest.raises(CheckpointError):
        convert_calibrated(plan(), tmp_path / "out", text(text_file, refine=3))
    assert list(tmp_path.iterdir()) == []


def _refuse(*arguments, **named):
    raise UnsupportedError("This class is odd.")


@pytest.mark.parametrize(
    ("method", "changes", "steps"), [("folded", {}, 3), ("folded", {"refine": 0}, 0), ("aligned", {}, 0)]
)
def test_folded_is_refined_unless_told_otherwise(method, changes, steps, plan, text_file, tmp_path, monkeypatch):
    monkeypatch.setattr(RefineSettings, "steps", 3)
    out = convert_calibrated(plan(method), tmp_path / "out", text(text_file, **{"refine": None, **changes}))
    entry = last_entry(out, "convert")
    assert entry is not None
    assert (entry["refinement"] or {"settings": {"steps": 0}})["settings"]["steps"] == steps


def test_impossible_refinement_is_skipped_by_default_and_refused_on_request(
    plan, text_file, tmp_path, monkeypatch, capfd
):
    monkeypatch.setattr("headfold.convert.refinement.start.require_refinable", _refuse)
    out = convert_calibrated(plan(), tmp_path / "out", text(text_file, refine=None))
    told = capfd.readouterr().err.replace("\n", " ")
    assert "The result will not be refined: This class is odd." in told
    assert told.index("will not be refined") < told.index("Calibrating on")
    unrefined = convert_calibrated(plan(), tmp_path / "plain", text(text_file))
    assert (out / "model.safetensors").read_bytes() == (unrefined / "model.safetensors").read_bytes()
    with pytest.raises(UnsupportedError, match="odd"):
        convert_calibrated(plan(), tmp_path / "asked", text(text_file, refine=5))
    assert not (tmp_path / "asked").exists()


def test_as_many_groups_as_heads_changes_nothing(plan, tiny_checkpoint, text_file, tmp_path):
    out = convert_calibrated(plan(groups=2), tmp_path / "out", text(text_file, refine=3))
    source, result = Checkpoint.open(tiny_checkpoint), Checkpoint.open(out)
    assert all(torch.equal(source.read(name), result.read(name)) for name in source.tensors)


def test_text_that_nothing_reads_is_refused(plan, text_file, tmp_path):
    with pytest.raises(UsageError, match="--calibration would change nothing"):
        convert_calibrated(plan("mean"), tmp_path / "out", text(text_file, refine=None))
    assert list(tmp_path.iterdir()) == []


def test_rescale_is_an_option_of_aligned(tiny_checkpoint, tmp_path, capfd):
    for method, code in (("aligned", 0), ("folded", 2)):
        arguments = ["convert", str(tiny_checkpoint), "--groups", "1", "--method", method, "--rescale"]
        with pytest.raises(SystemExit) as ended:
            cli.main([*arguments, "-o", str(tmp_path / method)])
        assert (ended.value.code or 0) == code
    assert "--rescale would change nothing: it belongs to --method aligned" in capfd.readouterr().err.replace("\n", " ")
    entry = last_entry(tmp_path / "aligned", "convert")
    assert entry is not None
    assert entry["method"] == "aligned+rescale"
    assert not (tmp_path / "folded").exists()


def test_statistics_inside_the_output_are_refused_before_any_text_is_read(plan, text_file, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(UsageError, match="would lie in"):
        convert_calibrated(plan(), out, text(text_file, statistics=out / "moments.safetensors"))
    assert not out.exists()
