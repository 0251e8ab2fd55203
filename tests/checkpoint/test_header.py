"""Headers against files that the safetensors library wrote, and damaged ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from headfold.checkpoint.header import encode_header, read_header
from headfold.errors import CheckpointError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file


def _write(file: Path, entries: object, data: bytes = b"") -> Path:
    text = json.dumps(entries).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return file


def test_reads_what_the_library_wrote(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 4), "b": torch.randn(5).bfloat16(), "c": torch.tensor(1), "d": torch.zeros(0, 2)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt", "k": "v"})
    header = read_header(tmp_path / "x.safetensors")
    assert header.metadata == {"format": "pt", "k": "v"}
    assert {t.name: (t.shape, t.nbytes) for t in header.tensors} == {
        name: (tuple(tensor.shape), tensor.nbytes) for name, tensor in tensors.items()
    }


def test_the_library_reads_what_we_write(tmp_path: Path) -> None:
    header = encode_header([("é", "F32", (2, 2)), ("b", "BF16", (3,))], {"format": "pt"})
    (tmp_path / "x.safetensors").write_bytes(header + torch.arange(4.0).numpy().tobytes() + bytes(6))
    assert len(header) % 8 == 0
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        assert torch.equal(file.get_tensor("é"), torch.arange(4.0).reshape(2, 2))
        assert file.get_tensor("b").dtype == torch.bfloat16
        assert file.metadata() == {"format": "pt"}


_GOOD = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    ("entries", "data", "word"),
    [
        ({"a": _GOOD}, bytes(3), "truncated"),
        ({"a": _GOOD}, bytes(5), "too many"),
        ({"a": {**_GOOD, "shape": [2]}}, bytes(4), "another number"),
        ({"a": {**_GOOD, "shape": [-1]}}, bytes(4), "is not valid"),
        ({"a": {**_GOOD, "shape": [True]}}, bytes(4), "is not valid"),
        ({"a": {**_GOOD, "data_offsets": [4, 8]}}, bytes(8), "gap"),
        ({"a": _GOOD, "b": _GOOD}, bytes(4), "overlap"),
        ({"a": {**_GOOD, "dtype": "F7"}}, bytes(4), "F7"),
        ({"a": 3}, b"", "is not valid"),
        ([1], b"", "not a JSON object"),
    ],
)
def test_damage_is_named(tmp_path: Path, entries: object, data: bytes, word: str) -> None:
    with pytest.raises(CheckpointError, match=word):
        read_header(_write(tmp_path / "x.safetensors", entries, data))


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "truncated"),
        (b"\xff" * 16, "truncated or damaged"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
        ((4).to_bytes(8, "little") + b"{{{{", "is not JSON"),
        ((9).to_bytes(8, "little") + b"\xff" * 9, "is not JSON"),
    ],
)
def test_files_that_are_no_safetensors(tmp_path: Path, content: bytes, word: str) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=word):
        read_header(tmp_path / "x.safetensors")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 20) | st.sampled_from(["F32", "BF16", "x"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "a", "__metadata__"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(entries=_JSON, data=st.binary(max_size=16))
def test_no_header_escapes_as_another_error(tmp_path: Path, entries: object, data: bytes) -> None:
    file = _write(tmp_path / "x.safetensors", entries, data)
    try:
        header = read_header(file)
    except CheckpointError as problem:
        sentences = problem.message.splitlines()
    else:
        sentences = ["fine"]
        assert sum(tensor.nbytes for tensor in header.tensors) == len(data)
    assert len(sentences) == 1
