"""`convert --check` on checkpoints as they are, and the shapes that other runtimes will read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from headfold import cli
from headfold.convert.check import check_checkpoint, rope_bases
from headfold.convert.family.model_type import ModelType
from headfold.convert.run import convert_checkpoint
from headfold.errors import CheckpointError
from safetensors.torch import load_file, save_file
from tiny import tiny_model


@pytest.fixture
def source(tmp_path: Path) -> Path:
    tiny_model("llama", 4, 4).save_pretrained(tmp_path / "m")
    return tmp_path / "m"


def _edit_config(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.update(values)
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def _run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    return int(ended.value.code or 0)


def test_a_sound_result_passes_and_an_old_config_is_named(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = convert_checkpoint(source, tmp_path / "out", groups=1)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert _run("check", str(out)) == 0
    assert "4 / 1" in capfd.readouterr().out
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    _edit_config(out, num_key_value_heads=4)
    assert _run("check", str(out)) == 1
    shown = capfd.readouterr().err.replace("\n", " ")
    assert "the file has (16, 64), the config asks for (64, 64)" in shown
    assert "Traceback" not in shown


def test_tensors_that_the_class_does_not_use_fail_unless_the_record_names_them(source: Path, tmp_path: Path) -> None:
    save_file({**load_file(source / "model.safetensors"), "mtp.x": torch.ones(3)}, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"mtp\.x"):
        check_checkpoint(source)
    rows = dict(check_checkpoint(convert_checkpoint(source, tmp_path / "out", groups=2)).rows)
    assert rows["tensors it does not use, as in the source"] == "1"


V5 = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
V4 = {"rope_parameters": None, "rope_theta": 1e6}


@pytest.mark.parametrize(
    ("dialect", "v4", "v5", "here", "warned"),
    [
        (V5, "absent", "1,000,000", "1,000,000", "only know rope_theta"),
        (V4, "1,000,000", "absent", "1,000,000", "only know rope_parameters"),
        ({**V5, "rope_theta": 5e5}, "500,000", "1,000,000", None, "will disagree"),
        ({"rope_parameters": None}, "absent", "absent", "10,000", None),
    ],
)
def test_the_rope_base_that_each_kind_of_reader_finds_is_shown(
    dialect: dict[str, Any], v4: str, v5: str, here: str | None, warned: str | None, source: Path, tmp_path: Path
) -> None:
    _edit_config(source, **dialect)
    if dialect == {"rope_parameters": None}:
        text = json.loads((source / "config.json").read_text())
        assert "rope_parameters" not in text
    out = convert_checkpoint(source, tmp_path / "out", groups=2)
    found = check_checkpoint(out)
    rows = dict(found.rows)
    assert rows["RoPE base read by v4 (rope_theta)"] == v4
    assert rows["RoPE base read by v5 (rope_parameters)"] == v5
    assert here is None or rows["RoPE base in transformers here"] == here
    assert any(warned in warning for warning in found.warnings) if warned else not found.warnings


def test_a_rope_base_for_each_kind_of_layer_is_shown() -> None:
    config = tiny_model("gemma3_text", 4, 4).config.to_dict()
    seen = rope_bases(ModelType(config))
    assert "sliding_attention 10,000" in seen["v5"]
    assert seen["v5"] == seen["here"]
    assert seen["v4"] == "absent"


@pytest.mark.parametrize(("heads", "kv_heads"), [(12, 4), (8, 1), (71, 1)])
def test_gguf_converters_permute_k_by_the_number_in_config_json(heads: int, kv_heads: int) -> None:
    """The published permutation of llama.cpp's converter undoes itself for any number of KV heads that config.json
    names; with the number of query heads, as for a config without it, k comes out scrambled."""
    width = 8
    rows = torch.arange(kv_heads * width * 3).reshape(kv_heads * width, 3)

    def permute(weight: torch.Tensor, n_head: int, n_head_kv: int) -> torch.Tensor:
        count = n_head if n_head_kv is None or n_head_kv == n_head else n_head_kv
        return weight.reshape(count, 2, len(weight) // count // 2, -1).swapaxes(1, 2).reshape(weight.shape)

    def undone(weight: torch.Tensor, count: int) -> torch.Tensor:
        return weight.reshape(count, len(weight) // count // 2, 2, -1).swapaxes(1, 2).reshape(weight.shape)

    assert torch.equal(undone(permute(rows, heads, kv_heads), kv_heads), rows)
    if len(rows) % (2 * heads) == 0:
        assert not torch.equal(undone(permute(rows, heads, heads), kv_heads), rows)
