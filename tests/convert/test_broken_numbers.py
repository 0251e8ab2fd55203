"""Sources whose weights hold NaN or infinity, and results that a dtype cannot hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from headfold.checkpoint.source import Checkpoint
from headfold.checkpoint.write import ShardWriter
from headfold.convert.calibration.statistics import writing_statistics
from headfold.convert.run import convert_checkpoint, plan_conversion
from headfold.errors import CheckpointError
from safetensors.torch import load_file, save_file
from tiny import tiny_model

LAYER = "model.layers.1.self_attn"


def _source(folder: Path, name: str, value: float, dtype: torch.dtype = torch.float32) -> Path:
    tiny_model("llama", 8, 8).to(dtype).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[name][-1].view(-1)[-1] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("method", "part", "value", "dtype"),
    [
        ("mean", "k_proj", float("nan"), torch.float32),
        ("first", "v_proj", float("inf"), torch.bfloat16),
        ("folded", "o_proj", float("-inf"), torch.float16),
        ("aligned", "q_proj", float("nan"), torch.bfloat16),
    ],
)
def test_a_broken_number_in_a_merged_tensor_is_refused_by_name(tmp_path, method, part, value, dtype):
    """Row B011: one NaN became a whole group of heads of NaN, and nothing said so."""
    source = _source(tmp_path / "m", f"{LAYER}.{part}.weight", value, dtype)
    with pytest.raises(CheckpointError, match=rf"{LAYER}\.{part}\.weight .* holds 1 of .* NaN or infinite"):
        convert_checkpoint(source, tmp_path / "out", groups=2, method=method)
    assert [file.name for file in tmp_path.iterdir()] == ["m"]


def test_broken_activations_are_refused_with_their_layer(tmp_path):
    with writing_statistics(tmp_path / "s.safetensors", [4, 4], {}) as sums:
        sums.add(0, torch.ones(3, 4))
        with pytest.raises(CheckpointError, match="attention layer 1 holds numbers that are NaN"):
            sums.add(1, torch.full((3, 4), float("inf")))


def test_a_result_beyond_its_dtype_is_not_written(tmp_path):
    tiny_model("llama", 8, 8).half().save_pretrained(tmp_path / "m")
    plan = plan_conversion(Checkpoint.open(tmp_path / "m"), groups=2)
    (tmp_path / "out").mkdir()
    with ShardWriter(tmp_path / "out", plan.out_files()) as writer:
        writer.create()
        key = f"{LAYER}.k_proj.weight"
        shape = plan.actions[key].shape
        writer.put(key, torch.full(shape, 60_000.0))
        with pytest.raises(CheckpointError, match="F16 cannot hold"):
            writer.put(key, torch.full(shape, 70_000.0))
