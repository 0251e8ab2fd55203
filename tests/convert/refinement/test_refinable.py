"""Impossible refinements are refused before calibration begins, and out of memory is reported in a sentence."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from calibrated import calibration_text, convert_calibrated
from headfold import cli
from headfold.checkpoint.record import last_entry
from headfold.convert import run
from headfold.convert.calibration import calibrate, source_model
from headfold.convert.calibration.out_of_memory import reporting_out_of_memory
from headfold.convert.plan import Plan
from headfold.convert.run import plan_conversion
from headfold.errors import DataError, HeadfoldError, UnsupportedError, UsageError
from tiny import tiny_model


@pytest.fixture
def plan(tiny_checkpoint: Path) -> Callable[..., Plan]:
    def make(method: str = "folded", model_type: str = "", folder: Path | None = None) -> Plan:
        source = tiny_checkpoint
        if model_type and folder:
            tiny_model(model_type, 4, 4).save_pretrained(folder)
            for file in tiny_checkpoint.glob("tokenizer*"):
                shutil.copy(file, folder)
            source = folder
        return plan_conversion(source, groups=1, method=method)

    return make


@pytest.fixture
def text(text_file: Path) -> Callable[..., dict]:
    return lambda **changes: calibration_text(
        str(text_file), **{"tokens": 2048, "sequence_length": 32, "refine": 3, **changes}
    )


@pytest.fixture
def nothing_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test as soon as calibration or conversion begins."""

    def begin(*arguments: object, **named: object) -> None:
        raise AssertionError("calibration or conversion began")

    monkeypatch.setattr(calibrate, "collect_statistics", begin)
    monkeypatch.setattr(run, "_execute", begin)


@pytest.mark.parametrize(
    ("model_type", "method", "reason"),
    [("sarvam_moe", "folded", "in another form than its model class"), ("gemma3n_text", "mean", "in the plain way")],
)
def test_types_that_cannot_be_refined_are_refused_before_calibration(
    model_type, method, reason, plan, text, tmp_path, nothing_computed
) -> None:
    wanted = plan(method, model_type, tmp_path / "source")
    with pytest.raises(UnsupportedError, match=reason):
        convert_calibrated(wanted, tmp_path / "out", text())
    assert [file.name for file in tmp_path.iterdir()] == ["source"]


def test_control_what_can_be_refined_gets_as_far_as_calibration(plan, text, tmp_path, nothing_computed) -> None:
    with pytest.raises(AssertionError, match="began"):
        convert_calibrated(plan(), tmp_path / "out", text())


def test_too_little_text_is_refused_before_the_model_is_loaded(
    plan, text, tmp_path, nothing_computed, monkeypatch
) -> None:
    monkeypatch.setattr(source_model, "load_or_offload", None)
    with pytest.raises(DataError, match="fewer than two steps"):
        convert_calibrated(plan(), tmp_path / "out", text(tokens=96))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("method", "changes", "named"),
    [
        ("aligned", {}, "another method"),
        ("folded", {"refine": 4}, "another steps"),
        ("folded", {"tokens": 1024}, "another calibration text"),
    ],
)
def test_the_unfinished_refinement_of_another_conversion_is_left_alone(
    method, changes, named, plan, text, tmp_path, monkeypatch, request
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(run, "remove_refinement_folder", lambda folder: None)
        convert_calibrated(plan(), tmp_path / "out", text())
    before = {file: file.read_bytes() for file in (tmp_path / "out.refinement").iterdir()}
    request.getfixturevalue("nothing_computed")
    with pytest.raises(UsageError, match=named):
        convert_calibrated(plan(method), tmp_path / "out", text(**changes), overwrite=True)
    assert {file: file.read_bytes() for file in (tmp_path / "out.refinement").iterdir()} == before
    with pytest.raises(AssertionError, match="began"):  # the same one would be continued
        convert_calibrated(plan(), tmp_path / "out", text(), overwrite=True)


def test_a_taken_folder_and_a_full_disk_are_refused_before_calibration(
    plan, text, tmp_path, nothing_computed, monkeypatch
) -> None:
    (tmp_path / "one.refinement").mkdir()
    (tmp_path / "one.refinement" / "thesis.txt").write_text("years of it")
    (tmp_path / "other.refinement").write_text("a file")
    for name in ("one", "other"):
        with pytest.raises(UsageError, match="holds something else"):
            convert_calibrated(plan(), tmp_path / name, text())
    assert (tmp_path / "one.refinement" / "thesis.txt").read_text() == "years of it"
    monkeypatch.setattr("headfold.convert.refinement.resume._STATES_AT_ONCE", 10**15)
    with pytest.raises(HeadfoldError, match="are free there"):
        convert_calibrated(plan(), tmp_path / "full", text())


def _no_memory(*arguments: object, **named: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.mark.parametrize(
    ("place", "told"),
    [
        (
            "calibration.calibrate.collect_statistics",
            r"Calibration ran out of memory on cpu: the source's weights take \d",
        ),
        (
            "refinement.refine.fit_projections",
            r"Refinement ran out of memory on cpu: a layer takes 7\d\.\d+ KiB in float32",
        ),
    ],
)
def test_out_of_memory_is_reported_in_a_sentence(place, told, plan, text, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(f"headfold.convert.{place}", _no_memory)
    with pytest.raises(HeadfoldError, match=told) as problem:
        convert_calibrated(plan(), tmp_path / "out", text())
    assert problem.value.exit_code == 1
    assert "--sequence-length" in (problem.value.hint or "")
    assert not (tmp_path / "out").exists()


def test_the_hint_depends_on_the_device() -> None:
    with (
        pytest.raises(HeadfoldError, match="on cuda: much") as problem,
        reporting_out_of_memory("cuda", "Calibration", lambda: "much"),
    ):
        _no_memory()
    assert "--device cpu" in (problem.value.hint or "")
    with (
        pytest.raises(HeadfoldError, match="on cpu: much") as problem,
        reporting_out_of_memory("cpu", "Calibration", lambda: "much"),
    ):
        torch.empty(2**60)
    assert "--device" not in (problem.value.hint or "")
    with pytest.raises(RuntimeError, match="must match"), reporting_out_of_memory("cpu", "Calibration", lambda: "much"):
        _ = torch.ones(2) + torch.ones(3)


def test_the_record_has_the_sequence_length(tiny_checkpoint, text_file, tmp_path) -> None:
    options = [
        "--calibration",
        str(text_file),
        "--calibration-tokens",
        "512",
        "--sequence-length",
        "16",
        "--refine",
        "0",
    ]
    with pytest.raises(SystemExit) as ended:
        cli.main(["convert", str(tiny_checkpoint), "-g", "1", *options, "-o", str(tmp_path / "out")])
    assert not ended.value.code
    entry = last_entry(tmp_path / "out", "convert")
    assert entry is not None
    assert (entry["statistics"]["sequence_length"], entry["statistics"]["tokens"]) == ("16", "512")
