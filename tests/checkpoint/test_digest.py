"""The digest that guards saved numbers: it sees every byte, and reads each version of a file once."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
from headfold.checkpoint import digest as digest_module
from headfold.checkpoint.digest import Stopped, combined, hash_files, in_background, is_comparable
from headfold.checkpoint.source import Checkpoint
from headfold.errors import CheckpointError
from tiny import tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("llama", 8, 8, vocab_size=3000).save_pretrained(tmp_path / "m")
    return tmp_path / "m"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADFOLD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are read whole."""
    names: list[str] = []
    real = digest_module._hash

    def spy(file: Path, *arguments: object) -> str:
        names.append(file.name)
        return real(file, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(digest_module, "_hash", spy)
    return names


def edit(file: Path, name: str, row: int) -> None:
    """Change one number in place, as an edit of a few rows does, and keep every length."""
    info = next(info for info in Checkpoint.open(file.parent).tensors.values() if info.name == name)
    place = info.begin + row * info.nbytes // info.shape[0]
    with file.open("r+b") as stream:
        stream.seek(place)
        byte = stream.read(1)
        stream.seek(place)
        stream.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("row", [64, 1500, 2999])
def test_a_checkpoint_with_one_other_row_of_its_vocabulary_is_another(folder, row):
    """Row B058: rows behind the first 4 KiB of a tensor changed, and the digest did not."""
    before = Checkpoint.open(folder).digest()
    edit(folder / "model.safetensors", "lm_head.weight", row)
    assert Checkpoint.open(folder).digest() != before


def test_results_of_two_methods_for_a_fused_layout_differ(tmp_path):
    """Q comes first in fused tensors, so their first bytes are those of the source under every method."""
    from headfold.convert.run import convert_checkpoint

    tiny_model("phi3", 8, 8, hidden_size=128).save_pretrained(tmp_path / "m")
    digests = set()
    for method in ("mean", "first"):
        convert_checkpoint(tmp_path / "m", tmp_path / method, groups=2, method=method)
        digests.add(Checkpoint.open(tmp_path / method).digest())
    assert len(digests) == 2


@pytest.mark.parametrize("name", ["modeling_own.py", "tokenizer.json", "vocab.txt"])
def test_code_and_tokenizer_belong_to_the_digest_and_the_card_does_not(folder, name):
    before = Checkpoint.open(folder).digest()
    (folder / "README.md").write_text("a card")
    assert Checkpoint.open(folder).digest() == before
    (folder / name).write_text("x")
    assert Checkpoint.open(folder).digest() != before


def test_pickled_weights_are_hashed_to_the_last_byte(tmp_path):
    model = tiny_model("llama", 8, 8)
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    before = Checkpoint.open(tmp_path).digest()
    weights = model.state_dict()
    weights["model.norm.weight"][-1] += 1
    torch.save(weights, tmp_path / "pytorch_model.bin")
    assert Checkpoint.open(tmp_path).digest() != before


def test_each_version_of_a_file_is_read_once(folder, read, monkeypatch):
    monkeypatch.setattr(digest_module, "_YOUNG_SECONDS", -60.0)
    first = Checkpoint.open(folder).digest()
    assert read == ["model.safetensors"]
    assert Checkpoint.open(folder).digest() == first
    assert read == ["model.safetensors"]
    edit(folder / "model.safetensors", "lm_head.weight", 2000)
    assert Checkpoint.open(folder).digest() != first
    assert len(read) == 2


def test_an_edit_that_sets_the_time_back_is_seen(folder, monkeypatch):
    """`cp -p`, `rsync -t` and `touch -r` keep mtime."""
    monkeypatch.setattr(digest_module, "_YOUNG_SECONDS", -60.0)
    file = folder / "model.safetensors"
    before, times = Checkpoint.open(folder).digest(), (file.stat().st_atime_ns, file.stat().st_mtime_ns)
    edit(file, "lm_head.weight", 2000)
    os.utime(file, ns=times)
    assert Checkpoint.open(folder).digest() != before


def test_a_file_written_just_now_is_not_remembered(folder, read):
    """Two writes within one tick of the clock have one time stamp."""
    for _ in range(2):
        Checkpoint.open(folder).digest()
    assert read == ["model.safetensors"] * 2


def test_the_same_bytes_elsewhere_have_the_same_digest(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    assert Checkpoint.open(tmp_path / "copy").digest() == Checkpoint.open(folder).digest()


@pytest.mark.parametrize("damage", ["[]", "{", '{"stamp": 1}'])
def test_a_damaged_or_missing_cache_costs_a_hash_and_nothing_else(folder, cache, damage, monkeypatch):
    monkeypatch.setattr(digest_module, "_YOUNG_SECONDS", -60.0)
    before = Checkpoint.open(folder).digest()
    (entry,) = (cache / "digests").iterdir()
    entry.write_text(damage)
    assert Checkpoint.open(folder).digest() == before
    shutil.rmtree(cache)
    cache.write_text("a file where the folder should be")
    assert Checkpoint.open(folder).digest() == before


def test_a_file_that_changes_while_it_is_read_is_refused(folder, monkeypatch):
    stamps = iter(range(100))
    real = digest_module._Stamp.of
    monkeypatch.setattr(
        digest_module._Stamp,
        "of",
        lambda file: digest_module._Stamp(next(stamps), *list(vars(real(file)).values())[1:]),
    )
    with pytest.raises(CheckpointError, match="changed while it was read"):
        hash_files([folder / "model.safetensors"], "hashing")


def test_a_block_that_fails_does_not_wait_for_the_digest():
    def endless(*, quiet: bool, stop: threading.Event) -> str:
        assert stop.wait(60)
        raise Stopped

    began = time.monotonic()
    with pytest.raises(RuntimeError, match="out of space"), in_background(endless):
        raise RuntimeError("out of space")
    assert time.monotonic() - began < 30


def test_parts_cannot_be_moved_between_their_neighbours():
    assert combined(["ab", "c"]) != combined(["a", "bc"])


def test_digests_of_older_versions_are_told_apart(folder):
    assert is_comparable(Checkpoint.open(folder).digest())
    assert not is_comparable("ab" * 32)
    assert not is_comparable(None)
