"""Files beside the weights: copied as bytes, or left out by name; links that lead elsewhere; Git LFS pointers."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from headfold import cli
from headfold.checkpoint.folder import side_files as module
from headfold.checkpoint.source import Checkpoint
from headfold.convert.run import convert_checkpoint
from headfold.errors import CheckpointError
from safetensors.torch import load_file, save_file
from tiny import tiny_model

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 17525357\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("llama", 4, 4).save_pretrained(tmp_path / "m")
    return tmp_path / "m"


def _write(folder: Path, *names: str, content: bytes = b"x") -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def _found(folder: Path) -> tuple[set[str], dict[str, str]]:
    checkpoint = Checkpoint.open(folder)
    return {str(path) for path in checkpoint.side_files}, {str(path): why for path, why in checkpoint.left_out.items()}


def _files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_modules_of_an_embedding_model_are_copied_although_they_share_names_with_files_at_the_top(
    folder: Path, tmp_path: Path
) -> None:
    """B001: without 1_Pooling/config.json the embedding falls back to mean pooling."""
    names = ["", "1_Pooling", "2_Dense", "3_Normalize"]
    modules = [{"idx": number, "name": str(number), "path": path} for number, path in enumerate(names)]
    (folder / "modules.json").write_text(json.dumps(modules))
    _write(folder, "1_Pooling/config.json", content=b'{"pooling_mode_lasttoken": true}')
    _write(folder, "2_Dense/config.json", content=b'{"out_features": 8}')
    save_file({"linear.weight": torch.ones(8, 64)}, folder / "2_Dense" / "model.safetensors")
    _write(folder, "3_Normalize/pytorch_model.bin")
    out = convert_checkpoint(folder, tmp_path / "out", groups=2)
    for name in ("1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"):
        assert (out / name).read_bytes() == (folder / name).read_bytes()
    assert (out / "3_Normalize" / "pytorch_model.bin").exists()


def test_parts_of_the_model_in_subfolders_are_copied_and_second_copies_of_it_are_not(folder: Path) -> None:
    """A speech tokenizer in shards is a part. Half precision of the same weights is not, nor is a Trainer's save."""
    save_file({"encoder.weight": torch.ones(4)}, folder / "part.tmp")
    for name in ("speech/model-1-of-1.safetensors", "speech/deep/model.safetensors"):
        _write(folder, name, content=(folder / "part.tmp").read_bytes())
    (folder / "part.tmp").unlink()
    _write(folder, "speech/config.json", "speech/model.safetensors.index.json", "other/config.json", content=b"{}")
    weights = {name: tensor.half() for name, tensor in load_file(folder / "model.safetensors").items()}
    for name in ("fp16", "checkpoint-500", "half"):
        (folder / name).mkdir()
        save_file(weights, folder / name / "model.safetensors")
    for name in ("fp16", "checkpoint-500"):
        _write(folder, f"{name}/config.json", content=(folder / "config.json").read_bytes())
    _write(folder, "half/model.safetensors.index.json", content=b"{}")
    copied, left_out = _found(folder)
    assert {name for name in copied if "/" in name} == {
        "speech/model-1-of-1.safetensors", "speech/deep/model.safetensors", "speech/config.json",
        "speech/model.safetensors.index.json", "other/config.json",
    }  # fmt: skip
    assert left_out == {
        "fp16": module.WEIGHTS, "checkpoint-500": module.STATE, "half/model.safetensors": module.WEIGHTS,
        "half/model.safetensors.index.json": module.WEIGHTS,
    }  # fmt: skip


def test_shards_in_a_subfolder_are_read_and_what_lies_beside_them_is_sorted(tmp_path: Path) -> None:
    tiny_model("llama", 4, 4).save_pretrained(tmp_path / "m", max_shard_size="40KB")
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    (tmp_path / "m" / "shards").mkdir()
    for file in (tmp_path / "m").glob("*.safetensors"):
        file.rename(tmp_path / "m" / "shards" / file.name)
    index["weight_map"] = {name: f"shards/{file}" for name, file in index["weight_map"].items()}
    (tmp_path / "m" / "model.safetensors.index.json").write_text(json.dumps(index))
    _write(tmp_path / "m", "shards/notes.txt", "shards/x.distcp")
    copied, left_out = _found(tmp_path / "m")
    assert "shards/notes.txt" in copied
    assert left_out == {"shards/x.distcp": module.STATE}


STATE = [
    *("optimizer_0/__0_0.distcp", "pytorch_model_fsdp_0/__0_0.distcp", "global_step500/mp_rank_00_model_states.pt"),
    *("checkpoint-500/config.json", "iter_0000010/x", "dcp/__1_0.distcp", "dcp/.metadata", "loose.distcp"),
    *("trainer_state.json", "training_args.bin", "rng_state_0.pth", "random_states_0.pkl", "latest", "zero_to_fp32.py"),
    *("optimizer.pt", "logs/events.out.tfevents.1700000000.host.1.0", "mp_rank_00/x"),
]
HALF = [
    *("model-00002-of-00002.safetensors.part", "model.safetensors.incomplete", "x.tmp", "x.aria2", "x.crdownload"),
    *("TOKENIZER.JSON.PART", "model.safetensors.part-aa"),
]
FORMS = [
    *("model.onnx.data", "weights.npz", "flax_model.msgpack", "model.onnx_data_1", "onnx/model.onnx", "tf_model.h5"),
    *("model.ckpt.data-00000-of-00001", "Model.GGUF", "model.keras", "saved_model/saved_model.pb", "x.mlpackage/y"),
    *("original/consolidated.00.pth", "openvino_model.xml", "old/pytorch_model.bin"),
]
KEPT = [
    *("tokenizer.json", "tokenizer.model", "vocab.txt", "merges.txt", "chat_template.jinja", "additional/x.jinja"),
    *("preprocessor_config.json", "modeling_mine.py", "LICENSE", "NOTICE", "images/logo.png", "qwen.tiktoken"),
    *("generation_config.json", "source.spm", "added_tokens.json", "special_tokens_map.json", "original/params.json"),
    *(".gitattributes", "README.md", "paper.pdf", "optimizer.py", "scheduler/scheduler_config.json", "uv.lock"),
]


def test_training_state_half_downloads_and_other_forms_of_the_weights_are_left_out_and_named(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """B004, and what a result needs beside them."""
    _write(folder, *STATE, *HALF, *FORMS, *KEPT)
    out = convert_checkpoint(folder, tmp_path / "out", groups=2)
    made = _files(out) - {"config.json", "headfold.json", "model.safetensors", "README.source.md"}
    assert {name for name in made if not name.startswith(".cache/")} == set(KEPT)
    said = " ".join(capfd.readouterr().err.split())
    for name in [*STATE, *HALF, *FORMS]:
        top = name.split("/")[0]
        assert name in said or f" {top}/" in said, name
    for reason in (module.STATE, module.UNFINISHED, module.WEIGHTS):
        assert f"Not copied ({reason})" in said


def test_weights_under_a_strange_name_are_known_by_their_first_bytes(folder: Path) -> None:
    (folder / "model.safetensors.bak").write_bytes((folder / "model.safetensors").read_bytes())
    _write(folder, "model.q4", content=b"GGUF\x03\0\0\0")
    _write(folder, "arrays", content=b"\x93NUMPY\x01\0")
    torch.save({"a": torch.ones(2)}, folder / "state")
    with zipfile.ZipFile(folder / "examples.zip", "w") as archive:
        archive.writestr("a.txt", "x")
    copied, left_out = _found(folder)
    assert left_out == dict.fromkeys(("model.safetensors.bak", "model.q4", "arrays", "state"), module.WEIGHTS)
    assert "examples.zip" in copied


def test_large_files_of_an_unknown_kind_are_left_out_but_no_tokenizer(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "_LARGEST_UNKNOWN", 1000)
    _write(folder, "corpus.xyz", "tokenizer.json", "tokenizer.model", "vocab.txt", content=b"x" * 2000)
    copied, left_out = _found(folder)
    assert left_out == {"corpus.xyz": module.LARGE}
    assert {"tokenizer.json", "tokenizer.model", "vocab.txt"} <= copied
    module.announce(folder, Checkpoint.open(folder).left_out)
    assert "warning: Not copied (large files of an unknown kind): corpus.xyz." in capfd.readouterr().err


def test_an_adapter_of_the_source_is_not_carried_over(folder: Path) -> None:
    """It fits the source's KV heads. transformers would load its base model in place of the result."""
    _write(folder, "adapter_config.json", "lora/adapter_config.json", "lora/adapter_model.safetensors", content=b"{}")
    left_out = _found(folder)[1]
    assert set(left_out) == {"adapter_config.json", "lora/adapter_config.json", "lora/adapter_model.safetensors"}
    assert set(left_out.values()) == {module.ADAPTER}


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "1_Pooling/config.json", "images/logo.png"])
def test_a_git_lfs_pointer_among_the_side_files_is_refused_by_name(name: str, folder: Path, tmp_path: Path) -> None:
    _write(folder, name, content=POINTER)
    with pytest.raises(CheckpointError, match=rf"{name} in .* is a Git LFS pointer") as problem:
        convert_checkpoint(folder, tmp_path / "out", groups=2)
    assert "git lfs pull" in str(problem.value.hint)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "model.safetensors"])
def test_a_git_lfs_pointer_in_place_of_config_index_or_weights_is_refused_by_name(name: str, folder: Path) -> None:
    _write(folder, name, content=POINTER)
    with pytest.raises(CheckpointError, match=f"{name} in .* is a Git LFS pointer"):
        Checkpoint.open(folder)


def test_a_pointer_to_something_that_is_not_copied_is_no_fault(folder: Path) -> None:
    _write(folder, "pytorch_model.bin", "onnx/model.onnx", content=POINTER)
    assert set(_found(folder)[1]) == {"pytorch_model.bin", "onnx/model.onnx"}


def test_linked_folders_and_files_are_not_followed_out_of_the_checkpoint(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _write(tmp_path / "private", "thesis.txt", "deep/key", "tokenizer.model")
    (folder / "data").symlink_to(tmp_path / "private", target_is_directory=True)
    (folder / "notes.txt").symlink_to(tmp_path / "private" / "thesis.txt")
    (folder / "thesis.txt").symlink_to("../private/thesis.txt")
    (folder / "above").symlink_to("..", target_is_directory=True)
    (folder / "merges.txt").symlink_to(tmp_path / "private" / "deep" / "key")
    (folder / "tokenizer.model").symlink_to(tmp_path / "private" / "tokenizer.model")
    out = convert_checkpoint(folder, tmp_path / "out", groups=2)
    named = ("data", "notes.txt", "thesis.txt", "above", "merges.txt")
    assert not any((out / name).exists() for name in named)
    # a tokenizer that is shared between checkpoints by a link is needed
    assert (out / "tokenizer.model").read_bytes() == b"x"
    assert not (out / "tokenizer.model").is_symlink()
    said = " ".join(capfd.readouterr().err.split())
    assert "Not copied (links that lead out of the checkpoint)" in said
    assert all(name in said for name in named)


@pytest.mark.parametrize("place", ["snapshot", "local folder"])
def test_links_of_the_hub_s_cache_are_followed(place: str, folder: Path, tmp_path: Path) -> None:
    _write(folder, "1_Pooling/config.json", content=b"{}")
    repository = tmp_path / "hub" / "models--me--mine"
    blobs = repository / "blobs"
    blobs.mkdir(parents=True)
    snapshot = repository / "snapshots" / "0123abc" if place == "snapshot" else tmp_path / "local"
    for number, name in enumerate(sorted(_files(folder))):
        (folder / name).rename(blobs / str(number))
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).symlink_to(os.path.relpath(blobs / str(number), (snapshot / name).parent))
    out = convert_checkpoint(snapshot, tmp_path / "out", groups=2)
    assert (out / "generation_config.json").is_file()
    assert (out / "1_Pooling" / "config.json").read_text() == "{}"
    assert not any(path.is_symlink() for path in out.rglob("*"))


def test_links_between_folders_end_and_no_file_is_lost_to_them(folder: Path) -> None:
    _write(folder, "b/x.txt", "c/y.txt")
    (folder / "a").symlink_to("b", target_is_directory=True)  # sorted before the folder itself
    (folder / "b" / "to_c").symlink_to("../c", target_is_directory=True)
    (folder / "c" / "to_b").symlink_to("../b", target_is_directory=True)
    (folder / "c" / "self").symlink_to(".", target_is_directory=True)
    (folder / "loop.txt").symlink_to("loop.txt")
    with pytest.raises(CheckpointError, match=r"loop\.txt is a link to a file that is gone"):
        Checkpoint.open(folder)
    (folder / "loop.txt").unlink()
    copied, left_out = _found(folder)
    assert {name for name in copied if name.endswith(".txt")} == {
        "a/x.txt", "b/x.txt", "b/to_c/y.txt", "c/y.txt", "c/to_b/x.txt",
    }  # fmt: skip
    assert set(left_out) == {"a/to_c", "b/to_c/to_b", "b/to_c/self", "c/to_b/to_c", "c/self"}


def test_the_dry_run_names_what_is_left_out(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _write(folder, "weights.npz")
    (folder / "elsewhere").symlink_to(tmp_path, target_is_directory=True)
    with pytest.raises(SystemExit) as ended:
        cli.main(["convert", str(folder), "-g", "2", "-o", str(tmp_path / "out"), "--dry-run"])
    assert not ended.value.code
    said = capfd.readouterr().err
    assert "weights.npz" in said
    assert "elsewhere/" in said


def test_weights_of_modules_come_from_the_hub_in_any_format(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "modules.json").write_text(json.dumps([{"path": ""}, {"path": "2_Dense"}, {"path": "../up"}, {}]))
    asked: list[dict[str, Any]] = []

    def download(name: str, **options: Any) -> str:
        asked.append(options)
        if options["allow_patterns"]:
            _write(folder, "2_Dense/pytorch_model.bin")
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert Path("2_Dense/pytorch_model.bin") in Checkpoint.open("me/mine").side_files
    assert [one["allow_patterns"] for one in asked] == [None, ["2_Dense/*"]]


@pytest.mark.parametrize("content", ["", "{}", "[1]", '[{"path": 3}]', '[{"path": "/etc"}]', '[{"path": "../x"}]'])
def test_a_strange_list_of_modules_leads_nowhere(content: str, folder: Path) -> None:
    (folder / "modules.json").write_text(content)
    assert "modules.json" in _found(folder)[0]
