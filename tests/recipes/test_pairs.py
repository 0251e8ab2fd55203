"""A recipe for a T5: converted to fewer KV heads, uptrained by span corruption with the source as teacher, compared."""

from __future__ import annotations

import json

import pytest
from headfold import recipes
from headfold.recipes.run import run_recipe
from headfold.recipes.schema import Recipe
from headfold.recipes.settings import SweepSettings
from headfold.recipes.sweep import sweep


@pytest.fixture(scope="module")
def run(tiny_t5, text_file, tmp_path_factory):
    """The three steps on a tiny T5, two groups for its four heads."""
    recipe = Recipe.model_validate(
        {
            "checkpoint": str(tiny_t5),
            "convert": {"groups": 2, "method": "mean"},
            "uptrain": {
                "data": str(text_file), "steps": 6, "sequence_length": 32, "batch": 4, "micro_batch": 4,
                "teacher": "source",
                "learning_rate": 0.01, "precision": "fp32", "device": "cpu", "tracker": ["none"],
                "eval_data": str(text_file), "eval_tokens": 200, "distillation_weight": 0.5, "hidden_weight": 0.1,
            },
            "eval": {"data": str(text_file), "tokens": 300, "window": 32, "device": "cpu", "contexts": [8],
                     "decode_batches": [1], "new_tokens": 2, "repeats": 1},
        }
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("run")
    run_recipe(recipe, folder)
    return folder


def test_the_recipe_ends_with_a_comparison_of_all_three(run):
    results = json.loads((run / "report" / "results.json").read_text())
    source, converted, uptrained = results["models"]
    assert [model["kv_heads"] for model in results["models"]] == [[4], [2], [2]]
    assert [model["role"] for model in results["models"]] == ["source", "converted", "uptrained"]
    assert [model["model_type"] for model in results["models"]] == ["t5", "headfold_t5", "headfold_t5"]
    for model in (converted, uptrained):
        assert (model["against_source"]["cache_ratio"], model["against_source"]["cross_cache_ratio"]) == (2, 2)
        assert model["cache_formula_bytes"] == model["cache_bytes_per_token"] == source["cache_bytes_per_token"] / 2
    assert uptrained["perplexity"]["value"] < converted["perplexity"]["value"]


def test_the_uptrained_one_has_its_code_and_its_settings(run):
    uptrained = run / "uptrained"
    code = (run / "converted" / "modeling_headfold_encoder_decoder.py").read_bytes()
    assert (uptrained / "modeling_headfold_encoder_decoder.py").read_bytes() == code
    assert (uptrained / "config.json").read_bytes() == (run / "converted" / "config.json").read_bytes()
    entry = json.loads((uptrained / "headfold.json").read_text())["history"][-1]
    assert entry["settings"]["noise_density"] == 0.15
    lines = [json.loads(line) for line in (uptrained / "headfold_metrics.jsonl").read_text().splitlines()]
    assert {line["kind"] for line in lines} == {"train", "eval", "source"}


def test_a_sweep_measures_targets(tiny_t5, text_file, tmp_path):

    settings = SweepSettings(groups=(2,), methods=("mean",), data=str(text_file), tokens=200, window=32)
    page = sweep(str(tiny_t5), tmp_path / "sweep", settings).read_text()
    assert "per target token" in page
    rows = json.loads((tmp_path / "sweep" / "sweep.json").read_text())["rows"]
    assert [(row["method"], row["groups"]) for row in rows] == [("source", 4), ("mean", 2)]
    assert rows[0]["perplexity"] != rows[1]["perplexity"]


def test_shipped_recipes_of_t5_have_the_papers_setup():
    from headfold.recipes.schema import load_recipe

    assert recipes.__file__
    large, xxl = load_recipe("t5-v1.1-large"), load_recipe("t5-v1.1-xxl")
    for recipe in (large, xxl):
        wanted = recipe.uptrain
        assert (wanted.fraction, wanted.sequence_length, wanted.batch, wanted.teacher) == (0.05, 512, 2048, None)
        assert (wanted.noise_density, wanted.mean_span, wanted.dropout) == (0.15, 3.0, 0.0)
    assert (large.uptrain.optimizer, large.uptrain.learning_rate, large.uptrain.schedule) == (
        "adafactor", 1e-3, "constant"
    )  # fmt: skip
    assert xxl.convert.groups == 8
