"""Layers that a class drops on loading, such as those of multi-token prediction."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from headfold import cli
from headfold.convert.check import check_checkpoint
from headfold.convert.family.verify import verify
from headfold.convert.run import convert_checkpoint
from headfold.errors import CheckpointError, UnsupportedError
from safetensors.torch import load_file, save_file
from tiny import tiny_model

GLM = ("glm4_moe", "model.layers.46.", {"first_k_dense_replace": 1, "use_qk_norm": True})
"""Types that ignore such layers, the prefix of one on disk, and settings."""
KINDS = [
    GLM,
    ("qwen3_next", "mtp.layers.0.", {"num_hidden_layers": 4}),
    ("exaone_moe", "mtp.layers.0.", {}),
    ("ernie4_5_moe", "model.mtp_block.0.", {}),
    ("llama", "mtp.layers.0.", {}),  # the class reports these
]


def _source(folder: Path, model_type: str, prefix: str, over: dict, kv_heads: int = 4) -> dict[str, torch.Tensor]:
    """Write a checkpoint whose last softmax layer stands once more under another prefix. Returns its tensors."""
    tiny_model(model_type, 4, kv_heads, **over).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    key = [name for name in tensors if name.endswith("self_attn.k_proj.weight")][-1]
    place = key.removesuffix("self_attn.k_proj.weight")
    twins = {name: one.clone() for name, one in tensors.items() if name.startswith(place)}
    tensors |= {prefix + name.removeprefix(place): one for name, one in twins.items()}
    extra = prefix.split(".layers.")[0].split(".mtp_block")[0] if "layers.46" not in prefix else prefix.rstrip(".")
    tensors[f"{extra}.eh_proj.weight"] = torch.ones(3, 5)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return tensors


REWRITABLE = ("llama", "exaone_moe", "ernie4_5_moe", "glm4_moe")
"""Types for which folding is exact."""


@pytest.mark.parametrize("method", ["mean", "folded"])
@pytest.mark.parametrize(("model_type", "prefix", "over"), KINDS, ids=[kind[0] for kind in KINDS])
def test_layers_that_a_class_ignores_on_loading_get_as_many_kv_heads_as_the_others(
    model_type: str, prefix: str, over: dict, method: str, tmp_path: Path
) -> None:
    before = _source(tmp_path / "source", model_type, prefix, over)
    settings = {"groups": 2, "method": method, "grouping": "contiguous"}
    if method == "folded" and model_type not in REWRITABLE:
        with pytest.raises(UnsupportedError, match="would not be exact"):
            convert_checkpoint(tmp_path / "source", tmp_path / "out", **settings)
        return
    out = convert_checkpoint(tmp_path / "source", tmp_path / "out", **settings)
    after = load_file(out / "model.safetensors")
    key = [name for name in before if name.endswith("self_attn.k_proj.weight") and not name.startswith(prefix)][-1]
    place = key.removesuffix("self_attn.k_proj.weight")
    twins = [name.removeprefix(prefix) for name in before if name.startswith(f"{prefix}self_attn.")]
    assert len(twins) >= 4
    for name in twins:  # equal before, so equal after
        assert torch.equal(after[prefix + name], after[place + name]), name
    assert after[f"{prefix}self_attn.k_proj.weight"].shape[0] == before[key].shape[0] // 2
    rest = [name for name in before if name not in {prefix + twin for twin in twins} and name.startswith(prefix)]
    assert rest
    assert all(torch.equal(after[name], before[name]) for name in rest)
    check_checkpoint(out)
    entry = json.loads((out / "headfold.json").read_text())["history"][-1]
    assert any("ignores" in note and "self_attn" in note for note in entry["notes"])
    assert f"{prefix}self_attn.k_proj.weight" in entry["tensors_unused"]


FURTHER: dict[str, tuple[str, dict]] = {
    "exaone4_5": ("mtp.layers.0.", {}),
    "glm4v_moe": ("model.layers.46.", {}),
    "glm_ocr": ("model.language_model.layers.16.", {}),
    "hy_v3": ("model.layers.80.", {}),
    "inkling_text": ("model.mtp.layers.0.", {}),
    "inkling_mm_model": ("model.mtp.layers.0.", {}),
    "mellum": ("mtp.layers.0.", {}),
    "minimax_m3_vl_text": ("mtp.layers.0.", {}),
    "nemotron_h": ("mtp.layers.0.", {}),
    "olmo_hybrid": ("mtp.layers.0.", {}),
    "qwen3_5_text": ("mtp.layers.0.", {}),
    "qwen3_5_moe_text": ("mtp.layers.0.", {}),
    "qwen4_exp_text": ("mtp.layers.0.", {}),
    "sarvam_moe": ("model.layers.46.", {}),
    "step3p7": ("model.layers.2.", {"text_config": {"num_nextn_predict_layers": 1}}),
}
"""All further types of transformers 5.24 whose class ignores layers on loading and that can be converted."""
FOLDERS = {
    *("exaone_moe", "ernie4_5_moe", "glm4_moe", "qwen3_next", "exaone4_5", "glm4v_moe", "glm_ocr", "hy_v3", "inkling"),
    *("mellum", "minimax_m3_vl", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "step3p7"),
}
"""Their folders in transformers."""
NO_KV_HEADS = {
    *("bailing_hybrid", "deepseek_v3", "deepseek_v32", "deepseek_v4", "dots3_note", "glm4_moe_lite", "glm5_next"),
    *("glm_moe_dsa", "hy_v4", "hy_v4_vl", "longcat_flash", "mistral_large4", "mimo_v2_flash"),
}
"""Folders of types that ignore layers and are refused whole: latent attention, or heads that differ by layer."""
OTHERS = {
    "gemma3n",  # keys and values of layers that take those of others
    "gemma4",
    "cosmos3_edge",  # a generator's parts of every layer
    "granite_docling",  # its class joins qwen3_5's
    "nemotron3_5_transcribe",  # hears, and has no language model class
}


def test_every_class_of_transformers_that_ignores_layers_is_known_here() -> None:
    """A new one fails here. Then give it a row above."""
    import transformers

    found = set()
    for file in (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"):
        text = file.read_text(encoding="utf-8")
        # the rest of the statement, or of the lines that fill it
        for match in re.finditer(r"_keys_to_ignore_on_load_unexpected\b[^\n]*=(?:[^\n]*\n){1,4}", text):
            if re.search(r"mtp|layers\\+\.", match[0]) and "def forward" not in match[0]:
                found.add(file.parent.name)
    assert len(found) > 20
    assert found - FOLDERS - NO_KV_HEADS - OTHERS == set()


@pytest.mark.parametrize("model_type", FURTHER)
def test_every_type_that_ignores_layers_converts_them(model_type: str, tmp_path: Path) -> None:
    prefix, over = FURTHER[model_type]
    tiny_model(model_type, 4, 4, **over).save_pretrained(tmp_path / "source")
    before = load_file(tmp_path / "source" / "model.safetensors")
    keys = r"(.*(?<!visual)(?<!vision_model)\.layers\.\d+\.)\w+\.(k_proj|wk_dv|query_key_value)\.weight"
    place = [match[1] for match in map(re.compile(keys).fullmatch, before) if match][-1]
    twins = {prefix + name.removeprefix(place): one.clone() for name, one in before.items() if name.startswith(place)}
    assert not twins.keys() & before.keys()
    save_file(before | twins, tmp_path / "source" / "model.safetensors", {"format": "pt"})
    out = convert_checkpoint(tmp_path / "source", tmp_path / "out", groups=2)
    after = load_file(out / "model.safetensors")
    changed = [name for name in twins if after[name].shape != twins[name].shape]
    assert changed
    assert all(torch.equal(after[name], after[place + name.removeprefix(prefix)]) for name in twins)
    check_checkpoint(out)


def test_keys_of_layers_that_take_those_of_others_are_merged_as_well(tmp_path: Path) -> None:
    """Gemma 3n has them on disk, and other runtimes load them."""
    kinds = ["sliding_attention"] * 4 + ["full_attention"]
    many = {"layer_types": kinds * 2, "intermediate_size": [64] * 10, "activation_sparsity_pattern": [0.0] * 10}
    over = {"num_hidden_layers": 10, "num_kv_shared_layers": 5, **many}
    tiny_model("gemma3n_text", 4, 4, **over).save_pretrained(tmp_path / "source")
    before = load_file(tmp_path / "source" / "model.safetensors")
    assert "model.layers.9.self_attn.k_proj.weight" not in before
    parts = [name.split("layers.4.")[1] for name in before if "layers.4.self_attn.k" in name or "4.self_attn.v" in name]
    unused = {f"model.layers.9.{part}": before[f"model.layers.4.{part}"].clone() for part in parts}
    assert len(unused) >= 3
    save_file(before | unused, tmp_path / "source" / "model.safetensors", {"format": "pt"})
    out = convert_checkpoint(tmp_path / "source", tmp_path / "out", groups=2)
    after = load_file(out / "model.safetensors")
    assert after["model.layers.9.self_attn.k_proj.weight"].shape[0] == 2 * 16
    assert all(torch.equal(after[name], after[name.replace("layers.9", "layers.4")]) for name in unused)
    check_checkpoint(out)
    key = "model.layers.9.self_attn.k_proj.weight"
    save_file(after | {key: before[key.replace("9", "4")]}, out / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=re.escape(key)):
        check_checkpoint(out)


@pytest.mark.parametrize("grouping", ["contiguous", "similarity"])
def test_the_method_sees_no_text_of_an_ignored_layer_but_the_others_do(grouping, tmp_path, text_file, tiny_checkpoint):
    """With statistics of text for its twin: the two differ, and the terminal and the record say why."""
    import shutil

    _source(tmp_path / "source", "llama", "mtp.layers.0.", {})
    for file in tiny_checkpoint.glob("tokenizer*"):
        shutil.copy(file, tmp_path / "source")
    settings = {"calibration": str(text_file), "calibration_tokens": 300, "sequence_length": 16, "refine": 0}
    with_text, without = (
        convert_checkpoint(tmp_path / "source", tmp_path / name, groups=2, method="folded", grouping=grouping, **extra)
        for name, extra in (("with", settings), ("without", {}))
    )
    one, other = (load_file(folder / "model.safetensors") for folder in (with_text, without))
    key = "self_attn.k_proj.weight"
    assert torch.equal(one[f"mtp.layers.0.{key}"], other[f"mtp.layers.0.{key}"])
    assert not torch.equal(one[f"model.layers.1.{key}"], other[f"model.layers.1.{key}"])
    notes = json.loads((with_text / "headfold.json").read_text())["history"][-1]["notes"]
    assert any("without statistics of text" in note for note in notes)


@pytest.mark.parametrize(("model_type", "prefix", "over"), KINDS, ids=[kind[0] for kind in KINDS])
def test_check_fails_where_an_older_headfold_left_the_old_kv_heads(
    model_type: str, prefix: str, over: dict, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = _source(tmp_path / "source", model_type, prefix, over)
    out = convert_checkpoint(tmp_path / "source", tmp_path / "out", groups=1)
    after = load_file(out / "model.safetensors")
    stale = {name: before[name] for name in before if name.startswith(prefix)}
    save_file(after | stale, out / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="different numbers of KV heads") as problem:
        verify(out)
    assert f"{prefix}self_attn.k_proj.weight" in str(problem.value)
    with pytest.raises(SystemExit) as ended:
        cli.main(["check", str(out)])
    assert ended.value.code == 1
    assert "Traceback" not in capfd.readouterr().err


def test_an_ignored_layer_of_another_layout_is_refused_by_name(tmp_path: Path) -> None:
    tensors = _source(tmp_path / "source", *GLM)
    tensors["model.layers.46.self_attn.k_gate.weight"] = torch.ones(4)
    save_file(tensors, tmp_path / "source" / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedError, match=r"model\.layers\.46\.self_attn") as problem:
        convert_checkpoint(tmp_path / "source", tmp_path / "out", groups=2)
    assert "num_nextn_predict_layers" in str(problem.value.hint)
    assert not (tmp_path / "out").exists()


def test_an_ignored_layer_with_other_kv_heads_is_refused_by_name(tmp_path: Path) -> None:
    tensors = _source(tmp_path / "source", *GLM)
    for side in "kv":
        name = f"model.layers.46.self_attn.{side}_proj.weight"
        tensors[name] = tensors[name][:32].clone()
    bias = {name for name in tensors if name.startswith("model.layers.46.self_attn") and name.endswith("_proj.bias")}
    tensors |= {name: tensors[name][:32].clone() for name in bias if ".q_proj" not in name}
    save_file(tensors, tmp_path / "source" / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedError, match=r"model\.layers\.46\.self_attn"):
        convert_checkpoint(tmp_path / "source", tmp_path / "out", groups=2)


def test_further_keys_inside_a_layer_of_the_class_are_refused_by_name(tmp_path: Path) -> None:
    """Generators of images keep their own keys beside those of the text (add_k_proj)."""
    tiny_model("llama", 4, 4).save_pretrained(tmp_path / "source")
    tensors = load_file(tmp_path / "source" / "model.safetensors")
    tensors["model.layers.0.self_attn.add_k_proj.weight"] = torch.ones(64, 64)
    save_file(tensors, tmp_path / "source" / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedError, match="add_k_proj"):
        convert_checkpoint(tmp_path / "source", tmp_path / "out", groups=2)


def test_ignored_attention_of_another_model_is_copied_and_named(tmp_path: Path) -> None:
    """Its queries have another width, so its KV heads are not those of config.json."""
    tiny_model("qwen3_next", 4, 4, num_hidden_layers=4).save_pretrained(tmp_path / "source")
    tensors = load_file(tmp_path / "source" / "model.safetensors")
    shapes = {"q": (48, 24), "k": (48, 24), "v": (48, 24), "o": (24, 48)}
    foreign = {f"mtp_tower.layers.0.self_attn.{side}_proj.weight": torch.randn(shape) for side, shape in shapes.items()}
    save_file(tensors | foreign, tmp_path / "source" / "model.safetensors", {"format": "pt"})
    out = convert_checkpoint(tmp_path / "source", tmp_path / "out", groups=2)
    after = load_file(out / "model.safetensors")
    assert all(torch.equal(after[name], one) for name, one in foreign.items())
    notes = json.loads((out / "headfold.json").read_text())["history"][-1]["notes"]
    assert any("4 tensors" in note and "copied as they are" in note for note in notes)
    check_checkpoint(out)
