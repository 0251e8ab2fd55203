"""The weights that text does not reach, and the tensors that a class does not load, through training."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from headfold.checkpoint.source import Checkpoint
from headfold.uptrain.dry_run import estimate_run
from headfold.uptrain.models.reach import freeze_unreached
from headfold.uptrain.processes.launch import Layout
from headfold.uptrain.run import uptrain_checkpoint
from safetensors.torch import load_file, save_file
from tiny import tiny_model
from torch import nn

SEEING = {
    "gemma3": ["model.multi_modal_projector", "model.vision_tower"],
    "got_ocr2": ["model.multi_modal_projector", "model.vision_tower"],
    "fuyu": ["model.vision_embed_tokens"],
    "phi4_multimodal": ["model.embed_tokens_extend"],
    "llava": ["model.multi_modal_projector", "model.vision_tower"],
    "smolvlm": ["model.connector", "model.vision_model"],
}
"""Types that also see → what text does not reach."""


def _seeing_checkpoint(model_type: str, folder: Path, tokenizer: Path, dtype: torch.dtype) -> Path:
    """Write a tiny model that also sees, with the tokenizer of the tiny text model."""
    tiny_model(model_type, 4, 4).to(dtype).save_pretrained(folder)
    for file in tokenizer.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def _bytes(folder: Path) -> dict[str, bytes]:
    found = {}
    for name, info in Checkpoint.open(folder).tensors.items():
        with info.file.open("rb") as stream:
            stream.seek(info.begin)
            found[name] = stream.read(info.nbytes)
    return found


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("model_type", SEEING)
def test_what_text_does_not_reach_is_frozen(model_type: str, device: str) -> None:
    model = tiny_model(model_type, 4, 4).train()
    if device == "meta":
        with torch.device("meta"):
            model = type(model)(model.config)
    state = torch.get_rng_state()
    frozen = freeze_unreached(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert list(frozen.places) == SEEING[model_type]
    inside = [name for name, weight in model.named_parameters() if not weight.requires_grad]
    assert inside == [name for name, _ in model.named_parameters() if name.startswith(tuple(SEEING[model_type]))]
    assert frozen.parameters == sum(model.get_parameter(name).numel() for name in inside)


@pytest.mark.parametrize(
    "model_type", ["llama", "qwen3_next", "mixtral", "gpt_oss", "qwen2_moe", "olmoe", "deepseek_v3"]
)
def test_nothing_of_a_text_model_is_frozen_experts_without_tokens_among_them(model_type: str) -> None:
    over = {"num_experts": 16} if model_type in ("qwen2_moe", "olmoe") else {}
    model = tiny_model(model_type, 4, 4, **over)
    assert freeze_unreached(model).places == ()


class _Gate(nn.Module):
    """Experts of which each token takes one, in a list as older code keeps them, and one that no code uses."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(64, 64) for _ in range(64)])
        self.left_over = nn.Linear(64, 64)

    def forward(self, states):
        chosen = int(states.detach().abs().sum() * 1000) % len(self.experts)
        return self.experts[chosen](states)


def test_an_expert_that_no_token_was_sent_to_is_trained_and_an_unused_module_is_not() -> None:
    model = tiny_model("llama", 4, 4)
    model.model.layers[1].mlp = _Gate()
    assert freeze_unreached(model).places == ("model.layers.1.mlp.left_over",)
    assert all(weight.requires_grad for weight in model.model.layers[1].mlp.experts.parameters())


@pytest.mark.parametrize(
    ("model_type", "train", "dtype"),
    [("gemma3", "all", torch.bfloat16), ("got_ocr2", "attention", torch.float16), ("fuyu", "all", torch.float32)],
)
def test_towers_are_published_byte_for_byte_and_the_record_names_them(
    model_type, train, dtype, tmp_path, settings, tiny_checkpoint, capfd
) -> None:
    source = _seeing_checkpoint(model_type, tmp_path / "source", tiny_checkpoint, dtype)
    rows = dict(estimate_run(source, settings(train=train), Layout(processes=2, cpu=True)))
    assert SEEING[model_type][-1] in rows["frozen"]
    out = uptrain_checkpoint(source, tmp_path / "out", settings(train=train, steps=3, teacher=None))
    said = capfd.readouterr().err.replace("\n", " ")
    assert f"{SEEING[model_type][-1]}, which text does not reach" in said
    before, after = _bytes(source), _bytes(out)
    assert before.keys() == after.keys()
    changed = {name for name in before if before[name] != after[name]}
    assert changed
    assert not [name for name in changed if re.search("vision|projector", name)]
    entry = json.loads((out / "headfold.json").read_text())["history"][-1]
    assert entry["frozen"] == SEEING[model_type]


@pytest.mark.parametrize("sharded", [False, True])
def test_layers_that_a_class_ignores_on_loading_are_in_the_trained_checkpoint(
    sharded, tmp_path, settings, tiny_checkpoint, capfd
) -> None:
    """Copied byte for byte; the class itself would drop them in silence."""
    source = tmp_path / "source"
    shutil.copytree(tiny_checkpoint, source)
    tensors = load_file(source / "model.safetensors")
    twin = {
        name.replace("model.layers.1.", "mtp.layers.0."): one.clone() for name, one in tensors.items() if ".1." in name
    }
    assert len(twin) > 6
    save_file(tensors | twin, source / "model.safetensors", {"format": "pt"})
    if sharded:
        from headfold import convert_checkpoint

        source = convert_checkpoint(source, tmp_path / "shards", groups=1, max_shard_size="20KB")
    rows = dict(estimate_run(source, settings(), Layout(cpu=True)))
    assert "mtp.layers.0" in rows["copied untrained"]
    out = uptrain_checkpoint(source, tmp_path / "out", settings(steps=3, teacher=None))
    assert "not loaded by its class" in capfd.readouterr().err
    before, after = _bytes(source), _bytes(out)
    assert before.keys() == after.keys()
    assert all(before[name] == after[name] for name in twin)
    assert any(before[name] != after[name] for name in before.keys() - twin.keys())
    entry = json.loads((out / "headfold.json").read_text())["history"][-1]
    assert entry["tensors_copied"] == sorted(twin)
    assert entry["tensors_left_out"] == []
    from headfold.convert.family.verify import verify

    assert verify(out).names == sorted(twin)
