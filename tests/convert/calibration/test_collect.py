"""Calibration statistics against a direct XᵀX, from memory and from weights that stay on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from headfold.checkpoint.digest import VERSION
from headfold.convert.calibration import offload
from headfold.convert.calibration.collect import collect_statistics, input_projections
from headfold.convert.calibration.offload import load_or_offload
from headfold.convert.calibration.statistics import SOURCE, Statistics
from headfold.convert.calibration.text import token_blocks
from headfold.corpus import Corpus, Document
from headfold.errors import CheckpointError, DataError, UnsupportedError, UsageError
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4, head_dim=8
    )
    return LlamaForCausalLM(config)


@pytest.fixture(scope="module")
def text() -> torch.Tensor:
    return torch.randint(0, 50, (7, 12), generator=torch.Generator().manual_seed(1))


def _direct(model: LlamaForCausalLM, text: torch.Tensor) -> list[torch.Tensor]:
    """x = input_norm(hidden state) of every layer, from the model's own hidden states."""
    with torch.no_grad():
        states = model.eval()(text, output_hidden_states=True).hidden_states
        moments = []
        for layer, hidden in zip(model.model.layers, states, strict=False):
            x = layer.input_layernorm(hidden).flatten(0, 1).double()
            x = torch.cat([x, torch.ones(len(x), 1, dtype=torch.float64)], 1)
            moments.append(x.T @ x / len(x))
    return moments


@pytest.mark.parametrize("batch_tokens", [1, 36, 4096], ids=["one sequence", "uneven", "all"])
def test_equals_direct_product(batch_tokens, model, text, tmp_path: Path) -> None:
    found = collect_statistics(
        model, text, tmp_path / "s.safetensors", metadata={"text": "here"}, batch_tokens=batch_tokens
    )
    assert (found.layers, found.tokens, found.metadata["text"]) == (3, 84, "here")
    for layer, expected in enumerate(_direct(model, text)):
        moment = found.second_moment(layer)
        assert moment.dtype == torch.float64
        torch.testing.assert_close(moment, expected, atol=1e-5, rtol=1e-5)
        assert moment[-1, -1] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["s.safetensors"]


def test_saved_file_is_read_back_and_tied_to_its_source(model, text, tmp_path: Path) -> None:
    file = tmp_path / "deep" / "s.safetensors"
    written = collect_statistics(model, text, file, metadata={SOURCE: VERSION + "abc"})
    read = Statistics.open(file)
    assert torch.equal(read.second_moment(1), written.second_moment(1))
    read.require_source(VERSION + "abc", 3)
    with pytest.raises(UsageError, match="another checkpoint"):
        read.require_source("other", 3)
    with pytest.raises(UsageError, match="another checkpoint"):
        read.require_source(VERSION + "abc", 4)


def test_statistics_of_an_older_digest_are_refused_with_the_reason(model, text, tmp_path: Path) -> None:
    written = collect_statistics(model, text, tmp_path / "s.safetensors", metadata={SOURCE: "ab" * 32})
    with pytest.raises(UsageError, match="of an older version, which cannot tell all checkpoints apart"):
        written.require_source(VERSION + "abc", 3)


def test_other_files_are_refused_as_statistics(model, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="There is no statistics file"):
        Statistics.open(tmp_path / "absent")
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="holds no calibration statistics"):
        Statistics.open(tmp_path / "model.safetensors")
    (tmp_path / "torn").write_bytes(b"\x10\0\0")
    with pytest.raises(CheckpointError, match="is not a valid statistics file"):
        Statistics.open(tmp_path / "torn")


def test_a_failed_pass_leaves_nothing(model, text, tmp_path: Path) -> None:
    with pytest.raises(IndexError):
        collect_statistics(model, text + 1000, tmp_path / "s.safetensors", metadata={})
    assert list(tmp_path.iterdir()) == []


def test_hooks_are_gone_and_the_mode_is_restored(model, text, tmp_path: Path) -> None:
    model.train()
    collect_statistics(model, text, tmp_path / "s.safetensors", metadata={})
    assert model.training
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_attention_that_misses_tokens_is_refused(model, text, tmp_path: Path) -> None:
    model.spare = torch.nn.Module()
    model.spare.q_proj = torch.nn.Linear(16, 16)
    readers = [*input_projections(model), "spare.q_proj"]
    with pytest.raises(UnsupportedError, match=r"every token through spare\.q_proj"):
        collect_statistics(model, text, tmp_path / "s.safetensors", metadata={}, readers=readers)
    del model.spare
    with pytest.raises(UnsupportedError, match="no attention with separate"):
        input_projections(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("mark", [False, True])
def test_weights_left_on_disk_give_the_same(mark, model, text, tmp_path: Path, monkeypatch) -> None:
    """Also for a decoder whose config says ``is_encoder_decoder``."""
    model.save_pretrained(tmp_path / "source", max_shard_size="20KB")
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    (tmp_path / "source" / "config.json").write_text(json.dumps({**config, "is_encoder_decoder": mark}))
    assert len(list((tmp_path / "source").glob("*.safetensors"))) > 1
    monkeypatch.setattr(offload, "_IN_MEMORY_SHARE", 0.0)
    on_disk = load_or_offload(tmp_path / "source", weight_bytes=1, scratch=tmp_path / "scratch")
    assert all(parameter.is_meta for parameter in on_disk.model.layers.parameters())
    found = collect_statistics(on_disk, text, tmp_path / "s.safetensors", metadata={})
    for layer, expected in enumerate(_direct(model, text)):
        torch.testing.assert_close(found.second_moment(layer), expected, atol=1e-5, rtol=1e-5)
    assert all(parameter.is_meta for parameter in on_disk.model.layers.parameters())


class _Characters:
    """A tokenizer whose token ids are character codes."""

    def __init__(self, bos: int | None, eos: int | None) -> None:
        self.bos_token_id, self.eos_token_id = bos, eos

    def __call__(self, text: str, verbose: bool) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}


@pytest.mark.parametrize(
    ("bos", "eos", "expected"),
    [
        (1, 2, [97, 98, 99, 2, 100, 101, 102, 103, 2]),
        (1, None, [1, 97, 98, 99, 1, 100, 101, 102, 103]),
        (None, None, [97, 98, 99, 100, 101, 102, 103]),
    ],
)
def test_sequences_are_packed_with_the_tokenizers_separator(bos, eos, expected) -> None:
    corpus = Corpus("here", "1", lambda: iter([Document("a", "abc"), Document("b", "defg")]))
    text = token_blocks(corpus, _Characters(bos, eos), tokens=6, sequence_length=3)
    assert text.flatten().tolist() == expected[:6]
    short = token_blocks(corpus, _Characters(bos, eos), tokens=100, sequence_length=4)
    assert short.shape == (len(expected) // 4, 4)
    with pytest.raises(DataError, match="fewer than one sequence of 50"):
        token_blocks(corpus, _Characters(bos, eos), tokens=100, sequence_length=50)
