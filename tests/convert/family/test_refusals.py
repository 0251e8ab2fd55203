"""Checkpoints that cannot be converted correctly are refused by name, before anything is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from headfold.convert.family.family import check_groups
from headfold.convert.family.refusals import REFUSED
from headfold.convert.run import convert_checkpoint
from headfold.errors import CheckpointError, HeadfoldError, UnsupportedError, UsageError
from safetensors.torch import load_file, save_file
from tiny import tiny_config, tiny_model


def _save(model_type: str, folder: Path, heads: int = 4, kv_heads: int = 4, **over: Any) -> Path:
    tiny_model(model_type, heads, kv_heads, **over).save_pretrained(folder)
    return folder


def _edit_config(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.update(values)
    (folder / "config.json").write_text(json.dumps(config))


def _rewrite(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors), folder / "model.safetensors", metadata={"format": "pt"})


def _refused(source: Path, kind: type[HeadfoldError], match: str, groups: int = 2, **options: Any) -> HeadfoldError:
    out = source.parent / "out"
    before = sorted(source.parent.iterdir())
    with pytest.raises(kind, match=match) as problem:
        convert_checkpoint(source, out, groups=groups, **options)
    assert sorted(source.parent.iterdir()) == before
    assert "\n" not in problem.value.message
    return problem.value


@pytest.mark.parametrize("model_type", ["biogpt", "xglm", "ctrl"])
def test_types_without_a_kv_setting_are_refused(model_type: str, tmp_path: Path) -> None:
    problem = _refused(_save(model_type, tmp_path / "m"), UnsupportedError, "no setting")
    assert model_type in problem.message
    assert "llama" in str(problem.hint)


def test_a_kv_key_that_the_class_ignores_is_refused(tmp_path: Path) -> None:
    source = _save("biogpt", tmp_path / "m")
    _edit_config(source, num_key_value_heads=4)
    _refused(source, UnsupportedError, "BioGptForCausalLM ignores num_key_value_heads")


@pytest.mark.parametrize("model_type", ["deepseek_v3", "minicpm3"])
def test_latent_attention_is_refused(model_type: str, tmp_path: Path) -> None:
    source = tmp_path / "m"
    tiny_config(model_type, 4, 4).save_pretrained(source)
    save_file({"x": torch.zeros(1)}, source / "model.safetensors")
    _refused(source, UnsupportedError, "latent attention")


def test_an_odd_number_of_groups_is_refused_where_values_are_halved(tmp_path: Path) -> None:
    _refused(_save("diffllama", tmp_path / "m"), UnsupportedError, "to be even", groups=1)


def test_a_parameter_of_unknown_kind_that_depends_on_the_number_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parameter of no known kind that follows the number of KV heads is refused, whatever its type."""
    monkeypatch.delitem(REFUSED, "doge")
    _refused(_save("doge", tmp_path / "m"), UnsupportedError, r"(dt_proj|self_attn\.A).* also depends on the number")


@pytest.mark.parametrize("model_type", sorted(REFUSED))
def test_every_type_in_the_table_of_refusals_is_refused(model_type: str, tmp_path: Path) -> None:
    source = tmp_path / "m"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({"model_type": model_type}))
    save_file({"x": torch.zeros(1)}, source / "model.safetensors")
    _refused(source, UnsupportedError, f"{model_type} cannot be converted")


@pytest.mark.parametrize("extra", [{}, {"auto_map": {"AutoConfig": "configuration_chatglm.ChatGLMConfig"}}])
def test_unknown_types_are_refused_and_never_guessed(extra: dict[str, Any], tmp_path: Path) -> None:
    source = _save("llama", tmp_path / "m")
    _edit_config(source, model_type="chatglm", multi_query_group_num=2, **extra)
    _refused(source, UnsupportedError, "chatglm")
    _edit_config(source, model_type=None)
    _refused(source, UnsupportedError, "no model_type")


@pytest.mark.parametrize(
    ("heads", "groups", "counts"), [(7, 2, "1 or 7"), (8, 3, "1, 2, 4, 8"), (71, 3, "only 1 or 71")]
)
def test_the_possible_numbers_of_groups_are_named(heads: int, groups: int, counts: str) -> None:
    with pytest.raises(UsageError) as problem:
        check_groups(groups, heads)
    assert counts in str(problem.value.hint)
    check_groups(4, 12)


@pytest.mark.parametrize("groups", [8, 16, 3])
def test_groups_that_do_not_divide_the_kv_heads_are_refused(groups: int, tmp_path: Path) -> None:
    problem = _refused(_save("llama", tmp_path / "m", 8, 4), UsageError, "4 KV heads", groups=groups)
    assert "1, 2, 4" in str(problem.hint)
    assert problem.exit_code == 2


@pytest.mark.parametrize("groups", [0, -1])
def test_groups_below_one_are_refused(groups: int, tmp_path: Path) -> None:
    problem = _refused(_save("llama", tmp_path / "m", 8, 4), UsageError, "--groups .*greater than 0", groups=groups)
    assert problem.exit_code == 2


@pytest.mark.parametrize(
    "extra",
    [
        {"per_layer_config": {"1": {"num_key_value_heads": 2}}},
        {"num_key_value_heads_per_layer": [8, 4]},
        {"num_kv_heads": [8, 4]},
        {"block_configs": [{"attention": {"num_key_value_heads": 2}}]},
    ],
)
def test_kv_heads_that_differ_from_layer_to_layer_are_refused(extra: dict[str, Any], tmp_path: Path) -> None:
    source = _save("llama", tmp_path / "m")
    _edit_config(source, **extra)
    _refused(source, UnsupportedError, "from layer to layer")


def test_quantised_weights_are_refused_by_config_and_by_tensors(tmp_path: Path) -> None:
    source = _save("llama", tmp_path / "m")
    _edit_config(source, quantization_config={"quant_method": "gptq"})
    problem = _refused(source, UnsupportedError, "quantised")
    assert "quantised from" in str(problem.hint)
    _edit_config(source, quantization_config=None)
    _rewrite(source, lambda t: {**t, "model.layers.0.self_attn.k_proj.qweight": torch.zeros(4, 4, dtype=torch.int32)})
    _refused(source, UnsupportedError, "qweight")


@pytest.mark.parametrize("suffix", ["weight_scale_inv", "scale", "weight_scale"])
def test_fp8_weights_are_refused(suffix: str, tmp_path: Path) -> None:
    source = _save("llama", tmp_path / "m")
    name = "model.layers.0.self_attn.k_proj"

    def quantise(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        codes = tensors[f"{name}.weight"].to(torch.float8_e4m3fn)
        return {**tensors, f"{name}.weight": codes, f"{name}.{suffix}": torch.ones(1)}

    _rewrite(source, quantise)
    _refused(source, UnsupportedError, "k_proj")


def test_a_scale_beside_a_plain_weight_is_refused(tmp_path: Path) -> None:
    source = _save("llama", tmp_path / "m")
    _rewrite(source, lambda t: {**t, "model.layers.0.self_attn.k_proj.weight_scale_inv": torch.ones(1)})
    _refused(source, UnsupportedError, "weight_scale_inv")


@pytest.mark.parametrize("with_absmax", [True, False])
def test_bitsandbytes_codes_are_refused(with_absmax: bool, tmp_path: Path) -> None:
    source = _save("llama", tmp_path / "m")
    name = "model.layers.0.self_attn.k_proj.weight"
    absmax = {f"{name}.absmax": torch.ones(4)} if with_absmax else {}
    _rewrite(source, lambda t: {**t, name: torch.zeros(2048, 1, dtype=torch.uint8), **absmax})
    _refused(source, UnsupportedError, "quantised")


def test_fused_tensors_under_a_type_with_separate_ones_are_refused(tmp_path: Path) -> None:
    source = _save("llama", tmp_path / "m")

    def pack(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        kept = {
            name: t for name, t in tensors.items() if not any(side in name for side in ("q_proj", "k_proj", "v_proj"))
        }
        return {**kept, **{f"model.layers.{i}.self_attn.W_pack.weight": torch.zeros(192, 64) for i in range(2)}}

    _rewrite(source, pack)
    _refused(source, UnsupportedError, "W_pack")


def test_missing_layers_are_counted(tmp_path: Path) -> None:
    source = _save("llama", tmp_path / "m")
    _rewrite(source, lambda t: {name: tensor for name, tensor in t.items() if "layers.1.self_attn.k_proj" not in name})
    _refused(source, CheckpointError, "Expected 4 key and value tensors")


def test_the_config_of_another_checkpoint_is_refused(tmp_path: Path) -> None:
    source = _save("llama", tmp_path / "m", 4, 2)
    _edit_config(source, num_key_value_heads=4)
    _refused(source, CheckpointError, r"k_proj.weight has shape \[32, 64\], but config.json asks for \[64, 64\]")


def test_a_bias_that_the_config_denies_is_refused(tmp_path: Path) -> None:
    source = _save("llama", tmp_path / "m", attention_bias=True)
    _edit_config(source, attention_bias=False)
    _refused(source, CheckpointError, "has no bias")


def test_missing_weight_elsewhere_is_found_before_the_copying(tmp_path: Path) -> None:
    source = _save("llama", tmp_path / "m")
    _rewrite(source, lambda t: {name: tensor for name, tensor in t.items() if name != "model.norm.weight"})
    _refused(source, CheckpointError, "model.norm.weight")


@pytest.mark.parametrize("values", [{"hidden_size": "x"}, {"num_attention_heads": 0}, {"num_hidden_layers": -1}])
def test_senseless_config_values_are_refused(values: dict[str, Any], tmp_path: Path) -> None:
    source = _save("llama", tmp_path / "m")
    _edit_config(source, **values)
    _refused(source, HeadfoldError, "config.json|settings")


def test_an_unknown_method_or_grouping_is_refused(tmp_path: Path) -> None:
    source = _save("llama", tmp_path / "m")
    _refused(source, UsageError, "no method", method="median")
    _refused(source, UsageError, "--grouping random: .*'contiguous' or 'similarity'", grouping="random")


@pytest.mark.parametrize("model_type", ["bitnet", "qwen3_next"])
def test_methods_that_rewrite_queries_refuse_where_they_are_not_exact(model_type: str, tmp_path: Path) -> None:
    source = _save(model_type, tmp_path / "m")
    for method in ("folded", "aligned"):
        _refused(source, UnsupportedError, "not be exact", method=method)


def test_an_output_in_the_way_is_refused(tmp_path: Path) -> None:
    source = _save("llama", tmp_path / "m")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "x").write_text("x")
    _refused(source, UsageError, "not empty")
    for out in (source, source / "inside", tmp_path):
        with pytest.raises(UsageError):
            convert_checkpoint(source, out, groups=2, overwrite=True)
    assert (source / "model.safetensors").exists()
    assert not (source / "inside").exists()


def test_a_disk_without_room_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = _save("llama", tmp_path / "m")
    monkeypatch.setattr("shutil.disk_usage", lambda place: type("Usage", (), {"free": 1000})())
    _refused(source, HeadfoldError, "only 1000 B are free")
