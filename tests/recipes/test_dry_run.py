"""`headfold run RECIPE --dry-run` and `headfold uptrain … --dry-run`, with no weights at hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from headfold import recipes
from headfold.cli import main
from headfold.recipes.schema import load_recipe

SHIPPED = sorted(file.stem for file in Path(recipes.__file__).parent.glob("*.yaml"))
# what config.json of Llama-2-7B says
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000,
    "max_position_embeddings": 4096, "tie_word_embeddings": False, "torch_dtype": "float16",
}  # fmt: skip


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return int(ended.value.code or 0)


def test_real_models_are_shipped():
    assert {"llama-2-7b", "olmo-1b", "smollm2-1.7b", "pythia-1.4b", "t5-v1.1-large", "t5-v1.1-xxl"} <= set(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_recipe_can_be_looked_at_without_weights(name, capsys):
    assert run("run", name, "--dry-run") == 0
    shown = capsys.readouterr().out
    recipe = load_recipe(name)
    assert f"checkpoint: {recipe.checkpoint}" in shown
    budget = recipe.uptrain.tokens or recipe.uptrain.fraction * recipe.uptrain.pretraining_tokens
    per_step = recipe.uptrain.batch * recipe.uptrain.sequence_length
    assert f"{-(-round(budget) // per_step) * per_step:,}" in shown


@pytest.mark.parametrize("name", ["llama-2-7b", "olmo-1b", "pythia-1.4b", "t5-v1.1-large", "t5-v1.1-xxl"])
def test_pretraining_tokens_of_recipes_are_those_of_the_table(name):
    from headfold.uptrain.estimate.pretraining import known_pretraining

    recipe = load_recipe(name)
    assert known_pretraining(recipe.checkpoint).tokens == recipe.uptrain.pretraining_tokens


@pytest.mark.parametrize(("layout", "code"), [("fsdp2-8", 0), ("ddp-8", 1)])
def test_eight_gpus_hold_llama_2_only_where_they_share_its_weights(layout, code, tmp_path, capfd):
    folder = tmp_path / "Llama-2-7b-hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    arguments = [
        "--fraction",
        "0.05",
        "--sequence-length",
        "4096",
        "--batch",
        "1024",
        "--micro-batch",
        "1",
        "--precision",
        "bf16",
    ]
    arguments += ["--data", "stdlib", "-o", str(tmp_path / "out"), "--gradient-checkpointing", "--teacher", str(folder)]
    asked = ["--dry-run", "--launch", layout, "--device-memory", "80"]
    assert run("uptrain", str(folder), *arguments, *asked) == code
    shown = capfd.readouterr()
    told = (shown.out + shown.err).replace("\n", " ")
    assert "Pretraining tokens: 2,000,000,000,000 (Touvron et al. 2023" in told
    if code == 0:
        assert "6,738,415,616" in told
        assert "5.29e+21" in told  # 8 · (6.738e9 − 0.131e9) · 1.000e11
    else:
        assert "GiB on each device, and a device has 74.5 GiB" in told
    assert not (tmp_path / "out").exists()
