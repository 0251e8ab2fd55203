"""Tensors that are not one per projection: fused, numbered, normed over all heads, and other places in config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from headfold.checkpoint.record import last_entry
from headfold.convert.methods.context import MethodContext
from headfold.convert.methods.norms import merge_full_width
from headfold.convert.methods.pooling import pool_first, pool_mean
from headfold.convert.run import convert_checkpoint, plan_conversion
from headfold.errors import UnsupportedError, UsageError
from safetensors.torch import load_file, save_file
from tiny import kv_heads_of, logits_of, new_model, repeat_kv_heads, tiny_config, tiny_model

CHAMELEON_IMAGES = {"base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1, "num_embeddings": 20}
BLOCK_METHODS = [("folded", "contiguous"), ("aligned", "contiguous"), ("folded", "similarity")]


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def _convert_back(small: Any, kv_heads: int, folder: Path, **saving: Any) -> Path:
    repeat_kv_heads(small, kv_heads).save_pretrained(folder / "source", **saving)
    return convert_checkpoint(folder / "source", folder / "out", groups=kv_heads_of(small.config))


def _check_exact(small: Any, out: Path) -> None:
    small.save_pretrained(out.parent / "expected")
    made, expected = _tensors(out), _tensors(out.parent / "expected")
    assert made.keys() == expected.keys()
    assert [name for name in made if not torch.equal(made[name], expected[name])] == []
    loaded, report = type(small).from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert torch.equal(logits_of(loaded.eval()), logits_of(small))


@pytest.mark.parametrize("method", ["mean", "first", "random"])
@pytest.mark.parametrize(
    ("model_type", "leaf"), [("phi3", "qkv_proj"), ("dbrx", "Wqkv"), ("falcon", "query_key_value")]
)
def test_query_rows_of_fused_tensors_keep_their_bytes(model_type: str, leaf: str, method: str, tmp_path: Path) -> None:
    model = tiny_model(model_type, 4, 4).bfloat16()
    model.save_pretrained(tmp_path / "source")
    out = convert_checkpoint(tmp_path / "source", tmp_path / "out", groups=2, method=method)
    before, after = _tensors(tmp_path / "source"), _tensors(out)
    names = [name for name in before if leaf in name]
    assert len(names) == 2
    for name in names:
        wide, narrow = before[name].unflatten(0, (-1, 16)), after[name].unflatten(0, (-1, 16))
        assert (len(wide), len(narrow)) == (12, 8)
        # Falcon's rows lie group by group: (q, k, v) four times, then (q, q, k, v) twice.
        queries = ([0, 3, 6, 9], [0, 1, 4, 5]) if model_type == "falcon" else (range(4), range(4))
        assert torch.equal(wide[list(queries[0])].view(torch.uint8), narrow[list(queries[1])].view(torch.uint8))
        assert not torch.equal(wide[4:8], narrow[4:8])


@pytest.mark.parametrize(("method", "grouping"), BLOCK_METHODS)
def test_methods_that_rewrite_queries_treat_fused_and_separate_tensors_alike(
    method: str, grouping: str, tmp_path: Path
) -> None:
    tiny_model("phi3", 4, 4).save_pretrained(tmp_path / "fused")
    fused = _tensors(tmp_path / "fused")
    twin = tiny_model("llama", 4, 4)
    values = twin.state_dict()
    for layer in range(2):
        block = f"model.layers.{layer}.self_attn"
        rows = fused[f"{block}.qkv_proj.weight"].split(64)
        for side, tensor in zip("qkv", rows, strict=True):
            values[f"{block}.{side}_proj.weight"].copy_(tensor)
        values[f"{block}.o_proj.weight"].copy_(fused[f"{block}.o_proj.weight"])
    twin.save_pretrained(tmp_path / "separate")
    made = {}
    for kind in ("fused", "separate"):
        options = {"groups": 2, "method": method, "grouping": grouping}
        made[kind] = _tensors(convert_checkpoint(tmp_path / kind, tmp_path / f"{kind}-out", **options))
    for layer in range(2):
        block = f"model.layers.{layer}.self_attn"
        parts = [made["separate"][f"{block}.{side}_proj.weight"] for side in "qkv"]
        assert torch.equal(made["fused"][f"{block}.qkv_proj.weight"], torch.cat(parts))
        assert not torch.equal(parts[0], fused[f"{block}.qkv_proj.weight"][:64])  # queries were rewritten
        assert torch.equal(made["fused"][f"{block}.o_proj.weight"], made["separate"][f"{block}.o_proj.weight"])


@pytest.mark.parametrize("model_type", ["phi3", "falcon", "dbrx", "olmo2", "sarvam_moe"])
def test_control_the_wrong_order_of_heads_fails(model_type: str, tmp_path: Path) -> None:
    small = tiny_model(model_type, 4, 2)
    repeat_kv_heads(small, 4, tile=True).save_pretrained(tmp_path / "source")
    out = convert_checkpoint(tmp_path / "source", tmp_path / "out", groups=2)
    made = type(small).from_pretrained(out).eval()
    assert (logits_of(made) - logits_of(small)).abs().max() > 1e-2 * logits_of(small).abs().max()


def test_a_fused_type_without_a_row_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model("phi3", 4, 4).save_pretrained(tmp_path / "source")
    monkeypatch.delitem(__import__("headfold.convert.family.family", fromlist=["x"]).FUSED_LAYOUTS, "phi3")
    with pytest.raises(UnsupportedError, match="fused in an order that is not known"):
        convert_checkpoint(tmp_path / "source", tmp_path / "out", groups=2)


def test_falcon_in_its_new_layout_saves_weights_but_no_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = tiny_model("falcon", 4, 2)
    out = _convert_back(small, 4, tmp_path)
    _check_exact(small, out)
    assert json.loads((out / "config.json").read_text())["num_kv_heads"] == 2
    entry = last_entry(out, "convert")
    assert entry is not None
    assert entry["kv_bytes_per_token"] == entry["kv_bytes_per_token_before"] == 2 * 4 * 2 * 16 * 4
    assert "no KV cache" in " ".join(entry["notes"])
    assert "no KV cache" in capsys.readouterr().err


def test_falcon_in_its_old_layouts_has_one_kv_head_or_all(tmp_path: Path) -> None:
    for name, multi_query in (("mqa", True), ("mha", False)):
        config = tiny_config("falcon", 4, 4, new_decoder_architecture=False, multi_query=multi_query)
        new_model("falcon", config).save_pretrained(tmp_path / name)
    before, after = (
        _tensors(folder)
        for folder in (tmp_path / "mqa", convert_checkpoint(tmp_path / "mqa", tmp_path / "same", groups=1))
    )
    assert all(torch.equal(before[name], after[name]) for name in before)
    with pytest.raises(UsageError, match="1 KV head "):
        convert_checkpoint(tmp_path / "mqa", tmp_path / "out", groups=2)
    with pytest.raises(UsageError, match="4 KV heads") as problem:
        convert_checkpoint(tmp_path / "mha", tmp_path / "out", groups=2)
    assert "only 1 or 4" in str(problem.value.hint)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("derived", [True, False])
def test_dbrx_has_its_number_of_kv_heads_in_attn_config(derived: bool, tmp_path: Path) -> None:
    """Newer files repeat the derived number at the top, where caches read it."""
    small = tiny_model("dbrx", 4, 2)
    repeat_kv_heads(small, 4).save_pretrained(tmp_path / "source")
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    config.pop("num_key_value_heads", None)
    if derived:
        config["num_key_value_heads"] = 4
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    made = json.loads((convert_checkpoint(tmp_path / "source", tmp_path / "out", groups=2) / "config.json").read_text())
    assert made["attn_config"] == {**config["attn_config"], "kv_n_heads": 2}
    assert made.get("num_key_value_heads") == (2 if derived else None)
    assert {key for key in made if made[key] != config[key]} <= {"attn_config", "num_key_value_heads"}
    _check_exact(small, tmp_path / "out")


def test_a_norm_over_all_key_heads_shrinks_and_that_of_the_queries_stays(tmp_path: Path) -> None:
    small = tiny_model("olmo2", 8, 2)
    out = _convert_back(small, 8, tmp_path)
    _check_exact(small, out)
    made = _tensors(out)
    assert made["model.layers.0.self_attn.k_norm.weight"].shape == (32,)
    assert made["model.layers.0.self_attn.q_norm.weight"].shape == (128,)
    entry = last_entry(out, "convert")
    assert entry is not None
    assert "approximate" in " ".join(entry["notes"])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("with_text", [True, False])
def test_unrelated_keys_under_a_norm_over_all_heads_become_their_mean(bias: bool, with_text: bool) -> None:
    """Directions exactly, sizes within a few percent; pooling weight and norm apart is off by the root of a group."""
    generator = torch.Generator().manual_seed(0)
    heads, groups, width, hidden = 8, 2, 16, 64
    k_KDC = torch.randn(heads, width, hidden, generator=generator)
    norm_KD = 1 + 0.3 * torch.randn(heads, width, generator=generator)
    k_bias_KD = torch.randn(heads, width, generator=generator) if bias else None
    x_NC = torch.randn(500, hidden, generator=generator) * torch.linspace(0.1, 3, hidden) if with_text else None
    if x_NC is None:
        x_NC = torch.randn(500, hidden, generator=generator)
    x_NE = torch.cat([x_NC, torch.ones(500, 1)], 1).double()
    moment = x_NE.T @ x_NE / 500 if with_text else None

    def keys(rows: Any, bias_XD: Any, weights_XD: Any) -> Any:
        out = torch.einsum("xdc,nc->nxd", rows.double(), x_NC.double()) + (0 if bias_XD is None else bias_XD.double())
        return out / out.square().mean((1, 2), keepdim=True).sqrt() * weights_XD.double()

    def pool(tensor: Any) -> Any:
        return pool_mean(tensor, groups, MethodContext(0))

    wanted = keys(k_KDC, k_bias_KD, norm_KD).unflatten(1, (groups, -1)).mean(2)
    found = keys(*merge_full_width(k_KDC, k_bias_KD, norm_KD, pool, moment))
    naive = keys(pool(k_KDC), None if k_bias_KD is None else pool(k_bias_KD), pool(norm_KD))
    assert torch.allclose(*(side.flatten(1) / side.flatten(1).norm(dim=1, keepdim=True) for side in (found, wanted)))
    assert (found - wanted).norm() < 0.15 * wanted.norm()
    assert (naive - wanted).norm() > 0.7 * wanted.norm()


def test_the_first_head_keeps_its_own_norm() -> None:
    k_KDC, norm_KD = torch.randn(4, 3, 5), torch.tensor([[1.0, -2.0, 3.0]]).repeat(4, 1) * torch.arange(1, 5)[:, None]
    rows, _, norm = merge_full_width(k_KDC, None, norm_KD, lambda heads: pool_first(heads, 2, MethodContext(0)))
    assert torch.allclose(rows, k_KDC[[0, 2]].double())
    assert torch.allclose(norm / norm[:, :1], (norm_KD / norm_KD[:, :1])[[0, 2]].double())


def test_numbered_norms_are_merged_and_renumbered_and_the_rest_dropped(tmp_path: Path) -> None:
    small = tiny_model("stablelm", 8, 2, qk_layernorm=True, use_qkv_bias=True)
    out = _convert_back(small, 8, tmp_path, max_shard_size="1KB")
    _check_exact(small, out)
    kept = {name for name in _tensors(out) if "layers.0.self_attn.k_layernorm" in name}
    assert kept == {f"model.layers.0.self_attn.k_layernorm.norms.{place}.weight" for place in range(2)}
    assert len([name for name in _tensors(out) if "layers.0.self_attn.q_layernorm" in name]) == 8
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert {out / file for file in index["weight_map"].values()} == set(out.glob("*.safetensors"))
    plan = plan_conversion(tmp_path / "source", groups=2)
    assert {kind for _, kind in ((a.name, a.kind) for a in plan.actions.values())} == {"copy", "merge", "drop"}
    assert dict(row[::2] for row in plan.describe())["tensors dropped"] == str(2 * 6)


def test_unrelated_numbered_norms_are_averaged(tmp_path: Path) -> None:
    tiny_model("stablelm", 4, 4, qk_layernorm=True).save_pretrained(tmp_path / "source")
    before = _tensors(tmp_path / "source")
    after = _tensors(convert_checkpoint(tmp_path / "source", tmp_path / "out", groups=2))
    norms = [f"model.layers.1.self_attn.k_layernorm.norms.{head}.weight" for head in range(4)]
    assert torch.allclose(after[norms[0]], (before[norms[0]] + before[norms[1]]) / 2)
    assert torch.allclose(after[norms[1]], (before[norms[2]] + before[norms[3]]) / 2)


@pytest.mark.parametrize(
    ("model_type", "over", "shape"),
    [("cohere", {"use_qk_norm": True}, (2, 16)), ("phi", {"qk_layernorm": True}, (16,))],
)
def test_norms_of_one_head_and_of_all_heads_are_told_apart_by_their_size(
    model_type: str, over: dict[str, Any], shape: tuple[int, ...], tmp_path: Path
) -> None:
    small = tiny_model(model_type, 4, 2, **over)
    out = _convert_back(small, 4, tmp_path)
    _check_exact(small, out)
    norms = [tensor.shape for name, tensor in _tensors(out).items() if "k_norm.weight" in name or "k_layernorm" in name]
    assert set(norms) == {shape}


@pytest.mark.parametrize("model_type", ["qwen3", "olmo2", "cohere"])
def test_norms_are_merged_down_to_one_head_as_well(model_type: str, tmp_path: Path) -> None:
    small = tiny_model(model_type, 4, 1, **({"use_qk_norm": True} if model_type == "cohere" else {}))
    _check_exact(small, _convert_back(small, 4, tmp_path))


@pytest.mark.parametrize(("model_type", "over"), [("cohere", {"use_qk_norm": True}), ("olmo2", {})])
def test_random_heads_get_fresh_norms(model_type: str, over: dict[str, Any], tmp_path: Path) -> None:
    tiny_model(model_type, 4, 4, **over).save_pretrained(tmp_path / "source")
    made = _tensors(convert_checkpoint(tmp_path / "source", tmp_path / "out", groups=2, method="random"))
    assert made["model.layers.0.self_attn.k_norm.weight"].eq(1).all()


HEAD_NORMS = [("cohere", {"use_qk_norm": True}), ("stablelm", {"qk_layernorm": True}), ("olmo2", {})]


@pytest.mark.parametrize(("model_type", "over"), HEAD_NORMS)
def test_values_are_folded_beside_norms_of_every_head(model_type: str, over: dict[str, Any], tmp_path: Path) -> None:
    """Equal heads, each with its values in a basis of its own: `folded` sees through that, `mean` does not."""
    small = tiny_model(model_type, 4, 2, **over)
    wide = repeat_kv_heads(small, 4)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in wide.model.layers:
            attention = layer.self_attn
            for head in range(4):
                rows = slice(16 * head, 16 * head + 16)
                mix = torch.linalg.qr(torch.randn(16, 16, generator=generator))[0] * (1 + 0.5 * head)
                attention.v_proj.weight[rows] = mix @ attention.v_proj.weight[rows]
                attention.o_proj.weight[:, rows] = attention.o_proj.weight[:, rows] @ torch.linalg.inv(mix)
    wide.save_pretrained(tmp_path / "source")
    errors = {}
    for method in ("folded", "mean"):
        out = convert_checkpoint(tmp_path / "source", tmp_path / method, groups=2, method=method)
        made, wanted = logits_of(type(small).from_pretrained(out).eval()), logits_of(small)
        errors[method] = float((made - wanted).abs().max() / wanted.abs().max())
    assert errors["folded"] < 1e-3
    assert errors["mean"] > 1e-2


@pytest.mark.parametrize(
    ("model_type", "over", "grouping"),
    [("falcon", {"alibi": True}, "contiguous"), (*HEAD_NORMS[0], "similarity"), ("llama", {}, "similarity")],
)
def test_default_grouping_is_one_that_the_family_allows(
    model_type: str, over: dict[str, Any], grouping: str, tmp_path: Path
) -> None:
    tiny_model(model_type, 4, 4, **over).save_pretrained(tmp_path)
    assert plan_conversion(tmp_path, groups=2, method="folded", grouping=None).grouping == grouping


def test_layers_that_use_their_keys_as_values_are_merged(tmp_path: Path) -> None:
    small = tiny_model("gemma4_text", 4, 2, attention_k_eq_v=True)
    out = _convert_back(small, 4, tmp_path)
    _check_exact(small, out)
    last = len(small.model.layers) - 1
    assert f"model.layers.{last}.self_attn.k_proj.weight" in _tensors(out)
    assert f"model.layers.{last}.self_attn.v_proj.weight" not in _tensors(out)


def test_another_number_of_kv_heads_in_global_layers_is_refused(tmp_path: Path) -> None:
    tiny_config("gemma4_text", 4, 4).save_pretrained(tmp_path / "source")
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    config.pop("per_layer_config", None)
    config.update(attention_k_eq_v=True, num_global_key_value_heads=2)
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    save_file({"x": torch.zeros(1)}, tmp_path / "source" / "model.safetensors")
    with pytest.raises(UnsupportedError, match="num_global_key_value_heads"):
        convert_checkpoint(tmp_path / "source", tmp_path / "out", groups=2)


def test_two_kinds_of_layers_with_numbers_of_their_own(tmp_path: Path) -> None:
    """Sliding layers with 2 KV heads beside full ones with 4: two groups leave the former as they are, one does not."""
    model = tiny_model("inkling_text", 4, 4, swa_num_key_value_heads=2)
    model.save_pretrained(tmp_path / "source")
    before = _tensors(tmp_path / "source")
    kinds = model.config.layer_types
    for groups, changed in ((2, {"hybrid"}), (1, {"hybrid", "hybrid_sliding"})):
        out = convert_checkpoint(tmp_path / "source", tmp_path / f"out{groups}", groups=groups)
        after = _tensors(out)
        layers = {int(name.split(".")[2]) for name in before if before[name].shape != after[name].shape}
        assert layers == {place for place, kind in enumerate(kinds) if kind in changed}
        config = json.loads((out / "config.json").read_text())
        assert (config["num_key_value_heads"], config["swa_num_key_value_heads"]) == (groups, groups)
        assert torch.isfinite(logits_of(type(model).from_pretrained(out).eval())).all()
    with pytest.raises(UsageError, match="2 KV heads"):
        convert_checkpoint(tmp_path / "source", tmp_path / "out4", groups=4)


def test_a_norm_with_weight_and_bias_of_every_head_is_merged(tmp_path: Path) -> None:
    small = tiny_model("chameleon", 4, 2, vq_config=CHAMELEON_IMAGES, vocabulary_map={"<image>": 10, "IMGIMGAZ": 11})
    out = _convert_back(small, 4, tmp_path)
    _check_exact(small, out)
    norms = {name: tensor.shape for name, tensor in _tensors(out).items() if ".k_norm." in name}
    assert set(norms.values()) == {(2, 16)}
    assert {name.split(".")[-1] for name in norms} == {"weight", "bias"}
