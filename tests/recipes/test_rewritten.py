"""A GPT-NeoX all the way: converted as phi, uptrained with the original as teacher, compared with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from headfold.convert.run import convert_checkpoint
from headfold.eval.compare import compare
from headfold.eval.footprint import DecodeSettings
from headfold.uptrain.loop import uptrain_checkpoint
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


def test_uptraining_and_comparison_take_a_rewritten_checkpoint(neox: Path, text_file: Path, tmp_path: Path) -> None:
    converted = convert_checkpoint(neox, tmp_path / "converted", groups=2)
    settings = UptrainSettings(
        data=str(text_file), steps=60, block=32, batch=8, micro_batch=8, teacher="source", learning_rate=3e-3
    )
    uptrained = uptrain_checkpoint(converted, tmp_path / "uptrained", settings)
    decode = DecodeSettings(contexts=(8,), batches=(1,), new_tokens=2, repeats=1)
    others = [str(converted), str(uptrained)]
    found = compare(str(neox), others, data=str(text_file), out=tmp_path / "report", max_tokens=1024, decode=decode)
    assert [model["model_type"] for model in found["models"]] == ["gpt_neox", "phi", "phi"]
    assert [model["kv_heads"] for model in found["models"]] == [[4], [2], [2]]
    assert found["models"][1]["cache_bytes_per_token"] * 2 == found["models"][0]["cache_bytes_per_token"]
    lost, left = (model["against_source"]["kl_nats"]["value"] for model in found["models"][1:])
    assert left < lost / 2
