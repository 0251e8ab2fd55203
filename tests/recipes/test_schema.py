from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from headfold import recipes
from headfold.errors import UsageError
from headfold.recipes.schema import Recipe, load_recipe

SHIPPED = sorted(Path(recipes.__file__).parent.glob("*.yaml"))
GOOD = {"checkpoint": "somewhere", "convert": {"groups": 2}, "uptrain": {"data": "stdlib", "steps": 3}}


def write(folder: Path, content: object) -> Path:
    file = folder / "recipe.yaml"
    file.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return file


def test_recipes_are_shipped():
    assert "demo" in [file.stem for file in SHIPPED]


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_every_shipped_recipe_is_valid(file):
    assert isinstance(load_recipe(file), Recipe)


def test_a_shipped_recipe_is_found_by_its_name_and_its_checkpoint_beside_it():
    recipe = load_recipe("demo")
    assert Path(recipe.checkpoint).is_dir()
    assert recipe.uptrain.fraction == 0.05


def test_the_demo_uptrains_on_a_share_of_what_the_bundled_model_really_saw():
    from headfold.checkpoint.record import last_entry

    recipe = load_recipe("demo")
    entry = last_entry(Path(recipe.checkpoint), "pretrain")
    assert entry is not None
    assert recipe.uptrain.pretraining_tokens == entry["tokens"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"covnert": {}}, "unknown key covnert; did you mean 'convert'"),
        ({"uptrain": {"learning_rat": 1}}, "unknown key uptrain.learning_rat; did you mean 'learning_rate'"),
        ({"eval": {"xyzzy": 1}}, "unknown key eval.xyzzy; known keys: text_column, target_column"),
        ({"convert": {"groups": -1}}, "convert.groups: Input should be greater than 0"),
        ({"convert": {}}, "convert.groups is missing"),
        # a misspelt key is missing as well, and the spelling is the news
        ({"convert": {"group": 2}}, "unknown key convert.group; did you mean 'groups'"),
        ({"convert": {"groups": 0}, "evla": {}}, "unknown key evla; did you mean 'eval'"),
        ({"uptrain": {"data": "stdlib", "learning_rate": 10**400}}, "uptrain.learning_rate:"),
        ({"uptrain": {"data": "stdlib", "max_grad_norm": float("inf")}}, "uptrain.max_grad_norm:"),
        ({"uptrain": {"data": "stdlib", "steps": "1e400"}}, "uptrain.steps:"),
        ({"uptrain": {"data": "stdlib", "learning_rate": float("nan")}}, "uptrain.learning_rate:"),
    ],
)
def test_a_wrong_key_names_the_nearest_known_one(change, says, tmp_path):
    with pytest.raises(UsageError) as problem:
        load_recipe(write(tmp_path, {**GOOD, **change}))
    assert says in problem.value.message


@pytest.mark.parametrize("content", ["- a\n- b\n", "a: [", "", "\x00", f"convert: {{groups: {'1' * 5000}}}"])
def test_what_is_no_recipe_is_refused(content, tmp_path):
    with pytest.raises(UsageError):
        load_recipe(write(tmp_path, content))


def test_a_checkpoint_beside_the_recipe_is_found_and_another_name_is_kept(tmp_path):
    (tmp_path / "model").mkdir()
    beside = load_recipe(write(tmp_path, {**GOOD, "checkpoint": "model"}))
    assert beside.checkpoint == str(tmp_path / "model")
    assert load_recipe(write(tmp_path, {**GOOD, "checkpoint": "org/model"})).checkpoint == "org/model"
