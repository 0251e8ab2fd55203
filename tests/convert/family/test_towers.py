"""Models of several parts: only the text decoder changes, in the files and in config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from headfold.convert.run import convert_checkpoint
from safetensors.torch import load_file
from tiny import randomise, repeat_kv_heads

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": 300,
    "max_position_embeddings": 64,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAVA_VISION = {
    "model_type": "clip_vision_model",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "image_size": 28,
    "patch_size": 14,
    "projection_dim": 64,
}
QWEN_VISION = {"depth": 2, "embed_dim": 64, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 1}
QWEN_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}


def _llava(kv_heads: int) -> Any:
    text = {"model_type": "llama", **TEXT, "num_attention_heads": 4, "num_key_value_heads": kv_heads}
    config = transformers.LlavaConfig(text_config=text, vision_config=LLAVA_VISION, image_token_id=299)
    return transformers.LlavaForConditionalGeneration(config)


def _qwen2_vl(kv_heads: int) -> Any:
    text = {**TEXT, "num_attention_heads": 4, "num_key_value_heads": kv_heads, "rope_parameters": QWEN_ROPE}
    tokens = {f"{name}_token_id": 290 + i for i, name in enumerate(("image", "video", "vision_start", "vision_end"))}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=QWEN_VISION, **tokens)
    return transformers.Qwen2VLForConditionalGeneration(config)


def _t5gemma(kv_heads: int) -> Any:
    shared = {**TEXT, "query_pre_attn_scalar": 16, "sliding_window": 32, "num_attention_heads": 4}
    encoder, decoder = ({**shared, "num_key_value_heads": heads} for heads in (4, kv_heads))
    config = transformers.T5GemmaConfig(
        encoder=encoder, decoder={**decoder, "cross_attention_hidden_size": 64}, vocab_size=300
    )
    return transformers.T5GemmaForConditionalGeneration(config)


BUILDERS = {"llava": (_llava, "text_config"), "qwen2_vl": (_qwen2_vl, "text_config"), "t5gemma": (_t5gemma, "decoder")}


def _small(kind: str, kv_heads: int) -> Any:
    model = BUILDERS[kind][0](kv_heads).eval()
    randomise(model, 0)
    return model


def _logits(model: Any) -> torch.Tensor:
    ids = torch.randint(5, 200, (2, 9), generator=torch.Generator().manual_seed(1))
    decoder = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(input_ids=ids, **decoder).logits


@pytest.mark.parametrize("kind", list(BUILDERS))
def test_only_the_text_decoder_changes(kind: str, tmp_path: Path) -> None:
    small = _small(kind, 2)
    wide = repeat_kv_heads(small, 4)
    wide.save_pretrained(tmp_path / "source")
    small.save_pretrained(tmp_path / "expected")
    out = convert_checkpoint(tmp_path / "source", tmp_path / "out", groups=2)
    source, made, expected = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "source", out, tmp_path / "expected")
    )
    assert [name for name in expected if not torch.equal(made[name], expected[name])] == []
    changed = {name for name in source if source[name].shape != made[name].shape}
    assert changed
    assert {name.split(".")[-2] for name in changed} == {"k_proj", "v_proj"}
    assert not any("vision" in name or "visual" in name or "encoder.layers" in name for name in changed)
    loaded = type(small).from_pretrained(out).eval()
    assert torch.equal(_logits(loaded), _logits(small))


@pytest.mark.parametrize("kind", list(BUILDERS))
def test_the_config_is_edited_in_the_text_part_alone(kind: str, tmp_path: Path) -> None:
    _small(kind, 4).save_pretrained(tmp_path / "source")
    out = convert_checkpoint(tmp_path / "source", tmp_path / "out", groups=2)
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "source", out))
    part = BUILDERS[kind][1]
    assert {key for key in after if after[key] != before[key]} == {part}
    assert {key for key in after[part] if after[part][key] != before[part][key]} == {"num_key_value_heads"}
    assert after[part]["num_key_value_heads"] == 2
    assert list(after) == list(before)


def test_a_vision_tower_with_the_same_names_and_shapes_stays(tmp_path: Path) -> None:
    model = _small("llava", 4)
    model.save_pretrained(tmp_path / "source")
    before = load_file(tmp_path / "source" / "model.safetensors")
    shapes = {name: tensor.shape for name, tensor in before.items() if name.endswith("k_proj.weight")}
    assert len(set(shapes.values())) == 1
    assert len({name.split(".")[0] for name in shapes}) == 2
    after = load_file(convert_checkpoint(tmp_path / "source", tmp_path / "out", groups=1) / "model.safetensors")
    tower = [name for name in before if "vision_tower" in name]
    assert len(tower) > 20
    assert all(torch.equal(before[name], after[name]) for name in tower)
    texts = [name for name in shapes if "vision_tower" not in name]
    assert {tuple(after[name].shape) for name in texts} == {(16, 64)}
