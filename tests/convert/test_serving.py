"""Test the numbers of heads that serving stacks accept: the rules of convert/serving.py, and where they are shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from headfold import cli
from headfold.convert.run import convert_checkpoint
from headfold.convert.serving.devices import SIZES, STACKS, parallel_warnings, placement, shown, slow_kernels
from tiny import tiny_model
from transformers import AutoModelForCausalLM

BY_NAME = {stack.name: stack for stack in STACKS}


def _shown(name: str, heads: int, kv_heads: int) -> str:
    return shown({size: placement(BY_NAME[name], heads, kv_heads, size) for size in SIZES})


@pytest.mark.parametrize(
    ("stack", "heads", "kv_heads", "expected"),
    [
        ("transformers", 32, 32, "1 2 4 8"),
        ("transformers", 32, 2, "1 2"),
        ("vLLM", 32, 2, "1 2 (4 8)"),
        ("SGLang", 32, 1, "1 (2 4 8)"),
        ("TensorRT-LLM", 32, 4, "1 2 4 (8)"),
        ("vLLM", 12, 3, "1"),  # 8 does not divide the queries, 3 and 2 or 4 do not divide one another
        ("vLLM", 12, 6, "1 2"),
        ("llama.cpp", 12, 3, "1 2 4 8"),
        ("vLLM", 71, 1, "1"),
    ],
)
def test_devices_that_a_stack_accepts(stack: str, heads: int, kv_heads: int, expected: str) -> None:
    assert _shown(stack, heads, kv_heads) == expected


def test_every_stack_takes_one_device_and_names_its_source() -> None:
    assert len(STACKS) == 5
    assert all(placement(stack, 7, 7, 1) == "even" and stack.source for stack in STACKS)


def test_group_sizes_without_a_decoding_kernel() -> None:
    assert slow_kernels(32, 8) == []
    assert slow_kernels(32, 2) == ["vLLM", "SGLang"]
    assert slow_kernels(64, 1) == ["vLLM", "SGLang", "TensorRT-LLM"]


@pytest.mark.parametrize(
    ("groups", "devices", "words"),
    [
        (3, 4, ["cannot be distributed over 4 devices", "not a power of two"]),
        (2, 8, ["needs replication, 4 copies of each", "Max TP without KV replication = 2"]),
        (6, 2, ["not a power of two"]),
        (8, 8, []),
        (8, 2, []),
    ],
)
def test_numbers_of_groups_that_do_not_fit_the_devices_are_warned_about(
    groups: int, devices: int, words: list[str]
) -> None:
    found = " | ".join(parallel_warnings(groups, devices))
    assert all(word in found for word in words)
    assert bool(found) == bool(words)


def _run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    return int(ended.value.code or 0)


def test_convert_warns_and_converts(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tiny_model("llama", 12, 12).save_pretrained(tmp_path / "m")
    out = tmp_path / "out"
    assert _run("convert", str(tmp_path / "m"), "--groups", "3", "-o", str(out), "--target-tp", "4") == 0
    shown_text = capfd.readouterr().err.replace("\n", " ")
    assert "warning: 3 KV heads cannot be distributed over 4 devices" in shown_text
    assert "not a power of two" in shown_text
    assert (out / "model.safetensors").exists()


def test_inspect_prints_markdown_and_json(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tiny_model("llama", 4, 4).config.save_pretrained(tmp_path)
    assert _run("inspect", str(tmp_path), "--target-tp", "16") == 0
    printed = capfd.readouterr()
    lines = [line for line in printed.out.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1
    assert lines[1].startswith("| --- | --: |")
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["4", "2", "1"]
    assert "Max TP without KV replication = 2" in printed.err
    assert _run("inspect", str(tmp_path), "--json", "--target-tp", "3") == 0
    found = json.loads(capfd.readouterr().out)
    assert found["cache"][1]["devices"]["vLLM"] == {
        "1": "even",
        "2": "even",
        "3": "refused",
        "4": "copied",
        "8": "refused",
    }


@pytest.mark.parametrize(("model_type", "rows"), [("phi3", 64), ("qwen2", 64), ("cohere", 64)])
def test_inspect_shows_the_cache_that_the_class_holds(
    model_type: str, rows: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = tiny_model(model_type, 4, 4, pad_token_id=0, **({"use_qk_norm": True} if model_type == "cohere" else {}))
    model.config.save_pretrained(tmp_path)
    assert _run("inspect", str(tmp_path), "--json") == 0
    found = json.loads(capfd.readouterr().out)
    assert (found["head_dim"], found["attention_layers"]) == (16, 2)
    with torch.no_grad():
        cache = model(input_ids=torch.ones(1, 5, dtype=torch.long), use_cache=True).past_key_values
    kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert found["cache"][0]["bytes_per_token"] == kept / 5


@pytest.mark.parametrize("groups", [2, 1])
def test_the_result_runs_the_same_by_eager_and_sdpa_and_caches_fewer_heads(groups: int, tmp_path: Path) -> None:
    tiny_model("llama", 8, 8).save_pretrained(tmp_path / "m")
    out = convert_checkpoint(tmp_path / "m", tmp_path / "out", groups=groups)
    ids = torch.randint(5, 200, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0  # left padding
    logits = {}
    for backend in ("eager", "sdpa"):
        model = AutoModelForCausalLM.from_pretrained(out, attn_implementation=backend).eval()
        with torch.no_grad():
            made = model(input_ids=ids, attention_mask=mask, use_cache=True)
        logits[backend] = made.logits[mask.bool()]
        layers = made.past_key_values.layers
        assert all(layer.keys.shape[1] == layer.values.shape[1] == groups for layer in layers)
        per_token = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers) / ids.numel()
        assert per_token == 2 * 2 * groups * 16 * 4  # k and v, 2 layers, width 16, float32
    assert torch.allclose(logits["eager"], logits["sdpa"], atol=1e-5)
    assert model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False).shape == (2, 13)
