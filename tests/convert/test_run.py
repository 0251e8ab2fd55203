"""Whole conversions: what is on disk afterwards, whatever the source's files look like."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from headfold.checkpoint import write
from headfold.checkpoint.record import last_entry
from headfold.checkpoint.source import INDEX_NAME, Checkpoint
from headfold.convert.calibration.statistics import SOURCE, TOKENS, writing_statistics
from headfold.convert.family.verify import verify
from headfold.convert.run import convert_checkpoint, plan_conversion, run_plan
from headfold.convert.settings import ConvertSettings
from headfold.errors import CheckpointError, HeadfoldError
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import logits_of, repeat_kv_heads, tiny_model
from transformers import AutoModelForCausalLM


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    tiny_model("llama", 8, 8, num_hidden_layers=3).save_pretrained(tmp_path / "m", max_shard_size="150KB")
    assert len(list((tmp_path / "m").glob("*.safetensors"))) >= 3
    return tmp_path / "m"


@pytest.fixture
def single(tmp_path: Path) -> Path:
    tiny_model("llama", 8, 8).save_pretrained(tmp_path / "m")
    return tmp_path / "m"


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def _edit_config(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.update(values)
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def _loads(folder: Path) -> Any:
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    assert torch.isfinite(logits_of(model.eval())).all()
    return model


def test_totals_of_the_index_are_those_of_the_written_tensors(sharded: Path, tmp_path: Path) -> None:
    before = json.loads((sharded / INDEX_NAME).read_text())["metadata"]
    out = convert_checkpoint(sharded, tmp_path / "out", groups=2)
    index, tensors = json.loads((out / INDEX_NAME).read_text()), _tensors(out)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert index["metadata"]["total_parameters"] == sum(tensor.numel() for tensor in tensors.values())
    assert index["metadata"]["total_size"] < before["total_size"]
    assert index["metadata"]["total_parameters"] < before["total_parameters"]
    assert {name: (out / file).exists() for name, file in index["weight_map"].items()} == dict.fromkeys(tensors, True)
    _loads(out)


@pytest.mark.parametrize("lost", ["metadata", "total_size"])
def test_an_index_without_totals_is_read_and_completed(lost: str, sharded: Path, tmp_path: Path) -> None:
    index = json.loads((sharded / INDEX_NAME).read_text())
    (index if lost == "metadata" else index["metadata"]).pop(lost)
    (sharded / INDEX_NAME).write_text(json.dumps(index))
    out = convert_checkpoint(sharded, tmp_path / "out", groups=2)
    assert json.loads((out / INDEX_NAME).read_text())["metadata"]["total_size"] > 0
    _loads(out)


@pytest.mark.parametrize("method", ["mean", "folded"])
def test_any_layout_of_shards_gives_the_same_tensors(method: str, tmp_path: Path) -> None:
    tiny_model("llama", 4, 4, attention_bias=True).save_pretrained(tmp_path / "one")
    tensors = load_file(tmp_path / "one" / "model.safetensors")
    (tmp_path / "many").mkdir()
    shutil.copy(tmp_path / "one" / "config.json", tmp_path / "many")
    weight_map = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        weight_map[name] = f"model-{number:05d}.safetensors"
        save_file({name: tensor}, tmp_path / "many" / weight_map[name], metadata={"format": "pt"})
    (tmp_path / "many" / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    one = _tensors(convert_checkpoint(tmp_path / "one", tmp_path / "a", groups=2, method=method))
    many = _tensors(convert_checkpoint(tmp_path / "many", tmp_path / "b", groups=2, method=method))
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)
    assert one["model.layers.0.self_attn.k_proj.bias"].shape == (32,)
    _loads(tmp_path / "b")


def test_a_stray_single_file_is_not_carried_over(sharded: Path, tmp_path: Path) -> None:
    save_file({"model.norm.weight": torch.zeros(128)}, sharded / "model.safetensors", metadata={"format": "pt"})
    out = convert_checkpoint(sharded, tmp_path / "out", groups=2)
    assert not (out / "model.safetensors").exists()
    assert _loads(out).model.norm.weight.abs().min() > 0


def test_overwrite_leaves_nothing_of_the_old_folder(single: Path, sharded: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model-00001-of-00009.safetensors").write_bytes(b"old")
    out = convert_checkpoint(sharded, tmp_path / "out", groups=2, overwrite=True)
    assert not (out / "model-00001-of-00009.safetensors").exists()


def test_strange_header_metadata_survives(sharded: Path, tmp_path: Path) -> None:
    files = sorted(sharded.glob("*.safetensors"))
    for file, metadata in zip(files, (None, {}, {"format": "np", "mine": "kept"}), strict=False):
        save_file(load_file(file), file, metadata=metadata)
    out = convert_checkpoint(sharded, tmp_path / "out", groups=2)
    for file in out.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            assert opened.metadata()["format"] == "pt"
    with safe_open(out / files[2].name, framework="pt") as opened:
        assert opened.metadata()["mine"] == "kept"
    _loads(out)


def test_a_tied_head_stays_absent(tmp_path: Path) -> None:
    model = tiny_model("llama", 8, 8, num_hidden_layers=3, tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "m", max_shard_size="150KB")
    out = convert_checkpoint(tmp_path / "m", tmp_path / "out", groups=2)
    assert "lm_head.weight" not in json.loads((out / INDEX_NAME).read_text())["weight_map"]
    assert _tensors(out).keys() == _tensors(tmp_path / "m").keys()
    loaded = _loads(out)
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()


def test_a_hub_snapshot_of_links_gives_a_folder_of_its_own(sharded: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for file in sharded.iterdir():
        blob = hashlib.sha256(file.read_bytes()).hexdigest()
        shutil.copy(file, blobs / blob)
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob)
    out = convert_checkpoint(snapshot, tmp_path / "out", groups=2)
    assert all(hashlib.sha256(blob.read_bytes()).hexdigest() == blob.name for blob in blobs.iterdir())
    assert not any(path.is_symlink() for path in out.rglob("*"))
    shutil.rmtree(tmp_path / "hub")
    _loads(out)


def test_remote_code_is_copied_and_never_run(single: Path, tmp_path: Path) -> None:
    mark = f"open({str(tmp_path / 'ran')!r}, 'w').close()\n"
    for name in ("modeling_foo.py", "helper.py"):
        (single / name).write_text(mark)
    _edit_config(single, auto_map={"AutoModelForCausalLM": "modeling_foo.Foo", "AutoConfig": "modeling_foo.FooConfig"})
    out = convert_checkpoint(single, tmp_path / "out", groups=2)
    assert (out / "modeling_foo.py").read_text() == (out / "helper.py").read_text() == mark
    assert "auto_map" in json.loads((out / "config.json").read_text())
    assert not (tmp_path / "ran").exists()


def test_side_files_are_byte_equal(single: Path, tmp_path: Path) -> None:
    side = {
        "tokenizer_config.json": '{"tokenizer_class": "LlamaTokenizerFast"}',
        "generation_config.json": '{"do_sample":false,"temperature":0.9}',
        "chat_template.jinja": "{{ x }}",
        "additional_chat_templates/x.jinja": "y",
        "tokenizer.model": "\x00\xff",
        "preprocessor_config.json": "no json",
        "LICENSE": "text",
    }
    for name, content in side.items():
        (single / name).parent.mkdir(exist_ok=True)
        (single / name).write_bytes(content.encode("latin-1"))
    (single / "original").mkdir()
    for unwanted in ("original/consolidated.00.pth", "pytorch_model.bin", "training_args.bin"):
        (single / unwanted).write_bytes(b"x")
    out = convert_checkpoint(single, tmp_path / "out", groups=2)
    for name, content in side.items():
        assert (out / name).read_bytes() == content.encode("latin-1")
    assert not (out / "original").exists()
    assert not list(out.rglob("*.bin"))


def test_a_full_disk_leaves_nothing(sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = write._copy_range
    calls = []

    def full(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        real(*arguments)

    monkeypatch.setattr(write, "_copy_range", full)
    with pytest.raises(HeadfoldError, match="No space left"):
        convert_checkpoint(sharded, tmp_path / "out", groups=2)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    monkeypatch.undo()
    _loads(convert_checkpoint(sharded, tmp_path / "out", groups=2))


def test_a_source_that_shrinks_after_the_plan_leaves_nothing(sharded: Path, tmp_path: Path) -> None:
    plan = plan_conversion(sharded, groups=2)
    shard = max(sharded.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-64])
    with pytest.raises(HeadfoldError):
        run_plan(plan, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize(
    ("model_type", "present"),
    # A missing key means 32 KV heads to StableLM's class, so such a checkpoint would not load at all.
    [
        *((name, True) for name in ("llama", "phi", "nemotron", "mistral", "stablelm")),
        ("llama", False),
        ("mistral", False),
    ],
)
def test_kv_heads_that_are_null_or_missing_are_as_many_as_query_heads(
    model_type: str, present: bool, tmp_path: Path
) -> None:
    tiny_model(model_type, 8, 8).save_pretrained(tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    config["num_key_value_heads"] = None
    if not present:
        del config["num_key_value_heads"]
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    out = convert_checkpoint(tmp_path / "m", tmp_path / "out", groups=2)
    assert json.loads((out / "config.json").read_text())["num_key_value_heads"] == 2
    _loads(out)


V4 = {
    "rope_theta": 500000.0,
    "rope_scaling": {"type": "linear", "factor": 2.0},
    "torch_dtype": "float32",
    "_my_key": 1e-5,
}


@pytest.mark.parametrize("dialect", ["v4", "v5"])
def test_the_config_keeps_its_dialect(dialect: str, single: Path, tmp_path: Path) -> None:
    config = json.loads((single / "config.json").read_text())
    if dialect == "v4":
        for key in ("rope_parameters", "dtype", "head_dim"):
            del config[key]
        config.update(V4)
    else:
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6}
    (single / "config.json").write_text(json.dumps(config, indent=4))
    out = convert_checkpoint(single, tmp_path / "out", groups=2)
    made = json.loads((out / "config.json").read_text())
    assert {key for key in made if made[key] != config.get(key)} == {"num_key_value_heads"}
    assert list(made) == list(config)
    lines = zip(
        (single / "config.json").read_text().splitlines(), (out / "config.json").read_text().splitlines(), strict=True
    )
    assert [after.strip() for before, after in lines if before != after] == ['"num_key_value_heads": 2,']
    _loads(out)


@pytest.mark.parametrize(
    "named", [{"dtype": "float32"}, {"torch_dtype": "float16"}, {"dtype": "float32", "torch_dtype": "float16"}, {}]
)
def test_the_tensors_decide_on_the_dtype(named: dict[str, str], single: Path, tmp_path: Path) -> None:
    save_file(
        {k: t.bfloat16() for k, t in load_file(single / "model.safetensors").items()}, single / "model.safetensors"
    )
    config = json.loads((single / "config.json").read_text())
    config.pop("dtype")
    (single / "config.json").write_text(json.dumps({**config, **named}))
    out = convert_checkpoint(single, tmp_path / "out", groups=2)
    assert {tensor.dtype for tensor in _tensors(out).values()} == {torch.bfloat16}


def test_the_config_always_carries_an_integer(single: Path, tmp_path: Path) -> None:
    config = json.loads((single / "config.json").read_text())
    del config["num_key_value_heads"]
    (single / "config.json").write_text(json.dumps(config))
    out = convert_checkpoint(single, tmp_path / "out", groups=8)
    assert json.loads((out / "config.json").read_text())["num_key_value_heads"] == 8


def test_verify_names_tensors_that_disagree_with_the_config(tmp_path: Path) -> None:
    tiny_model("llama", 4, 4).save_pretrained(tmp_path / "m")
    out = convert_checkpoint(tmp_path / "m", tmp_path / "out", groups=1)
    assert verify(out).names == []
    _edit_config(out, num_key_value_heads=4)
    with pytest.raises(CheckpointError, match=r"k_proj.*\(16, 64\).*\(64, 64\)"):
        verify(out)


def test_verify_names_missing_tensors(single: Path) -> None:
    tensors = load_file(single / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, single / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="up_proj"):
        verify(single)


def test_tensors_that_the_class_does_not_use_are_kept_and_noted(single: Path, tmp_path: Path) -> None:
    save_file({**load_file(single / "model.safetensors"), "mtp.x": torch.ones(3)}, single / "model.safetensors")
    out = convert_checkpoint(single, tmp_path / "out", groups=2)
    assert _tensors(out)["mtp.x"].tolist() == [1, 1, 1]
    entry = last_entry(out, "convert")
    assert entry is not None
    assert any("mtp.x" in note for note in entry["notes"])


def test_base_model_without_prefix(tmp_path: Path) -> None:
    model = tiny_model("llama", 4, 4)
    model.model.save_pretrained(tmp_path / "m")
    out = convert_checkpoint(tmp_path / "m", tmp_path / "out", groups=2)
    assert _tensors(out)["layers.0.self_attn.k_proj.weight"].shape == (32, 64)


def test_the_plan_is_what_the_run_does(sharded: Path, tmp_path: Path) -> None:
    plan = plan_conversion(sharded, groups=2, method="folded")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m"]
    out = convert_checkpoint(sharded, tmp_path / "out", groups=2, method="folded")
    before, after = _tensors(sharded), _tensors(out)
    assert set(plan.actions) == set(before)
    for name, action in plan.actions.items():
        assert after[name].shape == action.shape
        same = before[name].shape == after[name].shape and torch.equal(before[name], after[name])
        assert same == (action.kind == "copy"), name
    assert plan.config_text == (out / "config.json").read_text()
    assert plan.weight_bytes == sum(tensor.nbytes for tensor in after.values())
    rows = {what: (source, result) for what, source, result in plan.describe()}
    assert rows["KV heads of 8 query heads"] == ("8", "2")
    assert rows["KV cache per token"] == ("3.00 KiB", "768 B")  # 2 · 3 layers · heads · 16 · 4 bytes
    assert rows["config.json: num_key_value_heads"] == ("8", "2")


@pytest.mark.parametrize(
    ("method", "grouping"), [("folded", "similarity"), ("mean", "similarity"), ("aligned", "contiguous")]
)
def test_methods_that_rewrite_queries_run_and_their_results_load(
    method: str, grouping: str, single: Path, tmp_path: Path
) -> None:
    out = convert_checkpoint(single, tmp_path / "out", groups=2, method=method, grouping=grouping)
    _loads(out)
    changed = [
        n
        for n, t in _tensors(out).items()
        if t.shape != _tensors(single)[n].shape or not torch.equal(t, _tensors(single)[n])
    ]
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_equal_heads_in_another_order_are_found_by_similarity(tmp_path: Path) -> None:
    small = tiny_model("llama", 4, 2)
    wide = repeat_kv_heads(small, 4)
    order = [0, 2, 1, 3]  # now heads 0 and 2, and 1 and 3, are equal
    with torch.no_grad():
        for layer in wide.model.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
                projection.weight.copy_(projection.weight.reshape(4, 16, 64)[order].reshape(64, 64))
            columns = layer.self_attn.o_proj.weight.reshape(64, 4, 16)[:, order].reshape(64, 64)
            layer.self_attn.o_proj.weight.copy_(columns)
    wide.save_pretrained(tmp_path / "m")
    right = convert_checkpoint(tmp_path / "m", tmp_path / "right", groups=2, method="mean", grouping="similarity")
    wrong = convert_checkpoint(tmp_path / "m", tmp_path / "wrong", groups=2, method="mean")
    wanted = logits_of(small)
    assert torch.allclose(logits_of(_loads(right).eval()), wanted, atol=1e-4)
    assert (logits_of(_loads(wrong).eval()) - wanted).abs().max() > 1e-2


def test_the_record_says_how_the_result_was_made(single: Path, tmp_path: Path) -> None:
    half = convert_checkpoint(single, tmp_path / "half", groups=4)
    out = convert_checkpoint(half, tmp_path / "out", groups=2, method="random", seed=3)
    history = json.loads((out / "headfold.json").read_text())["history"]
    assert [entry["kv_heads"] for entry in history] == [4, 2]
    assert ConvertSettings.restored(history[-1]["settings"]).groups == 2
    assert history[1]["source_digest"] == Checkpoint.open(half).digest()
    assert history[1] | {"method": "random", "seed": 3, "kv_heads_before": 4, "model_type": "llama"} == history[1]


def test_statistics_of_another_checkpoint_are_refused(single: Path, tmp_path: Path) -> None:
    metadata = {SOURCE: Checkpoint.open(single).digest(), TOKENS: "8"}
    with writing_statistics(tmp_path / "stats", [128, 128], metadata) as sums:
        for layer in range(2):
            sums.add(layer, torch.randn(8, 128) * torch.linspace(0.01, 3, 128))
    with_data = convert_checkpoint(single, tmp_path / "a", groups=2, method="folded", statistics=tmp_path / "stats")
    without = convert_checkpoint(single, tmp_path / "b", groups=2, method="folded")
    name = "model.layers.0.self_attn.v_proj.weight"
    assert not torch.allclose(_tensors(with_data)[name], _tensors(without)[name], atol=1e-3)
    other = tmp_path / "other"
    tiny_model("llama", 8, 8, seed=1).save_pretrained(other)
    with pytest.raises(HeadfoldError, match="another checkpoint"):
        convert_checkpoint(other, tmp_path / "c", groups=2, method="folded", statistics=tmp_path / "stats")
    assert not (tmp_path / "c").exists()
