"""The bytes of one number of the KV cache, where a checkpoint has several dtypes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from headfold.checkpoint.source import Checkpoint
from headfold.convert.run import plan_conversion
from safetensors.torch import load_file, save_file
from tiny import tiny_model

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def _saved(folder: Path, model_type: str, dtype: torch.dtype, other: dict[str, torch.dtype]) -> Checkpoint:
    """Write a model in ``dtype``, with the tensors whose names hold a key of ``other`` in another one."""
    tiny_model(model_type, 4, 4).to(dtype).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for part, odd in other.items():
        named = [name for name in tensors if part in name]
        assert named
        tensors |= {name: tensors[name].to(odd) for name in named}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return Checkpoint.open(folder)


@pytest.mark.parametrize(
    ("model_type", "dtype", "other", "expected"),
    [
        ("llama", BF16, {"lm_head": F32}, 2),  # B020
        ("llama", BF16, {"model.norm": F32}, 2),
        ("llama", BF16, {"norm": F32, "embed": F32, "lm_head": F32, "mlp": F32}, 2),  # most weights, not the cache
        ("llama", F32, {"norm": BF16, "embed": F16}, 4),
        ("llama", F32, {"k_proj": F16, "v_proj": F16}, 2),
        ("mixtral", F16, {"gate": F32}, 2),
        ("gpt_neox", BF16, {"embed": F32, "bias": F32}, 2),
        ("phi3", F64, {"norm": F32}, 8),
        ("gpt2", F16, {"wte": F32}, 2),
        ("got_ocr2", BF16, {"vision_tower": F32}, 2),
    ],
)
def test_single_tensors_of_another_dtype_do_not_change_the_cache_size(
    model_type: str, dtype: torch.dtype, other: dict[str, torch.dtype], expected: int, tmp_path: Path
) -> None:
    assert _saved(tmp_path, model_type, dtype, other).element_bytes == expected


@pytest.mark.parametrize("odd", ["lm_head", "model.norm", "layers.1.self_attn.v_proj"])
def test_the_plan_counts_cached_bytes_in_the_dtype_of_most_keys_and_values(odd: str, tmp_path: Path) -> None:
    plain = plan_conversion(_saved(tmp_path / "plain", "llama", BF16, {}), groups=2)
    mixed = plan_conversion(_saved(tmp_path / "mixed", "llama", BF16, {odd: F32}), groups=2)
    assert mixed.result.kv_bytes_per_token() == plain.result.kv_bytes_per_token() == (512, 256)


def test_elements_are_counted_whatever_their_dtype(tmp_path: Path) -> None:
    plain = _saved(tmp_path / "plain", "llama", BF16, {})
    mixed = _saved(tmp_path / "mixed", "llama", BF16, {"mlp": F32})
    assert mixed.elements == plain.elements == plain.weight_bytes // 2
    assert mixed.weight_bytes > plain.weight_bytes
