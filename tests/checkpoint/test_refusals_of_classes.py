"""What config, tokenizer, generation and model classes raise is one sentence that holds the reason."""

from __future__ import annotations

import ast
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import headfold
import pytest
from headfold.checkpoint.load import blank_language_model, load_config, load_language_model, load_tokenizer
from headfold.cli import main
from headfold.errors import CheckpointError, reason

ROOT = Path(headfold.__file__).parent


@pytest.fixture
def folder(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "m"))


def edit(file: Path, **values: Any) -> None:
    content = json.loads(file.read_text())
    for name, value in values.items():
        content.pop(name, None)
        if value is not ...:
            content[name] = value
    file.write_text(json.dumps(content))


def _newer_tokenizer(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["type"] = "ModelOfNextYear"
    (folder / "tokenizer.json").write_text(json.dumps(content))


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "padding beyond the vocabulary": ({"pad_token_id": 10}, r"[Pp]adding_idx|pad_token_id"),
    "a word for a number": ({"num_hidden_layers": "two"}, r"num_hidden_layers.*(expected|int)"),
    "a list for a number": ({"hidden_size": [32]}, r"hidden_size.*(expected|int)"),
    "a number for a word": ({"hidden_act": 7}, r"hidden_act|7"),
    "an unknown activation": ({"hidden_act": "sine"}, "sine"),
    "an unknown rotary type": ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, "spiral"),
}
TOKENIZERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "of a newer library": (_newer_tokenizer, "did not match|ModelOfNextYear|variant"),
    "cut short": (lambda folder: (folder / "tokenizer.json").write_text('{"version": '), "EOF|JSON|Expecting|parsing"),
    "a list": (lambda folder: (folder / "tokenizer.json").write_text("[]"), "."),
    "config is a list": (lambda folder: (folder / "tokenizer_config.json").write_text("[]"), "."),
    "of an unknown class": (
        lambda folder: [
            edit(folder / "tokenizer_config.json", tokenizer_class="MyTokenizer"),
            (folder / "tokenizer.json").unlink(),
        ],
        r"backend tokenizer from one of: .*\(3\)",
    ),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_that_its_class_refuses_is_one_sentence_with_the_reason(case, folder):
    values, says = CONFIGS[case]
    edit(folder / "config.json", **values)
    with pytest.raises(CheckpointError, match=says) as problem:
        load_language_model(folder)
    assert "\n" not in problem.value.message
    with pytest.raises(CheckpointError, match=says):
        blank_language_model(folder)


@pytest.mark.parametrize("number", ["1e400", "1" + "0" * 400, "NaN", "-Infinity"])
def test_absurd_numbers_in_a_config_end_in_a_sentence(number, folder):
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"hidden_size": 32', f'"hidden_size": {number}'))
    with pytest.raises(CheckpointError):
        load_language_model(folder)


def test_padding_of_minus_one_loads(folder):
    """Row B016: the first Llama checkpoints have pad_token_id -1."""
    edit(folder / "config.json", pad_token_id=-1)
    assert load_language_model(folder).config.pad_token_id == -1


@pytest.mark.parametrize("case", TOKENIZERS)
def test_a_tokenizer_that_its_class_refuses_is_one_sentence_with_the_reason(case, folder):
    """Row B053: the library in Rust raises a bare Exception."""
    damage, says = TOKENIZERS[case]
    damage(folder)
    with pytest.raises(CheckpointError, match=f"no tokenizer that can be loaded: .*({says})") as problem:
        load_tokenizer(folder)
    assert "\n" not in problem.value.message


@pytest.mark.parametrize("content", ["[]", '"text"', "7"])
def test_generation_settings_that_are_no_object_are_refused_in_a_sentence(content, folder):
    """Row B061: a list was a traceback of eval and uptrain."""
    (folder / "generation_config.json").write_text(content)
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load_language_model(folder)


@pytest.mark.parametrize("content", ["{not json", '{"of_next_year": 1, "max_length": 20}', "\ufeff{}"])
def test_generation_settings_that_can_be_passed_over_are(content, folder):
    (folder / "generation_config.json").write_text(content, encoding="utf-8")
    assert load_language_model(folder) is not None


@pytest.mark.parametrize(
    "command",
    [
        ["convert", "SOURCE", "-g", "1", "-o", "OUT"],
        ["uptrain", "SOURCE", "--data", "TEXT", "--steps", "1", "-o", "OUT"],
        ["uptrain", "SOURCE", "--data", "TEXT", "--steps", "1", "-o", "OUT", "--dry-run"],
        ["eval", "SOURCE", "--data", "TEXT", "-o", "OUT"],
        ["inspect", "SOURCE"],
        ["check", "SOURCE"],
    ],
    ids=lambda command: " ".join(command[:1] + command[-1:]),
)
def test_every_command_says_the_reason_and_shows_no_traceback(command, folder, text_file, tmp_path, capfd):
    edit(folder / "config.json", pad_token_id=260)
    places = {"SOURCE": str(folder), "TEXT": str(text_file), "OUT": str(tmp_path / "out")}
    with pytest.raises(SystemExit) as ended:
        main([places.get(word, word) for word in command])
    assert ended.value.code == 1
    shown = capfd.readouterr().err.replace("\n", " ")
    assert "adding_idx must be within num_embeddings" in shown
    assert "Traceback" not in shown
    assert not (tmp_path / "out").exists()


def test_the_reason_is_not_cut_off_before_it_is_said():
    assert reason(ValueError("Validation error for field 'a':\n  TypeError: expected int")) == (
        "Validation error for field 'a': TypeError: expected int"
    )
    assert reason(ValueError("1 validation error for X\nhidden\n  Input should be a number")).endswith("be a number")
    assert reason(KeyError("rope")) == "KeyError 'rope'"
    assert reason(AssertionError()) == "AssertionError"
    assert reason(RuntimeError("one\ntwo")) == "one"
    assert len(reason(RuntimeError("long " * 500))) < 310


# Each of these turns what the classes raise into a sentence.
BOUNDARIES = {"checkpoint/load.py", "convert/family/verify.py", "convert/family/model_type.py"}


def test_classes_are_loaded_at_the_boundaries_alone():
    found = set()
    for package in ("checkpoint", "corpus", "convert", "uptrain", "eval", "recipes", "libraries"):
        for file in (ROOT / package).rglob("*.py"):
            calls = (node.func for node in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(node, ast.Call))
            names = {call.attr for call in calls if isinstance(call, ast.Attribute)}
            # shipped files run in transformers, beside the weights
            if names & {"from_pretrained", "from_config"} and not file.name.startswith("modeling_"):
                found.add(file.relative_to(ROOT).as_posix())
    assert found == BOUNDARIES


def test_loading_config_says_what_is_missing(folder):
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load_config(folder)
