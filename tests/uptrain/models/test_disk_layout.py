"""A trained checkpoint has the tensors of its source, and a run that could not give it is refused before it trains."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from headfold.checkpoint.load import load_language_model
from headfold.checkpoint.source import Checkpoint
from headfold.cli import main
from headfold.errors import UnsupportedError
from headfold.uptrain.estimate.model_size import model_without_weights
from headfold.uptrain.models.disk_layout import disk_names, layout_of, refuse_unpublishable
from headfold.uptrain.run import uptrain_checkpoint
from safetensors.torch import load_file, save_file
from tiny import tiny_model

FAMILIES = [
    *("llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3", "phi", "olmo2", "stablelm", "starcoder2", "cohere"),
    *("gpt2", "gpt_neox", "gpt_bigcode", "falcon", "mixtral", "qwen3_moe", "gpt_oss", "granitemoe", "dbrx", "jetmoe"),
    *("glm4_moe", "qwen3_next", "ernie4_5_moe", "gemma3", "mamba", "jamba", "bloom", "opt", "mpt", "t5", "bart"),
]


def _rewrite(folder: Path, change: dict[str, str]) -> None:
    """Rename tensors in the file: a prefix to take away, or to put in front."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    renamed = {}
    for name, tensor in tensors.items():
        new = name.removeprefix(change.get("without", "\0"))
        renamed[change.get("with", "") + new] = tensor
    save_file(renamed, file, metadata={"format": "pt"})


def _with_tokenizer(folder: Path, tiny_checkpoint: Path) -> None:
    for file in tiny_checkpoint.glob("*token*"):
        shutil.copy(file, folder)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_tensors_to_be_saved_are_known_to_be_those_of_the_source(model_type, tmp_path):
    tiny_model(model_type).to(torch.bfloat16).save_pretrained(tmp_path)
    source = Checkpoint.open(tmp_path)
    refuse_unpublishable(load_language_model(tmp_path, dtype=torch.float32), source)
    # as the dry run has it
    refuse_unpublishable(model_without_weights(tmp_path)[0], source)


@pytest.mark.parametrize(
    ("model_type", "change"),
    [
        # official Qwen3-Embedding files, GPT-2 on the hub, and a prefix of somebody else's wrapper
        ("llama", {"without": "model."}),
        ("qwen3", {"without": "model."}),
        ("gpt2", {"without": "transformer."}),
    ],
)
def test_names_without_the_prefix_of_the_class_are_published_as_they_were(
    model_type, change, tiny_checkpoint, settings, tmp_path
):
    """Row B002: convert and dry run passed, and the run could never publish what it had trained."""
    source = tmp_path / "source"
    tiny_model(model_type, 4, 4, vocab_size=16, tie_word_embeddings=True).save_pretrained(source)
    _with_tokenizer(source, tiny_checkpoint)
    _rewrite(source, change)
    before = layout_of(Checkpoint.open(source))
    assert not any(name.startswith(change["without"]) for name in before)
    out = uptrain_checkpoint(source, tmp_path / "out", settings(steps=1, sequence_length=16, teacher=None))
    assert layout_of(Checkpoint.open(out)) == before
    trained = load_file(out / "model.safetensors")
    assert any(
        not torch.equal(tensor, trained[name]) for name, tensor in load_file(source / "model.safetensors").items()
    )
    load_language_model(out)


def test_a_converted_checkpoint_without_the_prefix_trains_and_publishes_in_shards(
    tiny_checkpoint, settings, tmp_path, monkeypatch
):
    from headfold.convert.run import convert_checkpoint
    from transformers import PreTrainedModel

    tiny_model("llama", 4, 4, vocab_size=16, tie_word_embeddings=True).save_pretrained(tmp_path / "m")
    _with_tokenizer(tmp_path / "m", tiny_checkpoint)
    _rewrite(tmp_path / "m", {"without": "model."})
    converted = convert_checkpoint(tmp_path / "m", tmp_path / "c", groups=2)
    save = PreTrainedModel.save_pretrained
    monkeypatch.setattr(
        PreTrainedModel,
        "save_pretrained",
        lambda self, folder, **named: save(self, folder, max_shard_size="20KB", **named),
    )
    out = uptrain_checkpoint(converted, tmp_path / "u", settings(steps=1, sequence_length=16, teacher=None))
    assert len(list(out.glob("*.safetensors"))) > 1
    assert layout_of(Checkpoint.open(out)) == layout_of(Checkpoint.open(converted))


@pytest.mark.parametrize("model_type", ["llama", "mixtral", "qwen3_moe"])
def test_each_tensor_of_a_mixed_source_keeps_its_dtype(model_type, tiny_checkpoint, settings, tmp_path):
    source = tmp_path / "source"
    tiny_model(model_type, 4, 4, vocab_size=16).to(torch.bfloat16).save_pretrained(source)
    _with_tokenizer(source, tiny_checkpoint)
    tensors = load_file(source / "model.safetensors")
    wide = [name for name in tensors if "norm" in name or "layers.1" in name or "lm_head" in name]
    save_file(
        {name: tensor.float() if name in wide else tensor for name, tensor in tensors.items()},
        source / "model.safetensors",
        metadata={"format": "pt"},
    )
    out = uptrain_checkpoint(source, tmp_path / "out", settings(steps=1, sequence_length=16, teacher=None))
    assert layout_of(Checkpoint.open(out)) == layout_of(Checkpoint.open(source))


def test_a_source_that_could_not_be_published_is_refused_before_a_step_and_by_the_dry_run(
    tiny_checkpoint, text_file, settings, tmp_path, capfd, monkeypatch
):
    source = Checkpoint.open(tiny_checkpoint)
    model = load_language_model(tiny_checkpoint, dtype=torch.float32)
    name = "model.norm.weight"
    info = source.tensors[name]
    for tensors in (
        {**source.tensors, name: replace(info, shape=(16, 2))},
        {one: two for one, two in source.tensors.items() if one != name},
    ):
        with pytest.raises(UnsupportedError, match=r"1 tensors unlike .*model\.norm\.weight"):
            refuse_unpublishable(model, replace(source, tensors=tensors))
    monkeypatch.setattr(
        "headfold.uptrain.models.disk_layout.saved_tensors", lambda *_, **__: {"stray": torch.zeros(2, device="meta")}
    )
    monkeypatch.setattr("headfold.uptrain.training.step.Stepper.step", None, raising=False)
    with pytest.raises(UnsupportedError, match="stray"):
        uptrain_checkpoint(tiny_checkpoint, tmp_path / "out", settings(steps=1))
    assert not (tmp_path / "out").exists()
    with pytest.raises(SystemExit) as ended:
        main(["uptrain", str(tiny_checkpoint), "--data", str(text_file), "--steps", "1", "-o", str(tmp_path / "out"),
              "--sequence-length", "32", "--dry-run"])  # fmt: skip
    assert ended.value.code == 1
    assert "stray" in capfd.readouterr().err


def test_a_name_is_matched_by_itself_first():
    source = {"model.a": 1, "a": 2, "b": 3, "model.c": 4}
    assert disk_names(["model.a", "model.b", "c", "d"], source, "model") == {
        "model.a": "model.a",
        "model.b": "b",
        "c": "model.c",
        "d": "d",
    }
