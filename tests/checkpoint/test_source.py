"""Finding a checkpoint's files: shards, index faults, links, side files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from headfold.checkpoint.source import INDEX_NAME, Checkpoint
from headfold.errors import CheckpointError, UnsupportedError, UsageError
from safetensors.torch import load_file, save_file
from tiny import tiny_model

SAVES = {"single": "1GB", "sharded": "40KB"}


@pytest.fixture(params=SAVES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    tiny_model("llama", 4, 4).save_pretrained(tmp_path / "m", max_shard_size=SAVES[request.param])
    return tmp_path / "m"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    tiny_model("llama", 4, 4).save_pretrained(tmp_path / "m", max_shard_size="40KB")
    return tmp_path / "m"


def _edit_index(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    index = json.loads((folder / INDEX_NAME).read_text())
    change(index)
    (folder / INDEX_NAME).write_text(json.dumps(index))


def test_reads_every_tensor(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    expected = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert set(checkpoint.tensors) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.read(name), tensor)
    assert checkpoint.weight_bytes == sum(tensor.nbytes for tensor in expected.values())


def test_reading_never_writes_to_the_file(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    before = {file: file.read_bytes() for file in checkpoint.weight_files}
    checkpoint.read("model.norm.weight").fill_(7)
    assert {file: file.read_bytes() for file in checkpoint.weight_files} == before


def test_unaligned_tensor_is_read_right(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    text = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"F32","shape":[2],"data_offsets":[1,9]}}'
    data = b"\x01" + torch.tensor([1.5, -2.0]).numpy().tobytes()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    assert Checkpoint.open(tmp_path).read("b").tolist() == [1.5, -2.0]


def test_digest_changes_with_weights_and_config(folder: Path) -> None:
    before = Checkpoint.open(folder).digest()
    assert Checkpoint.open(folder).digest() == before
    file = Checkpoint.open(folder).tensors["model.norm.weight"].file
    tensors = load_file(file)
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, file, metadata={"format": "pt"})
    changed = Checkpoint.open(folder).digest()
    assert changed != before
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
    assert Checkpoint.open(folder).digest() not in (before, changed)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/x.safetensors", "a/../../x.safetensors", "C:\\x.safetensors"]
)
def test_index_that_leaves_the_folder_is_refused(sharded: Path, name: str) -> None:
    (sharded.parent / "x.safetensors").write_bytes(b"")
    _edit_index(sharded, lambda index: index["weight_map"].update({"model.norm.weight": name}))
    with pytest.raises(CheckpointError, match="inside the folder"):
        Checkpoint.open(sharded)


def test_index_faults(sharded: Path) -> None:
    good = (sharded / INDEX_NAME).read_text()
    faults: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
        (lambda index: index["weight_map"].update({"ghost": next(iter(index["weight_map"].values()))}), "ghost"),
        (lambda index: index["weight_map"].update({"ghost": "model-9.safetensors"}), "model-9.safetensors"),
        (lambda index: index.pop("weight_map"), "not a valid index"),
        (lambda index: index.update(weight_map=[1]), "not a valid index"),
        (lambda index: index["weight_map"].clear(), "lists no tensors"),
    ]
    for change, word in faults:
        (sharded / INDEX_NAME).write_text(good)
        _edit_index(sharded, change)
        with pytest.raises(CheckpointError, match=word):
            Checkpoint.open(sharded)


def test_tensor_in_two_shards_is_refused(sharded: Path) -> None:
    first, second, *_ = sorted(sharded.glob("*.safetensors"))
    doubled = next(iter(load_file(first)))
    save_file({**load_file(second), doubled: load_file(first)[doubled]}, second, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="is in both"):
        Checkpoint.open(sharded)


def test_an_index_without_metadata_is_read(sharded: Path) -> None:
    _edit_index(sharded, lambda index: index["metadata"].pop("total_size"))
    assert Checkpoint.open(sharded).sharded
    _edit_index(sharded, lambda index: index.pop("metadata"))
    assert Checkpoint.open(sharded).sharded


def test_stray_weights_beside_an_index_are_named_and_not_read(sharded: Path) -> None:
    wanted = set(Checkpoint.open(sharded).tensors)
    save_file({"model.norm.weight": torch.zeros(64), "stray": torch.zeros(1)}, sharded / "model.safetensors")
    checkpoint = Checkpoint.open(sharded)
    assert set(checkpoint.tensors) == wanted
    assert any("model.safetensors" in note for note in checkpoint.notes)
    assert Path("model.safetensors") in checkpoint.left_out


def test_truncated_shard_is_refused(folder: Path) -> None:
    file = sorted(folder.glob("*.safetensors"))[-1]
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="truncated"):
        Checkpoint.open(folder)


def test_missing_shard_is_refused(sharded: Path) -> None:
    sorted(sharded.glob("*.safetensors"))[0].unlink()
    with pytest.raises(CheckpointError, match="does not exist"):
        Checkpoint.open(sharded)


def test_a_link_to_a_missing_file_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").symlink_to("../blobs/gone")
    with pytest.raises(CheckpointError, match="gone"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("with_config", [True, False])
@pytest.mark.parametrize(
    ("names", "what", "way_out"),
    [
        (["model-q4.gguf", "tokenizer.model"], r"llama\.cpp's GGUF \(model-q4\.gguf\)", "gguf_file=NAME"),
        (["consolidated.00.pth", "params.json"], r"own layout \(consolidated\.00\.pth\)", "has both"),
        (["consolidated.safetensors"], "own layout", "has both"),
        (["model.onnx", "model.onnx_data"], "inference runtime", "exported from"),
        (["nemotron.nemo"], "NeMo archive", "export_ckpt"),
        (["__0_0.distcp"], "state of a training run", "merge-weights"),
        (["flax_model.msgpack"], "does not read", "save_pretrained"),
    ],
)
def test_weights_in_other_formats_are_refused_with_the_way_to_a_checkpoint(
    tmp_path: Path, names: list[str], what: str, way_out: str, with_config: bool
) -> None:
    for name in [*names, *(["config.json"] if with_config else [])]:
        (tmp_path / name).write_text("{}")
    with pytest.raises(UnsupportedError, match=what) as problem:
        Checkpoint.open(tmp_path)
    assert way_out in str(problem.value.hint)


def test_a_gguf_file_in_place_of_a_folder_says_how_to_get_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(UnsupportedError, match=r"model\.gguf is llama\.cpp's GGUF"):
        Checkpoint.open(tmp_path / "model.gguf")


def test_shards_without_their_index_are_named_although_an_export_lies_beside_them(tmp_path: Path) -> None:
    for name in ("config.json", "model-00001-of-00002.safetensors", "model.onnx"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("with_config", [True, False])
def test_an_adapter_folder_says_merge_first(tmp_path: Path, with_config: bool) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    if with_config:
        (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UnsupportedError, match="adapter") as problem:
        Checkpoint.open(tmp_path)
    assert "Merge it first" in str(problem.value.hint)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"a": NaN', "\xff"])
def test_broken_config_is_one_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError) as problem:
        Checkpoint.open(tmp_path)
    assert "\n" not in problem.value.message


def test_wrong_paths_are_usage_errors(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for spec in (tmp_path / "none", tmp_path / "file", "./none", "no/such/folder"):
        with pytest.raises(UsageError):
            Checkpoint.open(spec)


def test_hub_id_that_cannot_be_reached_is_a_usage_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UsageError, match="nobody/nothing"):
        Checkpoint.open("nobody/nothing")


@pytest.mark.parametrize("pickled", [False, True])
def test_a_hub_id_brings_pickled_weights_only_where_there_are_no_others(
    pickled: bool, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[dict[str, Any]] = []
    if pickled:
        torch.save({"x": torch.zeros(1)}, tmp_path / "weights")
        for file in folder.glob("*.safetensors*"):
            file.unlink()

    def download(name: str, **options: Any) -> str:
        asked.append({"name": name, **options})
        if options["allow_patterns"]:
            (folder / "pytorch_model.bin").write_bytes((tmp_path / "weights").read_bytes())
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    found = Checkpoint.open("owner/model", revision="v2")
    assert all(one["name"] == "owner/model" and one["revision"] == "v2" for one in asked)
    assert "*.bin" in asked[0]["ignore_patterns"]
    assert len(asked) == 1 + pickled
    assert ("x" in found.tensors) == pickled


def test_a_link_back_up_ends(folder: Path) -> None:
    (folder / "loop").symlink_to(folder, target_is_directory=True)
    (folder / "extra").mkdir()
    (folder / "extra" / "x.txt").write_text("x")
    assert Path("extra/x.txt") in Checkpoint.open(folder).side_files


def test_config_alone_needs_no_weights(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        file.unlink()
    assert Checkpoint.open(folder, weights=False).config["model_type"] == "llama"


def test_special_files_are_not_copied(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    assert Path("pipe") in Checkpoint.open(folder).left_out


def test_a_tokenizer_that_lacks_its_package_is_one_sentence(tmp_path, monkeypatch):
    import transformers
    from headfold.checkpoint.load import load_tokenizer

    def refuse(*_, **__):
        raise ImportError("\nM2M100Tokenizer requires the SentencePiece library. Check out the\ninstructions.\n")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", refuse)
    (tmp_path / "config.json").write_text('{"model_type": "m2m_100"}')
    with pytest.raises(CheckpointError, match=r"requires the SentencePiece library\.$"):
        load_tokenizer(tmp_path)
