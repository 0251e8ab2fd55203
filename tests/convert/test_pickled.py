"""Checkpoints that are only there as pytorch_model.bin: read in place, written as safetensors, never run."""

from __future__ import annotations

import argparse
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from headfold.checkpoint.source import Checkpoint
from headfold.convert.run import convert_checkpoint
from headfold.errors import CheckpointError, HeadfoldError, UnsupportedError
from safetensors.torch import load_file
from tiny import logits_of, tiny_model
from transformers import AutoModelForCausalLM

BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


@pytest.fixture
def model() -> Any:
    return tiny_model("llama", 4, 4)


def _save(model: Any, folder: Path, shards: int = 1, change: Any = dict) -> Path:
    """The state dict as torch.save writes it, in one file or in several with an index."""
    model.config.save_pretrained(folder)
    state = change(model.state_dict())
    if shards == 1:
        torch.save(state, folder / BIN)
        return folder
    weight_map = {}
    for number in range(shards):
        file = f"pytorch_model-{number + 1:05d}-of-{shards:05d}.bin"
        names = list(state)[number::shards]
        torch.save({name: state[name] for name in names}, folder / file)
        weight_map.update(dict.fromkeys(names, file))
    (folder / BIN_INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return folder


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("method", ["mean", "folded"])
def test_pickled_weights_become_safetensors(shards: int, method: str, model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "safe")
    expected = _tensors(convert_checkpoint(tmp_path / "safe", tmp_path / "a", groups=2, method=method))
    out = convert_checkpoint(_save(model, tmp_path / "m", shards), tmp_path / "b", groups=2, method=method)
    assert not list(out.rglob("*.bin*"))
    made = _tensors(out)
    assert made.keys() == expected.keys()
    assert all(torch.equal(made[name], expected[name]) for name in made)
    assert sorted(file.name for file in out.glob("model*")) == (
        ["model.safetensors"]
        if shards == 1
        else [
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
        ]
    )
    loaded, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"]
    assert torch.isfinite(logits_of(loaded.eval())).all()


def test_safetensors_beside_pickled_weights_win(model: Any, tmp_path: Path) -> None:
    source = _save(model, tmp_path / "m", change=lambda state: {name: t + 1 for name, t in state.items()})
    model.save_pretrained(source)
    found = Checkpoint.open(source)
    assert [file.name for file in found.weight_files] == ["model.safetensors"]
    assert Path(BIN) in found.left_out
    assert torch.equal(found.read("model.norm.weight"), model.model.norm.weight)


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_that_shares_its_storage_is_written_once_where_config_ties_it(tied: bool, tmp_path: Path) -> None:
    model = tiny_model("llama", 4, 4, tie_word_embeddings=True)
    model.config.tie_word_embeddings = tied
    source = _save(model, tmp_path / "m")
    assert ("lm_head.weight" in Checkpoint.open(source).tensors) != tied
    out = convert_checkpoint(source, tmp_path / "out", groups=2)
    assert ("lm_head.weight" in _tensors(out)) != tied
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(loaded.lm_head.weight, loaded.model.embed_tokens.weight)


def test_views_of_larger_tensors_are_written_row_by_row(model: Any, tmp_path: Path) -> None:
    """k and v as slices of one fused tensor, o as a transposed view: torch.save keeps the storages."""

    def views(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        changed = dict(state)
        for layer in range(2):
            at = f"model.layers.{layer}.self_attn"
            fused = torch.cat([state[f"{at}.k_proj.weight"], state[f"{at}.v_proj.weight"]])
            changed[f"{at}.k_proj.weight"], changed[f"{at}.v_proj.weight"] = fused[:64], fused[64:]
            changed[f"{at}.o_proj.weight"] = state[f"{at}.o_proj.weight"].t().contiguous().t()
        return changed

    model.save_pretrained(tmp_path / "safe")
    source = _save(model, tmp_path / "m", change=views)
    found = Checkpoint.open(source)
    assert found.tensors["model.layers.0.self_attn.o_proj.weight"].strides == (1, 64)
    assert found.weight_bytes == Checkpoint.open(tmp_path / "safe").weight_bytes
    for groups in (4, 2):  # a plain copy, and a conversion
        made = _tensors(convert_checkpoint(source, tmp_path / f"b{groups}", groups=groups))
        expected = _tensors(convert_checkpoint(tmp_path / "safe", tmp_path / f"a{groups}", groups=groups))
        assert all(torch.equal(made[name], expected[name]) for name in expected)


def test_a_fused_projection_is_written_contiguous(tmp_path: Path) -> None:
    model = tiny_model("phi3", 4, 4, pad_token_id=0)
    out = convert_checkpoint(_save(model, tmp_path / "m"), tmp_path / "out", groups=2)
    rows = model.state_dict()["model.layers.0.self_attn.qkv_proj.weight"]
    made = _tensors(out)["model.layers.0.self_attn.qkv_proj.weight"]
    assert made.is_contiguous()
    assert torch.equal(made[:64], rows[:64])
    assert torch.allclose(made[64:80], (rows[64:80] + rows[80:96]) / 2)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda state: {**state, "args": argparse.Namespace(a=1)}, r"argparse\.Namespace"),
        (lambda state: {**state, "epoch": 3}, "'epoch', a int"),
        (lambda state: {"state_dict": state}, "'state_dict', a OrderedDict"),
        (lambda state: list(state.values()), "a list"),
        (lambda state: {**state, "x": torch.eye(2).to_sparse()}, "sparse"),
        (lambda state: {**state, "x": torch.ones(2, dtype=torch.complex128)}, "complex128"),
    ],
)
def test_anything_but_a_plain_state_dict_is_refused(change: Any, word: str, model: Any, tmp_path: Path) -> None:
    source = _save(model, tmp_path / "m", change=change)
    with pytest.raises(HeadfoldError, match=word) as problem:
        convert_checkpoint(source, tmp_path / "out", groups=2)
    assert "\n" not in problem.value.message
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_no_code_of_a_pickle_runs(model: Any, tmp_path: Path) -> None:
    source = _save(model, tmp_path / "m", change=lambda state: {**state, "x": _Touch(tmp_path / "ran")})
    with pytest.raises(UnsupportedError, match=r"posix\.system|could run code"):
        Checkpoint.open(source)
    assert not (tmp_path / "ran").exists()


class _Touch:
    """Unpickled the unsafe way, it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        import os

        return os.system, (f"touch {self.mark}",)


@pytest.mark.parametrize("cut", [0, 5, 200, -1, -400])
def test_a_damaged_pickle_is_named(cut: int, model: Any, tmp_path: Path) -> None:
    source = _save(model, tmp_path / "m")
    (source / BIN).write_bytes((source / BIN).read_bytes()[:cut])
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is damaged"):
        Checkpoint.open(source)


def test_old_formats_and_pointers_are_named(model: Any, tmp_path: Path) -> None:
    source = _save(model, tmp_path / "m")
    torch.save(model.state_dict(), source / BIN, _use_new_zipfile_serialization=False)
    with pytest.raises(UnsupportedError, match=r"before 1\.6"):
        Checkpoint.open(source)
    (source / BIN).write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(CheckpointError, match="Git LFS"):
        Checkpoint.open(source)


def test_an_index_that_leaves_the_folder_is_refused(model: Any, tmp_path: Path) -> None:
    source = _save(model, tmp_path / "m", shards=2)
    index = json.loads((source / BIN_INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = "../pytorch_model.bin"
    (source / BIN_INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="inside the folder"):
        Checkpoint.open(source)


def test_a_pickle_that_was_compressed_afterwards_is_refused(model: Any, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    model.config.save_pretrained(source)
    torch.save(model.state_dict(), tmp_path / "plain.bin")
    with (
        zipfile.ZipFile(tmp_path / "plain.bin") as plain,
        zipfile.ZipFile(source / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    with pytest.raises(HeadfoldError, match=r"compressed|damaged"):
        convert_checkpoint(source, tmp_path / "out", groups=2)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("member", ["byteorder", "data.pkl", "data/0"])
def test_a_compressed_member_is_refused_before_it_is_inflated(member, tmp_path, monkeypatch):
    """A member of a few KiB may hold gigabytes, so its size must not be tried."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    torch.save({"a": torch.ones(3)}, tmp_path / "plain.bin")
    with zipfile.ZipFile(tmp_path / "plain.bin") as plain, zipfile.ZipFile(tmp_path / BIN, "w") as packed:
        for name in plain.namelist():
            bomb = name.endswith(f"/{member}")
            packed.writestr(name, bytes(2**20) if bomb else plain.read(name), 8 if bomb else 0)

    def inflated(*arguments: Any) -> None:
        raise AssertionError("read")

    monkeypatch.setattr(zipfile.ZipFile, "read", inflated)
    monkeypatch.setattr(torch, "load", inflated)
    with pytest.raises(UnsupportedError, match="compressed after it was written"):
        Checkpoint.open(tmp_path)
