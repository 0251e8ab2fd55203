"""A killed refinement continues after its last finished layer, to the same bits; weights may stay on disk."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from calibrated import calibration_text, convert_calibrated
from headfold.convert.calibration import offload
from headfold.convert.refinement import refine
from headfold.convert.refinement.fit import RefineSettings
from headfold.convert.refinement.on_disk import refine_folder
from headfold.convert.refinement.resume import RefinementFolder
from headfold.convert.run import plan_conversion, run_plan
from headfold.errors import HeadfoldError, UsageError
from tiny import tiny_model

SETTINGS = RefineSettings(steps=4, batch_tokens=32)
TEXT = torch.randint(5, 200, (8, 16), generator=torch.Generator().manual_seed(2))


class Killed(BaseException):
    """The process ends here."""


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    tiny_model("qwen2", num_hidden_layers=3, layer_types=["full_attention"] * 3).to(torch.bfloat16).save_pretrained(
        folder, max_shard_size="100KB"
    )
    return folder


@pytest.fixture
def refined(source: Path, tmp_path: Path):
    """Convert and refine under a name; return the bytes of all weights."""
    plan = plan_conversion(source, groups=2, method="folded")

    def make(name: str, work: Path | None = None, text: torch.Tensor = TEXT, settings: RefineSettings = SETTINGS):
        folder = run_plan(plan, tmp_path / name, overwrite=True)
        refine_folder(source, folder, plan.family.layers, text, settings, work=work)
        return {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}

    return make


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("place", ["fit", "finish"])
def test_a_killed_refinement_continues_to_the_same_bits(layer, place, refined, tmp_path, monkeypatch) -> None:
    expected = refined("whole")
    fitted = []

    def count(*arguments):
        if killing and place == "fit" and len(fitted) == layer:
            raise Killed
        fitted.append(1)
        return fit(*arguments)

    def finish(work, done, *arguments):
        if killing and place == "finish" and done == layer:
            raise Killed
        finished(work, done, *arguments)

    fit, finished, killing = refine.fit_projections, RefinementFolder.finish, True
    monkeypatch.setattr(refine, "fit_projections", count)
    monkeypatch.setattr(RefinementFolder, "finish", finish)
    with pytest.raises(Killed):
        refined("out", tmp_path / "work")
    killing, before = False, len(fitted)
    assert refined("out", tmp_path / "work") == expected
    assert len(fitted) - before == 3 - layer


def test_finished_layers_are_not_fitted_again_and_the_seed_matters(refined, tmp_path, monkeypatch) -> None:
    expected = refined("out", tmp_path / "work")
    assert refined("other", settings=RefineSettings(steps=4, batch_tokens=32, seed=1)) != expected, "the control"
    monkeypatch.setattr(refine, "fit_projections", None)
    assert refined("out", tmp_path / "work") == expected


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"settings": RefineSettings(steps=5, batch_tokens=32)}, "another steps"),
        ({"text": TEXT.flip(0)}, "another calibration text"),
    ],
)
def test_another_refinement_is_not_continued(changes, named, refined, tmp_path) -> None:
    refined("out", tmp_path / "work")
    before = sorted((tmp_path / "work").iterdir())
    with pytest.raises(UsageError, match=named):
        refined("out", tmp_path / "work", **changes)
    assert sorted((tmp_path / "work").iterdir()) == before


def test_a_damaged_refinement_folder_is_refused(refined, tmp_path) -> None:
    refined("out", tmp_path / "work")
    (tmp_path / "work" / "progress.json").write_text("{")
    with pytest.raises(UsageError, match="cannot be read"):
        refined("out", tmp_path / "work")


def test_a_folder_with_other_files_is_left_alone(refined, tmp_path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.txt").write_text("years of it")
    with pytest.raises(UsageError, match="holds something else"):
        refined("out", tmp_path / "work")
    assert (tmp_path / "work" / "thesis.txt").read_text() == "years of it"


def test_states_need_room_on_disk(refined, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("headfold.convert.refinement.resume._STATES_AT_ONCE", 10**15)
    with pytest.raises(HeadfoldError, match="are free there"):
        refined("out", tmp_path / "work")
    assert not (tmp_path / "work").exists()


def test_weights_left_on_disk_give_the_same_bits(refined, monkeypatch) -> None:
    expected = refined("memory")
    loaded = []

    def watch(*arguments, **named):
        loaded.append(offload.load_or_offload(*arguments, **named))
        return loaded[-1]

    monkeypatch.setattr(offload, "_IN_MEMORY_SHARE", 0.0)
    monkeypatch.setattr("headfold.convert.refinement.on_disk.load_or_offload", watch)
    assert refined("disk") == expected
    for model in loaded:
        assert all(parameter.is_meta for parameter in model.parameters())
    assert len(loaded) == 2


def test_a_killed_conversion_continues_and_removes_its_working_folder(tiny_checkpoint, text_file, tmp_path) -> None:
    """After SIGKILL in the second layer, the repeated call gives the output of an undisturbed run."""
    script = f"""
        import os, signal
        from headfold.convert.refinement import refine
        from headfold.convert.run import convert_checkpoint
        from pathlib import Path

        fits = []
        def fit(*arguments):
            fits.append(1)
            if len(fits) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments)
        original, refine.fit_projections = refine.fit_projections, fit
        convert_checkpoint(
            {str(tiny_checkpoint)!r}, Path({str(tmp_path / "out")!r}), groups=1, method="folded",
            calibration={str(text_file)!r}, calibration_tokens=2048, sequence_length=32, refine=3,
        )
    """
    process = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert process.returncode == -signal.SIGKILL, process.stderr
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "out.refinement" / "layer-0000.safetensors").exists()
    plan = plan_conversion(tiny_checkpoint, groups=1, method="folded")
    text = calibration_text(str(text_file), tokens=2048, sequence_length=32, refine=3)
    for name in ("out", "undisturbed"):
        convert_calibrated(plan, tmp_path / name, text)
    results = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "undisturbed")]
    assert results[0] == results[1]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out", "undisturbed"]
