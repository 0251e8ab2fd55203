"""A GPT-NeoX all the way: converted as phi, uptrained with the original as teacher, compared with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from headfold.convert.run import convert_checkpoint
from headfold.eval.compare import compare
from headfold.eval.settings import EvalSettings
from headfold.uptrain.run import uptrain_checkpoint
from headfold.uptrain.settings import UptrainSettings
from tiny import tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


@pytest.fixture
def neox(tmp_path: Path, text_file: Path) -> Path:
    """A tiny GPT-NeoX with the words of the shared text as its tokens."""
    words = dict.fromkeys(" ".join(json.loads(line)["text"] for line in text_file.read_text().splitlines()).split())
    tokenizer = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(["<eos>", "<unk>", *words])}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path / "source"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>").save_pretrained(folder)
    tiny_model("gpt_neox", eos_token_id=0, bos_token_id=None).save_pretrained(folder)
    return folder


def test_uptraining_and_comparison_take_a_rewritten_checkpoint(
    neox: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    converted = convert_checkpoint(neox, tmp_path / "converted", groups=2)
    settings = UptrainSettings(
        data=str(text_file), steps=30, sequence_length=32, batch=8, micro_batch=8, teacher="source", learning_rate=3e-3
    )
    uptrained = uptrain_checkpoint(converted, tmp_path / "uptrained", settings)
    assert "no longer the checkpoint" not in capsys.readouterr().err  # the record knows its source
    wanted = EvalSettings(data=str(text_file), tokens=1024, repeats=0, needles=0)
    found = compare(str(neox), [str(converted), str(uptrained)], out=tmp_path / "report", settings=wanted)
    assert [model.model_type for model in found.models] == ["gpt_neox", "phi", "phi"]
    assert [model.kv_heads for model in found.models] == [[4], [2], [2]]
    assert found.models[1].cache_bytes_per_token * 2 == found.models[0].cache_bytes_per_token
    lost, left = (model.against_source.kl_nats.value for model in found.others)
    assert left < lost / 2
