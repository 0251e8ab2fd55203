"""Every setting is declared once; the command line, recipes and the Python API all read that one declaration."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import headfold
import headfold.cli
import pytest
import yaml
from headfold.convert.settings import ConvertSettings
from headfold.errors import UsageError
from headfold.eval.settings import EvalSettings
from headfold.recipes.schema import Recipe, load_recipe
from headfold.recipes.settings import SweepSettings
from headfold.settings import RARE, Settings
from headfold.uptrain.settings import UptrainSettings

ROOT = Path(headfold.__file__).parent
COMMANDS = {"convert": ConvertSettings, "uptrain": UptrainSettings, "eval": EvalSettings, "sweep": SweepSettings}
SECTIONS = {"convert": ConvertSettings, "uptrain": UptrainSettings, "eval": EvalSettings}


@pytest.fixture(scope="module")
def helps() -> dict[str, str]:
    """The text of ``--help`` on a terminal of 120 columns."""
    environment = {**os.environ, "TERMINAL_WIDTH": "120", "COLUMNS": "120", "NO_COLOR": "1"}
    shown = {}
    for command in (*COMMANDS, "check", "inspect", "report", "run"):
        words = [sys.executable, "-m", "headfold", command, "--help"]
        shown[command] = subprocess.run(words, capture_output=True, text=True, env=environment, check=True).stdout
    return shown


def test_there_are_fields():
    assert all(len(model.model_fields) > 8 for model in COMMANDS.values())


@pytest.mark.parametrize("model", COMMANDS.values())
def test_every_field_is_declared_in_one_class_and_described(model):
    for name, field in model.model_fields.items():
        declared = [one for one in model.__mro__ if name in vars(one).get("__annotations__", {})]
        assert len(declared) == 1, name
        assert field.description, name


def test_no_command_spells_a_field_again():
    """A parameter of a command with the name of a field would be a second declaration."""
    seen = []
    for file in ROOT.glob("*/command.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.FunctionDef):
                continue
            arguments = {one.arg: ast.unparse(one.annotation) for one in node.args.args if one.annotation}
            model = {one.__name__: one for one in COMMANDS.values()}.get(arguments.get("settings", ""))
            if model is not None and node.decorator_list:
                seen.append(node.name)
                assert not model.model_fields.keys() & arguments.keys()
    assert sorted(seen) == ["convert", "evaluate", "sweep", "uptrain"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_field_is_an_option_with_its_description(command, helps):
    words = re.sub(r"[│\s]+", " ", helps[command])
    for name, field in COMMANDS[command].model_fields.items():
        assert f"--{name.replace('_', '-')}" in words, name
        first = str(field.description).split()[:3]
        assert " ".join(first)[1:] in words, name


@pytest.mark.parametrize("command", ["convert", "uptrain", "eval", "sweep", "check", "inspect", "report", "run"])
def test_help_fits_on_two_screens_of_fifty_lines(command, helps):
    assert len(helps[command].splitlines()) <= 100


@pytest.mark.parametrize("command", ["convert", "uptrain", "eval"])
def test_rarely_needed_options_come_last(command, helps):
    panels = re.findall(r"╭─ (.+?) ─", helps[command])
    assert panels[-1] == RARE
    assert "Options" in panels


def test_recipes_and_the_api_use_the_same_models():
    for section, model in SECTIONS.items():
        assert Recipe.model_fields[section].annotation is model
    for model in COMMANDS.values():
        assert getattr(headfold, model.__name__) is model
    for function, model in ((headfold.convert_checkpoint, ConvertSettings), (headfold.compare, EvalSettings)):
        assert model.__name__ in str(inspect.signature(function).parameters["settings"].annotation)


def test_every_field_can_stand_in_a_recipe(tmp_path):
    """Each at its default (or 2), one recipe a field, so that none is refused for another's sake."""
    for section, model in SECTIONS.items():
        for name, field in model.model_fields.items():
            sections = {"convert": {"groups": 2}, "uptrain": {"steps": 1}, "eval": {}}
            value = 2 if field.is_required() else field.get_default()
            sections[section] |= {name: list(value) if isinstance(value, tuple) else value}
            file = tmp_path / "recipe.yaml"
            file.write_text(yaml.safe_dump({"checkpoint": "x", **sections}))
            try:
                recipe = load_recipe(file)
            except UsageError as problem:
                assert "would change nothing" in problem.message  # noqa: PT017, known and refused for a reason
            else:
                assert name in getattr(recipe, section).model_dump()


@pytest.mark.parametrize(
    ("model", "values", "says"),
    [
        (ConvertSettings, {"groups": 2, "calibration_tokens": 9}, "--calibration-tokens would change nothing"),
        (ConvertSettings, {"groups": 2, "sequence_length": 9}, "--sequence-length would change nothing"),
        (ConvertSettings, {"groups": 2, "device": "cuda"}, "--device would change nothing"),
        (ConvertSettings, {"groups": 2, "rescale": True}, "--rescale would change nothing"),
        (
            ConvertSettings,
            {"groups": 2, "method": "mean", "calibration": "stdlib"},
            "--calibration would change nothing: this method",
        ),
        (ConvertSettings, {"groups": 2, "refine": 5}, "Refinement fits to text"),
        (ConvertSettings, {"groups": 2, "method": "median"}, "no method median"),
        (ConvertSettings, {"groups": 2, "max_shard_size": "12x"}, "12x"),
        (EvalSettings, {"shots": 2}, "--shots would change nothing"),
        (EvalSettings, {"needles": 0, "needle_lengths": [5]}, "--needle-lengths would change nothing"),
        (UptrainSettings, {"teacher": None, "temperature": 2}, "--temperature would change nothing"),
    ],
)
def test_a_setting_without_effect_is_refused(model: type[Settings], values, says):
    with pytest.raises(UsageError, match=says):
        model(**values)


@pytest.mark.parametrize(
    "values",
    [
        {"groups": 2, "method": "mean", "calibration": "stdlib", "grouping": "similarity"},
        {"groups": 2, "method": "mean", "calibration": "stdlib", "refine": 3},
        {"groups": 2, "method": "aligned", "rescale": True},
        {"groups": 2, "statistics": "file", "device": "cpu"},
    ],
)
def test_the_same_setting_is_taken_where_it_has_an_effect(values):
    assert ConvertSettings(**values).groups == 2


def test_names_of_the_last_release_still_work():
    assert ConvertSettings(groups=1, calibration="x", block=64).sequence_length == 64
    assert UptrainSettings(block=64, clip=2, keep=3) == UptrainSettings(
        sequence_length=64, max_grad_norm=2, save_total_limit=3
    )
    with pytest.raises(SystemExit) as ended:
        headfold.cli.main(["uptrain", "./nowhere", "--data", "stdlib", "--block", "0", "-o", "out"])
    assert ended.value.code == 2


def test_the_old_name_of_an_option_is_taken_and_said_to_go(capfd):
    with pytest.raises(SystemExit):
        headfold.cli.main(["uptrain", "./nowhere", "--data", "stdlib", "--steps", "1", "--clip", "2", "-o", "out"])
    told = capfd.readouterr().err.replace("\n", " ")
    assert "--clip is called --max-grad-norm now" in told
    assert "nowhere" in told


def test_calibration_of_a_recipe_follows_its_training(tmp_path):
    file = tmp_path / "recipe.yaml"
    text = "checkpoint: x\nconvert: {groups: 1, calibration: stdlib%s}\nuptrain: {steps: 1, sequence_length: 2048}\n"
    file.write_text(text % "")
    assert load_recipe(file).convert.sequence_length == 2048
    file.write_text(text % ", sequence_length: 64")
    assert load_recipe(file).convert.sequence_length == 64
    file.write_text(text.replace("calibration: stdlib%s", "method: mean"))
    assert load_recipe(file).convert.sequence_length == 512


def test_a_dump_is_restored_although_it_names_fields_without_effect():
    settings = UptrainSettings(steps=1, teacher=None)
    assert UptrainSettings.restored(settings.model_dump(mode="json")) == settings
    old = {**settings.model_dump(mode="json"), "block": 64}
    del old["sequence_length"]
    assert UptrainSettings.restored(old).sequence_length == 64


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["convert", "x", "-g", "2", "-o", "y", "--private"], "--private would change nothing"),
        (["convert", "x", "-g", "2", "-o", "y", "--seed", "1"], "--seed would change nothing"),
        (["report", "x", "--overwrite"], "--overwrite would change nothing"),
        (["sweep", "x", "-o", "y", "--groups", "2", "--data", "z", "--methods", "folded"], "read calibration text"),
        (
            ["sweep", "x", "-o", "y", "--groups", "2", "--data", "z", "--methods", "mean", "--refine", "3"],
            "--refine would change nothing",
        ),
        (
            ["sweep", "x", "-o", "y", "--groups", "2", "--data", "z", "--methods", "mean", "--calibration", "t"],
            "--calibration would change nothing",
        ),
        (["eval", "x", "-o", "y", "--data", "z", "--repeats", "0", "--new-tokens", "4"], "--new-tokens would change"),
        (
            ["uptrain", "x", "-o", "y", "--data", "z", "--distillation-weight", "0", "--temperature", "2"],
            "--temperature would change nothing",
        ),
        (
            ["uptrain", "x", "-o", "y", "--data", "z", "--block", "32", "--sequence-length", "64"],
            "--block and --sequence-length are the same option",
        ),
    ],
)
def test_an_option_without_effect_is_refused_on_the_command_line(arguments, says, capfd):
    with pytest.raises(SystemExit) as ended:
        headfold.cli.main(arguments)
    assert ended.value.code == 2
    assert says in capfd.readouterr().err.replace("\n", " ")


def test_calibration_follows_training_also_where_a_recipe_is_made_in_python():
    made = {"checkpoint": "x", "uptrain": UptrainSettings(steps=1, sequence_length=64)}
    assert Recipe(**made, convert=ConvertSettings(groups=1, calibration="t")).convert.sequence_length == 64
    said = ConvertSettings(groups=1, calibration="t", sequence_length=32)
    assert Recipe(**made, convert=said).convert.sequence_length == 32
