"""Repeat the heads of a random GQA model, convert back: weights bit-equal, logits equal (all types: test_native.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from headfold.checkpoint.source import Checkpoint
from headfold.convert.run import convert_checkpoint
from safetensors.torch import load_file
from tiny import kv_heads_of, logits_of, repeat_kv_heads, tiny_model

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 1.0,
    "short_factor": [1.0] * 8,
    "long_factor": [1.5] * 8,
    "original_max_position_embeddings": 8,
}


def _convert_back(small: Any, kv_heads: int, folder: Path, *, tile: bool = False, groups: int | None = None) -> Path:
    wide = repeat_kv_heads(small, kv_heads, tile=tile)
    wide.save_pretrained(folder / "source")
    return convert_checkpoint(folder / "source", folder / "out", groups=groups or small_heads(small))


def small_heads(model: Any) -> int:
    return kv_heads_of(model.config)


def _check_exact(small: Any, out: Path) -> None:
    small.save_pretrained(out.parent / "expected")
    expected = load_file(out.parent / "expected" / "model.safetensors")
    made = load_file(out / "model.safetensors")
    assert set(made) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(made[name], tensor), name
    assert torch.equal(logits_of(type(small).from_pretrained(out).eval()), logits_of(small))


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "cohere", "phi"])
@pytest.mark.parametrize(("kv_heads", "groups"), [(6, 3), (6, 1), (3, 1), (2, 1)])
def test_repeated_heads_merge_back_exactly_for_gqa_sources_and_odd_counts(
    model_type: str, kv_heads: int, groups: int, tmp_path: Path
) -> None:
    small = tiny_model(model_type, 6, groups)
    _check_exact(small, _convert_back(small, kv_heads, tmp_path))


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gemma3_text", "mixtral"])
def test_control_the_wrong_order_of_heads_fails(model_type: str, tmp_path: Path) -> None:
    small = tiny_model(model_type, 4, 2)
    out = _convert_back(small, 4, tmp_path, tile=True)
    made = type(small).from_pretrained(out).eval()
    assert (logits_of(made) - logits_of(small)).abs().max() > 1e-2
    assert not torch.equal(made.state_dict()[_a_key(made)], small.state_dict()[_a_key(small)])


def _a_key(model: Any) -> str:
    return next(name for name in model.state_dict() if name.endswith("k_proj.weight"))


@pytest.mark.parametrize("method", ["mean", "first", "random", "aligned", "folded"])
def test_as_many_groups_as_heads_copies_every_tensor(method: str, tmp_path: Path) -> None:
    tiny_model("qwen2", 4, 4).save_pretrained(tmp_path / "source")
    out = convert_checkpoint(tmp_path / "source", tmp_path / "out", groups=4, method=method)
    assert (out / "model.safetensors").stat().st_size > 1000
    before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path / "source", out))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (out / "config.json").read_bytes() == (tmp_path / "source" / "config.json").read_bytes()


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "qwen3"])
@pytest.mark.parametrize("groups", [1, 2])
def test_the_cache_holds_one_head_per_group(model_type: str, groups: int, tmp_path: Path) -> None:
    tiny_model(model_type, 4, 4).save_pretrained(tmp_path / "source")
    out = convert_checkpoint(tmp_path / "source", tmp_path / "out", groups=groups)
    model = type(tiny_model(model_type, 4, 4)).from_pretrained(out).eval()
    with torch.no_grad():
        cache = model(torch.arange(5, 12)[None], use_cache=True).past_key_values
    assert {layer.keys.shape[1] for layer in cache.layers} == {groups}
    assert {layer.values.shape[1] for layer in cache.layers} == {groups}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_keep_their_dtype_and_stay_exact(dtype: torch.dtype, tmp_path: Path) -> None:
    small = tiny_model("qwen2", 8, 2).to(dtype)
    out = _convert_back(small, 8, tmp_path)
    made, state = load_file(out / "model.safetensors"), small.state_dict()
    assert {tensor.dtype for tensor in made.values()} == {dtype}
    # a tied head is stored once
    assert state.keys() - made.keys() <= {"lm_head.weight"}
    for name, tensor in made.items():
        assert torch.equal(tensor, state[name]), name


def test_two_steps_equal_one_within_rounding(tmp_path: Path) -> None:
    tiny_model("llama", 8, 8).save_pretrained(tmp_path / "source")
    direct = convert_checkpoint(tmp_path / "source", tmp_path / "direct", groups=2)
    half = convert_checkpoint(tmp_path / "source", tmp_path / "half", groups=4)
    twice = convert_checkpoint(half, tmp_path / "twice", groups=2)
    for name, tensor in load_file(direct / "model.safetensors").items():
        other = load_file(twice / "model.safetensors")[name]
        assert torch.allclose(tensor, other, rtol=2.4e-7, atol=1e-8), name


def test_only_the_softmax_layers_of_a_hybrid_change(tmp_path: Path) -> None:
    tiny_model("qwen3_next", 4, 4).save_pretrained(tmp_path / "source")
    out = convert_checkpoint(tmp_path / "source", tmp_path / "out", groups=2)
    before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path / "source", out))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if ".k_proj." in name or ".v_proj." in name}
    assert 0 < len(changed) < len(before)


def test_experts_and_router_are_copied_as_bytes(tmp_path: Path) -> None:
    tiny_model("mixtral", 4, 4).save_pretrained(tmp_path / "source")
    out = convert_checkpoint(tmp_path / "source", tmp_path / "out", groups=2)
    before, after = (Checkpoint.open(folder) for folder in (tmp_path / "source", out))
    assert before.tensors.keys() == after.tensors.keys()
    experts = [name for name in before.tensors if "block_sparse_moe" in name]
    assert len(experts) == 2 * (4 * 3 + 1)
    assert all(_bytes(before, name) == _bytes(after, name) for name in experts)


def _bytes(checkpoint: Checkpoint, name: str) -> bytes:
    info = checkpoint.tensors[name]
    with info.file.open("rb") as stream:
        stream.seek(info.begin)
        return stream.read(info.nbytes)


@pytest.mark.parametrize(
    ("model_type", "over"),
    [
        ("phi", {"partial_rotary_factor": 0.5}),
        ("stablelm", {"partial_rotary_factor": 0.25}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}}),
        ("llama", {"rope_parameters": LLAMA3_ROPE}),
        ("phi3", {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 8}),
    ],
)
def test_rotary_settings_survive(model_type: str, over: dict[str, Any], tmp_path: Path) -> None:
    small = tiny_model(model_type, 4, 2, max_position_embeddings=8, **over)
    out = _convert_back(small, 4, tmp_path)
    _check_exact(small, out)
    made = type(small).from_pretrained(out).eval()
    assert torch.equal(logits_of(made, tokens=32), logits_of(small, tokens=32))
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (out.parent / "source", out))
    assert {key for key in after if after[key] != before[key]} == {"num_key_value_heads"}


@pytest.mark.parametrize("model_type", ["qwen3", "gemma3_text"])
def test_norms_shared_by_all_heads_are_left_alone_also_at_one_head(model_type: str, tmp_path: Path) -> None:
    small = tiny_model(model_type, 4, 1)
    _check_exact(small, _convert_back(small, 4, tmp_path))


@pytest.mark.parametrize(("model_type", "over"), [("qwen2", {}), ("llama", {"attention_bias": True})])
def test_biases_are_merged_with_their_rows(model_type: str, over: dict[str, Any], tmp_path: Path) -> None:
    small = tiny_model(model_type, 4, 2, **over)
    out = _convert_back(small, 4, tmp_path)
    _check_exact(small, out)
    assert load_file(out / "model.safetensors")["model.layers.0.self_attn.k_proj.bias"].shape == (32,)


@pytest.mark.parametrize(("hidden", "head_dim"), [(48, 16), (64, 8)])
def test_a_head_dim_that_is_not_hidden_size_over_heads_is_read_from_the_shapes(
    hidden: int, head_dim: int, tmp_path: Path
) -> None:
    small = tiny_model("gemma", 4, 2, hidden_size=hidden, head_dim=head_dim)
    out = _convert_back(small, 4, tmp_path)
    _check_exact(small, out)
    made = load_file(out / "model.safetensors")["model.layers.0.self_attn.k_proj.weight"]
    assert made.shape == (2 * head_dim, hidden)
