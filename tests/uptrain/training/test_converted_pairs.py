"""Encoder-decoders in our own code after a conversion: they learn from their source, and keep their files."""

from __future__ import annotations

import json

import pytest
from headfold import convert_checkpoint
from headfold.checkpoint.load import load_language_model
from headfold.errors import UsageError
from headfold.uptrain.run import uptrain_checkpoint
from runs import metrics, weights
from tiny import tiny_pair


@pytest.mark.parametrize("model_type", ["t5", "bart", "marian", "m2m_100"])
def test_a_converted_model_learns_from_its_source(model_type, settings, word_tokenizer, pairs_file, tmp_path):
    source = tmp_path / "source"
    tiny_pair(model_type, dropout=0.0, dropout_rate=0.0, attention_dropout=0.0).save_pretrained(source)
    word_tokenizer.save_pretrained(source)
    few = convert_checkpoint(source, tmp_path / "few", groups=2)
    wanted = settings(
        data=str(pairs_file), source_column="input", target_column="answer.back", steps=6, learning_rate=1e-3,
        warmup=0.0, weight_decay=0.0, teacher="source", hidden_weight=0.0 if model_type == "marian" else 0.1,
    )  # fmt: skip
    out = uptrain_checkpoint(few, tmp_path / "out", wanted)
    lines = metrics(out, "train")
    assert lines[-1]["divergence"] < 0.6 * lines[0]["divergence"]
    if wanted.hidden_weight:
        assert lines[-1]["hidden"] < lines[0]["hidden"]
    else:  # the class of transformers does not name its layers
        with pytest.raises(UsageError, match="does not say which of its modules are layers"):
            uptrain_checkpoint(few, tmp_path / "hidden", wanted.model_copy(update={"hidden_weight": 0.1}))
    before, after = weights(few), weights(out)
    assert before.keys() == after.keys()
    assert any((before[name] != after[name]).any() for name in before)
    for file in [*few.glob("*.py"), few / "config.json"]:
        assert (out / file.name).read_bytes() == file.read_bytes()
    assert list(few.glob("*.py"))
    assert json.loads((out / "config.json").read_text())["model_type"].startswith("headfold_")
    read = load_language_model(out)
    assert read.config.model_type.startswith("headfold_")
    assert all((after[name] == one).all() for name, one in read.state_dict().items() if name in after)
