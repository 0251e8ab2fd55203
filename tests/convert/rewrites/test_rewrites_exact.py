"""Rewrites into native types are exact before anything is merged: the result's logits are the source's."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from headfold.checkpoint.load import load_language_model
from headfold.checkpoint.source import Checkpoint
from headfold.convert.family.model_type import ModelType
from headfold.convert.rewrites import sources
from headfold.convert.rewrites.materialise import materialise
from headfold.convert.rewrites.retyped import RewrittenCheckpoint
from headfold.convert.rewrites.routes import ROWS, as_target, route_of
from headfold.convert.rewrites.sources import factor_for
from headfold.errors import CheckpointError, UnsupportedError
from safetensors.torch import load_file, save_file
from tiny import logits_of, tiny_model

LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0, "partial_rotary_factor": 0.5}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4, "partial_rotary_factor": 0.5}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
    "original_max_position_embeddings": 64,
}
OWN = "headfold_decoder"
GLOBAL_LOCAL = {"attention_types": [[["global", "local"], 1]]}
VARIANTS: list[tuple[str, str, dict[str, Any]]] = [
    ("gpt_neox", "phi", {}),
    *(("gpt_neox", "phi", {"rope_parameters": _rope}) for _rope in (LINEAR, DYNAMIC, YARN)),
    *(
        ("gpt_neox", _target, {"use_parallel_residual": _target == "phi", "rope_parameters": _rope})
        for _target in ("phi", "nemotron")
        for _share in (0.25, 0.5, 0.75, 1.0)
        for _rope in ({"rope_type": "default", "rope_theta": 777.0, "partial_rotary_factor": _share},)
    ),
    *(
        ("gpt_neox", _target, {"use_parallel_residual": _target == "phi", **_over})
        for _target in ("phi", "nemotron")
        for _over in ({"attention_bias": False}, {"tie_word_embeddings": True}, {"hidden_act": "relu"})
    ),
    *(("gptj", "phi", {"rotary_dim": _dim}) for _dim in (4, 8, 16)),
    ("codegen", "phi", {"n_inner": 96}),
    ("codegen", "phi", {"rotary_dim": 10}),
    ("gpt2", "gpt_bigcode", {}),
    ("gpt2", "gpt_bigcode", {"tie_word_embeddings": False}),
    ("gpt2", "gpt_bigcode", {"scale_attn_by_inverse_layer_idx": True}),
    ("gpt2", "gpt_bigcode", {"scale_attn_weights": False, "n_inner": 96, "activation_function": "relu"}),
    ("opt", "gpt_bigcode", {"word_embed_proj_dim": 64}),
    ("opt", "gpt_bigcode", {"word_embed_proj_dim": 64, "enable_bias": False, "tie_word_embeddings": False}),
    ("opt", "gpt_bigcode", {"word_embed_proj_dim": 64, "layer_norm_elementwise_affine": False}),
    ("gpt2", OWN, {}),
    ("gpt2", OWN, {"tie_word_embeddings": False, "scale_attn_weights": False, "activation_function": "relu"}),
    ("gpt2", OWN, {"scale_attn_by_inverse_layer_idx": True, "n_inner": 96}),
    ("opt", OWN, {"word_embed_proj_dim": 64}),
    ("opt", OWN, {"word_embed_proj_dim": 64, "enable_bias": False, "layer_norm_elementwise_affine": False}),
    ("opt", OWN, {"word_embed_proj_dim": 64, "_remove_final_layer_norm": True}),
    ("opt", OWN, {"word_embed_proj_dim": 32, "do_layer_norm_before": False}),  # as in opt-350m
    ("gpt_neo", OWN, {**GLOBAL_LOCAL, "window_size": 4}),
    ("gpt_neo", OWN, {"attention_types": [[["global"], 2]], "intermediate_size": 96}),
    ("bloom", OWN, {}),
    ("bloom", OWN, {"n_head": 6, "hidden_size": 96}),
    ("mpt", OWN, {}),
    ("mpt", OWN, {"n_heads": 6, "d_model": 96, "attn_config": {"clip_qkv": 0.3, "softmax_scale": 0.4}}),
]
"""Source type, the type that it becomes, and what is unusual about it."""


def save(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def rewrite(source: Path, out: Path, target: str | None = None) -> Path:
    """Rewrite with all heads, as the type named or as the first one possible."""
    out.mkdir()
    return materialise(_rewritten(Checkpoint.open(source), target), out)


def _rewritten(checkpoint: Checkpoint, target: str | None = None) -> RewrittenCheckpoint:
    route = route_of(ModelType(checkpoint.config))
    assert route is not None
    return as_target(checkpoint, route, next(one for one in route.targets if target in (None, one.model_type)))


def left_padded_difference(model: Any, other: Any) -> float:
    """Compare a batch with left padding, with the positions that ``generate`` gives."""
    ids_BT = torch.randint(5, 200, (2, 20), generator=torch.Generator().manual_seed(2))
    mask_BT = torch.ones_like(ids_BT)
    mask_BT[1, :7] = 0
    places = {"position_ids": (mask_BT.cumsum(1) - 1).clamp(min=0)}
    with torch.no_grad():
        mine, theirs = (
            one(ids_BT, attention_mask=mask_BT, use_cache=False, **(places if _takes_positions(one) else {})).logits
            for one in (model, other)
        )
    shown = mask_BT.bool()
    return ((mine - theirs)[shown].abs().max() / mine[shown].abs().max()).item()


def _takes_positions(model: Any) -> bool:
    return "position_ids" in inspect.signature(model.forward).parameters


def difference(model: Any, other: Any) -> float:
    """Return the largest difference of logits, relative to the largest logit."""
    mine, theirs = logits_of(model).float(), logits_of(other).float()
    return ((mine - theirs).abs().max() / mine.abs().max()).item()


@pytest.mark.parametrize(("model_type", "target", "over"), VARIANTS)
def test_with_all_heads_the_logits_are_the_source_s(
    model_type: str, target: str, over: dict[str, Any], tmp_path: Path
) -> None:
    model = tiny_model(model_type, **over)
    made = load_language_model(rewrite(save(model, tmp_path / "source"), tmp_path / "out", target)).eval()
    assert made.config.model_type == target
    assert difference(model, made) < 1e-5
    assert left_padded_difference(model, made) < 1e-5


def test_every_route_has_a_variant() -> None:
    assert {model_type for model_type, _, _ in VARIANTS} == set(ROWS)
    assert {model_type for model_type, target, _ in VARIANTS if target == OWN} == {
        "gpt2",
        "opt",
        "gpt_neo",
        "bloom",
        "mpt",
    }


def _all_q_then_all_k(rows: torch.Tensor, *counts: int) -> torch.Tensor:
    """Split into a layout that NeoX and CodeGen do not have."""
    split = rows.reshape(*reversed(counts), -1, *rows.shape[1:])
    return split.transpose(0, 1) if len(counts) > 1 else split


@pytest.mark.parametrize("model_type", ["gpt_neox", "codegen"])
def test_control_a_flat_split_of_fused_rows_is_noticed(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(model_type)
    monkeypatch.setattr(sources, "split_heads", _all_q_then_all_k)
    made = load_language_model(rewrite(save(model, tmp_path / "source"), tmp_path / "out")).eval()
    assert difference(model, made) > 1e-2


def test_control_rotary_pairs_in_the_wrong_order_are_noticed(tmp_path: Path) -> None:
    model = tiny_model("gptj")
    out = rewrite(save(model, tmp_path / "source"), tmp_path / "out")
    tensors, source = load_file(out / "model.safetensors"), load_file(tmp_path / "source" / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj.weight"
    assert not torch.equal(tensors[name], source["transformer.h.0.attn.k_proj.weight"])
    tensors[name] = source["transformer.h.0.attn.k_proj.weight"]
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    assert difference(model, load_language_model(out).eval()) > 1e-3


def test_control_a_norm_that_is_not_folded_is_noticed(tmp_path: Path) -> None:
    model = tiny_model("gpt_neox")
    source = save(model, tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors["gpt_neox.layers.1.post_attention_layernorm.bias"].zero_()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    assert difference(model, load_language_model(rewrite(source, tmp_path / "out")).eval()) > 1e-3


@pytest.mark.parametrize(("model_type", "over"), [("gpt_neox", {}), ("gpt_neox", {"use_parallel_residual": False})])
def test_folding_in_16_bits_rounds_once(model_type: str, over: dict[str, Any], tmp_path: Path) -> None:
    """Folding is computed in float32, so storing in bf16 costs no more than rounding the source's own weights."""
    exact = tiny_model(model_type, **over)
    half = tiny_model(model_type, **over).to(torch.bfloat16)
    out = rewrite(save(half, tmp_path / "source"), tmp_path / "out")
    made = load_language_model(out)
    assert made.dtype == torch.bfloat16
    half, made = half.float(), made.float().eval()
    rounding = difference(exact, half)
    assert difference(half, made) < 3 * rounding
    assert rounding > 1e-4


def test_weights_that_overflow_when_folded_are_refused(tmp_path: Path) -> None:
    model = tiny_model("gpt_neox").to(torch.float16)
    model.gpt_neox.layers[0].input_layernorm.weight.data.fill_(3e4)
    model.gpt_neox.layers[0].attention.query_key_value.weight.data.fill_(10.0)
    with pytest.raises(CheckpointError, match="do not fit into F16"):
        rewrite(save(model, tmp_path / "source"), tmp_path / "out")


def test_shards_keep_their_borders_and_old_buffers_are_left_out(tmp_path: Path) -> None:
    model = tiny_model("gpt_neox")
    source = tmp_path / "source"
    model.save_pretrained(source, max_shard_size="100KB")
    shards = sorted(source.glob("model-*.safetensors"))
    assert len(shards) > 2
    tensors = load_file(shards[0])
    tensors["gpt_neox.layers.0.attention.masked_bias"] = torch.tensor(-1e9)
    save_file(tensors, shards[0], metadata={"format": "pt"})
    checkpoint = Checkpoint.open(source)
    made = _rewritten(checkpoint)
    assert "attention.masked_bias" in made.notes[-1]
    out = tmp_path / "out"
    out.mkdir()
    materialise(made, out)
    assert [file.name for file in sorted(out.glob("*.safetensors"))] == [file.name for file in shards]
    assert difference(model, load_language_model(out).eval()) < 1e-5


def test_gpt2_as_first_published_without_prefix_and_with_masks(tmp_path: Path) -> None:
    model = tiny_model("gpt2")
    source = save(model, tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor.clone() for name, tensor in tensors.items()}
    bare |= {f"h.{index}.attn.bias": torch.ones(1, 1, 8, 8).tril() for index in range(2)}
    save_file(bare, source / "model.safetensors", metadata={"format": "pt"})
    assert difference(model, load_language_model(rewrite(source, tmp_path / "out")).eval()) < 1e-6


def test_bloom_as_published_without_prefix_and_with_old_names_of_its_settings(tmp_path: Path) -> None:
    model = tiny_model("bloom")
    source = save(model, tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    save_file(bare, source / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config |= {"n_embed": config.pop("hidden_size"), "num_attention_heads": config.pop("n_head"), "n_inner": None}
    (source / "config.json").write_text(json.dumps(config))
    assert difference(model, load_language_model(rewrite(source, tmp_path / "out")).eval()) < 1e-5


def test_gpt_neo_as_published_with_masks_among_its_weights(tmp_path: Path) -> None:
    model = tiny_model("gpt_neo", **GLOBAL_LOCAL, window_size=4)
    source = save(model, tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    for index in range(2):
        tensors[f"transformer.h.{index}.attn.attention.bias"] = torch.ones(1, 1, 8, 8, dtype=torch.uint8).tril()
        tensors[f"transformer.h.{index}.attn.attention.masked_bias"] = torch.tensor(-1e9)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    assert difference(model, load_language_model(rewrite(source, tmp_path / "out")).eval()) < 1e-5


def test_config_has_the_keys_that_transformers_4_reads(tmp_path: Path) -> None:
    over = {"rope_parameters": LINEAR, "bos_token_id": 3, "eos_token_id": 4}
    out = rewrite(save(tiny_model("gpt_neox", **over), tmp_path / "source"), tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    assert config["rope_theta"] == 500.0
    assert config["partial_rotary_factor"] == 0.5
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    assert config["torch_dtype"] == "float32"
    assert (config["bos_token_id"], config["eos_token_id"]) == (3, 4)
    assert not {"rope_parameters", "dtype"} & set(config)


def test_every_rotary_dim_comes_back_from_its_share() -> None:
    for head_dim in range(2, 520, 2):
        for dim in range(2, head_dim + 1, 2):
            assert int(head_dim * factor_for(head_dim, dim)) == dim


@pytest.mark.parametrize(
    ("model_type", "over", "reason"),
    [
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "output of its norms"),
        ("mpt", {"attn_config": {"alibi_bias_max": 16}}, "alibi_bias_max is not 8"),
        ("mpt", {"attn_config": {"qk_ln": True}}, "norms queries and keys"),
        ("mpt", {"attn_config": {"alibi": False}}, "learned positions"),
        ("mpt", {"attn_config": {"prefix_lm": True}}, "looks ahead"),
        ("mpt", {"no_bias": False}, "have biases"),
        ("mpt", {"logit_scale": 0.5}, "scales its logits"),
        ("gpt2", {"add_cross_attention": True}, "cross attention"),
        ("gpt_neox", {"use_parallel_residual": False, "rope_parameters": LINEAR}, "stretches its rotary positions"),
    ],
)
def test_settings_without_a_route_are_refused_with_the_reason(
    model_type: str, over: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    source = save(tiny_model(model_type, **over), tmp_path / "source")
    with pytest.raises(UnsupportedError, match=reason):
        route_of(ModelType(Checkpoint.open(source).config))


def test_an_odd_number_of_rotated_rows_is_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.2}
    source = save(tiny_model("gpt_neox", rope_parameters=rope), tmp_path / "source")
    with pytest.raises(UnsupportedError, match="odd number of rows"):
        rewrite(source, tmp_path / "out")


def test_a_classifier_is_refused(tmp_path: Path) -> None:
    source = save(tiny_model("gpt2"), tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "architectures": ["GPT2ForSequenceClassification"]}))
    with pytest.raises(UnsupportedError, match="only GPT2LMHeadModel"):
        route_of(ModelType(Checkpoint.open(source).config))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda tensors: tensors.pop("gpt_neox.layers.0.attention.dense.bias"), "is missing"),
        (
            lambda tensors: tensors.update({"gpt_neox.final_layer_norm.bias": torch.zeros(3)}),
            "config.json asks for",
        ),
    ],
)
def test_tensors_that_contradict_the_config_are_refused(damage: Any, message: str, tmp_path: Path) -> None:
    source = save(tiny_model("gpt_neox"), tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    damage(tensors)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        rewrite(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("model_type", "damage"),
    [
        ("gptj", {"n_head": 0}),
        ("gptj", {"n_head": 3}),
        ("gptj", {"rotary_dim": None}),
        ("gptj", {"rotary_dim": 40}),
        ("gpt2", {"n_head": -1}),
        ("gpt2", {"n_layer": 0}),
        ("opt", {"hidden_size": 0, "word_embed_proj_dim": 0}),
        ("gpt_neox", {"num_attention_heads": 0}),
        ("gpt_neox", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": "half"}}),
        ("gpt_neox", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 7}}),
    ],
)
def test_an_impossible_config_is_refused(model_type: str, damage: dict[str, Any], tmp_path: Path) -> None:
    source = save(
        tiny_model(model_type, **({"word_embed_proj_dim": 64} if model_type == "opt" else {})), tmp_path / "m"
    )
    config = {**json.loads((source / "config.json").read_text()), **damage}
    with pytest.raises((CheckpointError, UnsupportedError)):
        route_of(ModelType(config))
