"""Options of the command line: from settings and back, and those that would mean nothing."""

from __future__ import annotations

import pytest
from headfold.errors import UsageError
from headfold.options import as_options
from headfold.uptrain.settings import UptrainSettings
from runs import called


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--dry-run", "--device-memory", "nan"], "--device-memory nan"),
        (["--dry-run", "--device-memory", "inf"], "--device-memory inf"),
        (["--dry-run", "--device-memory", "0"], "--device-memory 0"),
        (["--device-memory", "80"], "--device-memory goes with --dry-run"),
        (["--measure"], "--measure goes with --dry-run"),
        (["--teacher", "x", "--no-teacher"], "contradict"),
        (["--no-teacher", "--temperature", "1"], "--temperature would change nothing: there is no teacher"),
        (
            ["--no-teacher", "--divergence", "reverse", "--distillation-weight", "0.5"],
            "-weight and --divergence would",
        ),
        (["--no-teacher", "--hidden-weight", "1"], "--hidden-weight would change nothing"),
        (["--eval-every", "5"], "--eval-every would change nothing: no held-out text"),
        (["--eval-tokens", "500"], "--eval-tokens would change nothing"),
        (["--tokens", "5", "--pretraining-tokens", "1e6"], "--pretraining-tokens would change nothing"),
        (["--schedule", "constant", "--final-learning-rate", "0"], "--final-learning-rate would change nothing"),
        (["--target-column", "y", "--mean-span", "4"], "--mean-span would change nothing"),
    ],
)
def test_options_without_effect_are_refused(options, says):
    from headfold.uptrain.command import uptrain as uptrain_command

    with pytest.raises(UsageError, match=says):
        called(uptrain_command, "checkpoint", "-o", "out", "--data", "x", *options)


@pytest.mark.parametrize(
    "options",
    [
        ["--teacher", "x", "--temperature", "2", "--hidden-weight", "1"],
        ["--eval-data", "y", "--eval-every", "5", "--eval-tokens", "500"],
        ["--fraction", "0.05", "--pretraining-tokens", "1e6"],
        ["--schedule", "linear", "--final-learning-rate", "0"],
    ],
)
def test_the_same_options_are_accepted_if_they_have_an_effect(options, monkeypatch):
    from headfold.uptrain import command

    looked = []
    monkeypatch.setattr(command, "_show_cost", lambda *given: looked.append(given))
    budget = [] if "--fraction" in options else ["--steps", "1"]
    called(command.uptrain, "checkpoint", "-o", "out", "--data", "x", "--dry-run", *budget, *options)
    assert len(looked) == 1


def test_settings_without_effect_are_refused_in_recipes(tmp_path):
    from headfold.recipes.schema import load_recipe

    file = tmp_path / "recipe.yaml"
    text = "checkpoint: x\nconvert: {groups: 1}\nuptrain: {steps: 1, eval_every: 5}\n"
    file.write_text(text)
    with pytest.raises(UsageError, match="--eval-every would change nothing"):
        load_recipe(file)
    file.write_text(text.replace("}\n", ", eval_data: y}\n").replace("{groups: 1, eval_data: y}", "{groups: 1}"))
    assert load_recipe(file).uptrain.eval_every == 5


def test_settings_become_options_and_options_settings():
    """Every field off its default, through the command line and back."""
    common = {
        "data": ("a.jsonl=3", "b.jsonl"), "tokens": 10**12, "sequence_length": 7, "batch": 3, "micro_batch": 1,
        "isolate_documents": True, "train": "kv", "learning_rate": 1e-5, "final_learning_rate": 0, "warmup": 0.5,
        "schedule": "linear", "weight_decay": 0, "max_grad_norm": 2, "spike": 0, "precision": "bf16",
        "device": "cpu", "gradient_checkpointing": True, "compile": True, "liger": True, "seed": 5, "log_every": 1,
        "save_every": 1, "save_total_limit": 1, "eval_data": "x", "eval_every": 1, "eval_tokens": 1,
        "tracker": ("none",),
        "dropout": 0.2,
    }  # fmt: skip
    # no command line can have them all: some mean nothing beside others
    with_teacher = UptrainSettings(
        **common, teacher="y", distillation_weight=0.5, temperature=2, divergence="reverse", hidden_weight=1,
        noise_density=0.3, mean_span=2, beta1=0.8, beta2=0.9,
    )  # fmt: skip
    columns = {"source_column": "a.b", "target_column": "c"}
    alone = UptrainSettings(**common, **columns, teacher=None, optimizer="adafactor")
    for name, field in UptrainSettings.model_fields.items():
        at_default = {"fraction", "pretraining_tokens", "steps"}  # one budget is all that there can be
        differing = [one for one in (with_teacher, alone) if getattr(one, name) != field.default]
        assert differing or name in at_default, name
    for settings in (with_teacher, alone):
        assert parsed(as_options(settings, always=("data",))) == settings
    assert (
        parsed(as_options(UptrainSettings(fraction=0.05, pretraining_tokens=7, teacher="x"), always=("data",))).teacher
        == "x"
    )


def parsed(options: list[str]) -> UptrainSettings:
    """Parse options as the command does."""
    import typer
    from headfold.uptrain import command

    seen = []
    app = typer.Typer()
    app.command()(command.uptrain)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "_show_cost", lambda checkpoint, settings, *rest: seen.append(settings))
        app(["checkpoint", "-o", "out", "--dry-run", *options], standalone_mode=False)
    return seen[0]
