from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from headfold import cli
from headfold.checkpoint.write import OutFile, OutTensor, resharded
from headfold.convert.run import convert_checkpoint
from safetensors.torch import load_file
from tiny import logits_of, tiny_model
from transformers import AutoModelForCausalLM


def test_files_are_full_and_a_large_tensor_gets_one_of_its_own() -> None:
    shapes = {"a": (4,), "b": (4,), "c": (100,), "d": (4,)}
    tensors = tuple(OutTensor(name, "F32", shape, None) for name, shape in shapes.items())
    files = resharded([OutFile(Path("x"), tensors[:2], {"k": "v"}), OutFile(Path("y"), tensors[2:], {})], 40)
    assert sorted([tensor.name for tensor in file.tensors] for file in files) == [["a", "b"], ["c"], ["d"]]
    assert [file.path.name for file in files] == [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert all(file.metadata == {"k": "v"} for file in files)


@pytest.mark.parametrize(("before", "size", "files"), [("1GB", "60KB", 3), ("60KB", "1GB", 1), ("40KB", "80KB", 2)])
def test_a_conversion_in_shards_of_a_wanted_size(before: str, size: str, files: int, tmp_path: Path) -> None:
    model = tiny_model("llama", 4, 4)
    model.save_pretrained(tmp_path / "m", max_shard_size=before)
    plain = convert_checkpoint(tmp_path / "m", tmp_path / "plain", groups=2)
    out = convert_checkpoint(tmp_path / "m", tmp_path / "out", groups=2, max_shard_size=size)
    shards = sorted(out.glob("*.safetensors"))
    assert len(shards) >= files
    assert len(shards) == files or files > 1
    named = {name: file.name for file in shards for name in load_file(file)}
    index = out / "model.safetensors.index.json"
    assert index.exists() == (len(shards) > 1)
    if index.exists():
        found = json.loads(index.read_text())
        assert found["weight_map"] == named
        assert found["metadata"]["total_size"] == sum(t.nbytes for file in shards for t in load_file(file).values())
        assert all(file.stat().st_size < 90_000 for file in shards)
    loaded, expected = (AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (out, plain))
    assert torch.equal(logits_of(loaded), logits_of(expected))


def _run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    return int(ended.value.code or 0)


def test_the_option_of_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tiny_model("llama", 4, 4).save_pretrained(tmp_path / "m")
    command = ("convert", str(tmp_path / "m"), "--groups", "2", "-o", str(tmp_path / "out"), "--max-shard-size")
    assert _run(*command, "much") == 2
    assert "not a valid shard size" in capfd.readouterr().err
    assert _run(*command, "60KB", "--dry-run") == 0
    row = next(line for line in capfd.readouterr().out.splitlines() if "weight files" in line)
    assert not (tmp_path / "out").exists()
    assert _run(*command, "60KB") == 0
    made = len(list((tmp_path / "out").glob("*.safetensors")))
    assert made > 1
    assert str(made) in row
