from __future__ import annotations

import json
import shutil

import pytest
from headfold.errors import UsageError
from headfold.recipes.run import _claim, run_recipe
from headfold.recipes.schema import Recipe


@pytest.fixture
def recipe(tiny_checkpoint, text_file):
    return Recipe.model_validate(
        {
            "checkpoint": str(tiny_checkpoint),
            "convert": {"groups": 1},
            "uptrain": {
                "data": str(text_file), "steps": 3, "sequence_length": 16, "batch": 2, "precision": "fp32",
                "device": "cpu",
                "eval_data": str(text_file), "eval_tokens": 200,
            },
            "eval": {"data": str(text_file), "tokens": 300, "window": 16},
        }
    )  # fmt: skip


def test_the_three_steps_run_and_a_second_call_skips_them(recipe, tmp_path, capfd):
    report = run_recipe(recipe, tmp_path / "out")
    assert report.read_text().lstrip().lower().startswith("<!doctype html>")
    results = json.loads(report.with_name("results.json").read_text())
    assert len(results["models"]) == 3
    card = (tmp_path / "out" / "uptrained" / "README.md").read_text()
    assert "### Convert" in card
    assert "### Uptrain" in card
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*") if path.is_file()}
    capfd.readouterr()
    assert run_recipe(recipe, tmp_path / "out") == report
    assert capfd.readouterr().err.count("skipped") == 3
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*") if path.is_file()}


def test_a_missing_step_is_done_again(recipe, tmp_path, capfd):
    report = run_recipe(recipe, tmp_path / "out")
    shutil.rmtree(report.parent)
    capfd.readouterr()
    assert run_recipe(recipe, tmp_path / "out").exists()
    assert capfd.readouterr().err.count("skipped") == 2


def test_a_folder_of_another_recipe_is_refused(recipe, tmp_path):
    run_recipe(recipe, tmp_path / "out")
    other = recipe.model_copy(update={"uptrain": recipe.uptrain.model_copy(update={"seed": 9})})
    with pytest.raises(UsageError, match="belongs to another recipe"):
        run_recipe(other, tmp_path / "out")
    watched = recipe.model_copy(update={"uptrain": recipe.uptrain.model_copy(update={"log_every": 1})})
    assert run_recipe(watched, tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("section", "name"), [("eval", "data"), ("uptrain", "eval_data"), ("uptrain", "data"), ("convert", "calibration")]
)
def test_a_text_that_is_not_there_is_refused_before_anything_is_written(section, name, recipe, tmp_path):
    changed = getattr(recipe, section).model_copy(update={name: str(tmp_path / "typo.jsonl")})
    with pytest.raises(UsageError, match=r"no text file at .*typo\.jsonl"):
        run_recipe(recipe.model_copy(update={section: changed}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_comparison_may_change_until_it_is_made(recipe, tmp_path):
    """A trained model must not be lost to a mistake in what comes after it."""
    report = run_recipe(recipe, tmp_path / "out")
    other = recipe.model_copy(update={"eval": recipe.eval.model_copy(update={"tokens": 200})})
    with pytest.raises(UsageError, match="belongs to another recipe"):
        run_recipe(other, tmp_path / "out")
    shutil.rmtree(report.parent)
    assert run_recipe(other, tmp_path / "out").exists()
    with pytest.raises(UsageError, match="belongs to another recipe"):
        run_recipe(recipe, tmp_path / "out")


def test_a_folder_with_something_else_in_it_is_refused(recipe, tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match="did not make it"):
        run_recipe(recipe, tmp_path)


def test_a_folder_of_the_last_release_is_recognised(recipe, tmp_path):
    """It wrote `block`, `clip` and `keep`."""
    content = recipe.model_dump(mode="json")
    renamed = {"sequence_length": "block", "max_grad_norm": "clip", "save_total_limit": "keep"}
    content["uptrain"] = {renamed.get(name, name): value for name, value in content["uptrain"].items()}
    content["convert"] = {name: content["convert"][name] for name in ("groups", "method", "calibration", "refine")}
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "recipe.json").write_text(json.dumps(content))
    _claim(recipe, tmp_path / "out")
    content["uptrain"]["block"] += 1
    (tmp_path / "out" / "recipe.json").write_text(json.dumps(content))
    with pytest.raises(UsageError, match="another recipe"):
        _claim(recipe, tmp_path / "out")
