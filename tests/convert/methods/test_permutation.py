"""Heads may change places with everything that belongs to them; with q, k, v and o alone the logits change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from headfold.checkpoint.source import Checkpoint
from headfold.convert.family.family import Family, find_family
from headfold.convert.family.model_type import ModelType
from headfold.convert.methods.context import MethodContext
from headfold.convert.methods.layer import new_tensors
from headfold.convert.methods.permutation import permuted_followers, permuted_heads
from headfold.convert.run import convert_checkpoint, plan_conversion
from headfold.errors import UnsupportedError
from safetensors.torch import load_file, save_file
from tiny import kv_heads_of, logits_of, repeat_kv_heads, tiny_model

ORDER = [2, 0, 3, 1]
HEAD_NORMS = [("cohere", {"use_qk_norm": True}), ("stablelm", {"qk_layernorm": True}), ("olmo2", {})]
FOLLOWERS: dict[str, set[str]] = {
    "gpt_oss": {"sinks"},
    "afmoe": {"gate_proj.weight"},
    "bitnet": {"attn_sub_norm.weight"},
    "laguna": {"g_proj.weight"},
    "inkling_text": {"r_proj.weight"},
    "inkling2_text": {
        "sink_proj.weight",
        "q_proj.norm.scale",
        "o_proj.gate_proj.weight",
        "relative_position_bias.linear.weight",
        "relative_position_bias.norm.scale",
    },
    "cohere": {"q_norm.weight"},
    "stablelm": {"q_layernorm.weight"},
    "olmo2": {"q_norm.weight"},
}
"""Type → the tensors of its query heads besides q and o."""


def _placed(model: Any, order: list[int], folder: Path, *, alone: bool = False) -> Any:
    """Reorder the heads of a model, by way of its files.

    Args:
        alone: move q, k, v and o, and nothing else.
    """
    model.save_pretrained(folder)
    source = Checkpoint.open(folder)
    family = _family(source, kv_heads_of(model.config) // 2)
    tensors = load_file(folder / "model.safetensors")
    for block in family.layers:
        assert block.order_obstacle is None
        for stored in block.stored:
            heads = stored.split([tensors[name] for name in stored.names], family.query_heads, block.kv_heads)
            tensors |= stored.join(permuted_heads(heads, order, family.query_heads), family.query_heads, block.kv_heads)
        found = permuted_followers(source, block, order, family.query_heads)
        tensors |= {name: found[name] for name in (block.rewritten if alone else found)}
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / "model.safetensors", {"format": "pt"})
    return type(model).from_pretrained(folder).eval()


def _family(source: Checkpoint, groups: int = 2) -> Family:
    return find_family(source, ModelType(source.config), groups)


def _distance(model: Any, other: Any) -> float:
    """Compute the largest difference of logits, as a share of the largest logit."""
    wanted = logits_of(other)
    return float((logits_of(model) - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize(
    ("model_type", "over"),
    [*((name, {}) for name in FOLLOWERS if name not in ("cohere", "stablelm", "olmo2")), *HEAD_NORMS],
)
def test_tensors_of_query_heads_move_with_them(model_type: str, over: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_model(model_type, 4, 4, **over)
    assert _distance(_placed(model, ORDER, tmp_path / "m"), model) < 1e-5
    assert _distance(_placed(model, ORDER, tmp_path / "alone", alone=True), model) > 1e-3, "the control must fail"
    blocks = _family(Checkpoint.open(tmp_path / "m")).layers
    assert {one.layout for block in blocks for one in block.followers} >= FOLLOWERS[model_type]


@pytest.mark.parametrize("model_type", ["qwen3_next", "dbrx", "phi3", "qwen2"])
def test_queries_with_a_gate_behind_them_and_fused_ones_move_whole(model_type: str, tmp_path: Path) -> None:
    """Two query heads for each KV head; the control moves single query heads."""
    model = tiny_model(model_type, 8, 4)
    assert _distance(_placed(model, ORDER, tmp_path / "m"), model) < 1e-5
    source = Checkpoint.open(tmp_path / "m")
    (block, *_), heads = _family(source).layers, 8
    (output,) = (one for one in block.followers if one.axis == 1)
    turned = load_file(tmp_path / "m" / "model.safetensors")
    turned[output.names[0]] = turned[output.names[0]].unflatten(1, (heads, -1)).flip(1).flatten(1)
    save_file(turned, tmp_path / "m" / "model.safetensors", {"format": "pt"})
    assert _distance(type(model).from_pretrained(tmp_path / "m").eval(), model) > 1e-3, "the control must fail"


@pytest.mark.parametrize(
    ("model_type", "over"), [("gpt_oss", {}), ("qwen3_next", {}), ("stablelm", {"qk_layernorm": True}), ("olmo2", {})]
)
def test_similarity_finds_equal_heads_that_lie_apart(model_type: str, over: dict[str, Any], tmp_path: Path) -> None:
    small = tiny_model(model_type, 4, 2, **over)
    _placed(repeat_kv_heads(small, 4), [0, 2, 1, 3], tmp_path / "source")
    made = {
        grouping: type(small).from_pretrained(
            convert_checkpoint(tmp_path / "source", tmp_path / grouping, groups=2, grouping=grouping)
        )
        for grouping in ("similarity", "contiguous")
    }
    assert _distance(made["similarity"].eval(), small) < 1e-5
    assert _distance(made["contiguous"].eval(), small) > 1e-2, "the control must fail"


def test_every_tensor_that_the_plan_replaces_is_computed(tmp_path: Path) -> None:
    tiny_model("gpt_oss", 4, 4).save_pretrained(tmp_path)
    for method in ("mean", "random", "folded"):
        plan = plan_conversion(tmp_path, groups=2, method=method, grouping="similarity")
        changed = {name for name, action in plan.actions.items() if action.kind != "copy"}
        made = {
            name
            for layer in plan.family.layers
            for name in new_tensors(
                plan.source, plan.family, layer, 2, plan.method, MethodContext(0), grouping="similarity"
            )
        }
        assert made == changed
        assert "model.layers.0.self_attn.sinks" in made


@pytest.mark.parametrize("model_type", ["granite_swa", "laguna"])
def test_folding_is_exact_beside_sinks_and_gates_of_one_number(model_type: str, tmp_path: Path) -> None:
    """Heads that are equal up to the basis of their values merge exactly beside such sinks and gates."""
    small = tiny_model(model_type, 4, 2)
    wide = repeat_kv_heads(small, 4)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for attention in (layer.self_attn for layer in wide.model.layers):
            for rows in (slice(16 * head, 16 * head + 16) for head in range(4)):
                mix = torch.linalg.qr(torch.randn(16, 16, generator=generator))[0] * 1.5
                attention.v_proj.weight[rows] = mix @ attention.v_proj.weight[rows]
                attention.o_proj.weight[:, rows] = attention.o_proj.weight[:, rows] @ torch.linalg.inv(mix)
    wide.save_pretrained(tmp_path / "source")
    errors = {}
    for method in ("folded", "mean"):
        out = convert_checkpoint(tmp_path / "source", tmp_path / method, groups=2, method=method)
        errors[method] = _distance(type(small).from_pretrained(out).eval(), small)
    assert errors["folded"] < 1e-3
    assert errors["mean"] > 1e-2


@pytest.mark.parametrize(
    ("model_type", "over", "reason"),
    [
        ("falcon", {"alibi": True}, "ALiBi positions depend on the place of a head"),
        ("diffllama", {}, "how lambda_q1 belongs to the heads is not known"),
        ("jamba", {}, "rotary position embedding is not certain"),
    ],
)
def test_heads_that_must_stay_are_refused_by_name(
    model_type: str, over: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    tiny_model(model_type, 4, 4, **over).save_pretrained(tmp_path / "source")
    with pytest.raises(UnsupportedError, match=reason) as problem:
        convert_checkpoint(tmp_path / "source", tmp_path / "out", groups=2, grouping="similarity")
    assert problem.value.hint == "Use --grouping contiguous."
    assert not (tmp_path / "out").exists()
    convert_checkpoint(tmp_path / "source", tmp_path / "out", groups=2)
