from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from headfold.checkpoint.source import Checkpoint
from headfold.corpus import open_corpus
from headfold.errors import UsageError
from headfold.uptrain.models.teacher import converted_from, resolve_teacher
from headfold.uptrain.run import uptrain_checkpoint


@pytest.fixture
def converted(tiny_checkpoint, tmp_path) -> Path:
    """The tiny checkpoint with a record that says it was converted from a copy of itself."""
    source, folder = tmp_path / "source", tmp_path / "converted"
    shutil.copytree(tiny_checkpoint, source)
    shutil.copytree(tiny_checkpoint, folder)
    entry = {
        "step": "convert", "source": "org/name", "source_folder": str(source),
        "source_digest": Checkpoint.open(source).digest(),
    }  # fmt: skip
    (folder / "headfold.json").write_text(json.dumps({"schema": 1, "history": [entry]}))
    return folder


def test_the_source_of_the_conversion_is_the_teacher_unless_told_otherwise(converted, settings, capfd):
    checkpoint = Checkpoint.open(converted)
    source = str(converted.with_name("source"))
    for teacher in ("auto", "source"):
        assert resolve_teacher(settings(teacher=teacher), checkpoint).teacher == source
    assert f"Teacher: {source}" in capfd.readouterr().err.replace("\n", "")
    assert resolve_teacher(settings(teacher=None), checkpoint).teacher is None
    assert resolve_teacher(settings(teacher="other"), checkpoint).teacher == "other"


@pytest.mark.parametrize("change", ["gone", "other weights"])
def test_a_missing_or_changed_source_is_not_the_teacher(change, converted, settings, capfd):
    source = converted.with_name("source")
    if change == "gone":
        shutil.rmtree(source)
    else:
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    assert converted_from(Checkpoint.open(converted)) is None
    assert resolve_teacher(settings(), Checkpoint.open(converted)).teacher is None
    assert "learns from the text alone" in capfd.readouterr().err.replace("\n", " ")


def test_a_record_of_an_older_digest_is_not_trusted_and_says_why(converted, settings, capfd):
    record = json.loads((converted / "headfold.json").read_text())
    record["history"][0]["source_digest"] = "ab" * 32
    (converted / "headfold.json").write_text(json.dumps(record))
    assert resolve_teacher(settings(), Checkpoint.open(converted)).teacher is None
    assert "is of an older version" in capfd.readouterr().err.replace("\n", " ")


def test_a_checkpoint_that_was_not_converted_has_no_teacher(tiny_checkpoint, settings, capfd):
    assert resolve_teacher(settings(), Checkpoint.open(tiny_checkpoint)).teacher is None
    assert capfd.readouterr().err == ""
    with pytest.raises(UsageError, match="no conversion record"):
        resolve_teacher(settings(teacher="source"), Checkpoint.open(tiny_checkpoint))


def test_the_recovered_share_is_measured_against_the_source(converted, settings, text_file, tmp_path):
    """A converted checkpoint with one damaged matrix, trained with its source as teacher."""
    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(converted / "model.safetensors")
    # the embedding of a random model is small: sizes that make a difference to the perplexity
    name = "model.embed_tokens.weight"
    trained = uptrain_checkpoint(
        converted.with_name("source"), tmp_path / "trained", settings(steps=30, teacher=None, learning_rate=1e-2)
    )
    better = load_file(trained / "model.safetensors")
    save_file(better, converted.with_name("source") / "model.safetensors", metadata={"format": "pt"})
    weights = {**better, name: better[name] + torch.randn(better[name].shape).to(better[name].dtype) * 0.1}
    save_file(weights, converted / "model.safetensors", metadata={"format": "pt"})
    record = json.loads((converted / "headfold.json").read_text())
    record["history"][0]["source_digest"] = Checkpoint.open(converted.with_name("source")).digest()
    (converted / "headfold.json").write_text(json.dumps(record))
    text = str(text_file)
    found = {}
    for with_teacher in ("auto", None):
        wanted = settings(
            teacher=with_teacher, steps=12, eval_data=text, eval_tokens=1500, eval_every=6, learning_rate=1e-2
        )
        out = uptrain_checkpoint(converted, tmp_path / str(with_teacher), wanted)
        lines = [json.loads(line) for line in (out / "headfold_metrics.jsonl").read_text().splitlines()]
        found[with_teacher] = lines
    for lines in found.values():
        source = next(line["perplexity"] for line in lines if line["kind"] == "source")
        points = [line["perplexity"] for line in lines if line["kind"] == "eval"]
        assert points[0] > source
        told = [line.get("recovered") for line in lines if line["kind"] == "train"]
        assert told[0] is None
        import math

        assert told[-1] == pytest.approx(math.log(points[0] / points[1]) / math.log(points[0] / source))
    assert "divergence" in next(line for line in found["auto"] if line["kind"] == "train")
    assert "divergence" not in next(line for line in found[None] if line["kind"] == "train")
    assert open_corpus(text).spec == text
