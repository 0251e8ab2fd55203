"""The decoder of our own, as a user of its file relies on it. tests/convert tries the routes that lead to it."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from headfold.checkpoint.load import load_language_model
from headfold.checkpoint.modelling import EARLIER, OWN_TYPES, modeling_headfold_decoder
from headfold.checkpoint.modelling.modeling_headfold_decoder import (
    HeadfoldDecoderConfig,
    HeadfoldDecoderForCausalLM,
)
from headfold.convert.run import convert_checkpoint, plan_conversion
from headfold.convert.serving.engines import where_it_runs
from headfold.errors import UnsupportedError
from safetensors.torch import load_file, save_file
from tiny import randomise, tiny_model
from transformers import AutoModelForCausalLM, StaticCache

SMALL = {
    "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "eos_token_id": None, "bos_token_id": None,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "opt-350m": {"norms_first": False, "final_norm": False, "embedding_size": 16, "positions_from_mask": True},
    "gpt_neo": {"attention_windows": [None, 3], "score_scale": 1.0, "qkv_bias": False},
    "bloom": {"learned_positions": False, "alibi_slopes": [0.5, 0.25, 0.125, 0.0625], "embedding_norm": True,
              "positions_from_mask": True},
    "mpt": {"learned_positions": False, "alibi_slopes": [0.5, 0.25, 0.125, 0.0625], "clip_qkv": 0.7,
            **dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias", "norm_bias"), False)},
}  # fmt: skip
EVERY = pytest.mark.parametrize("kind", KINDS)
IDS_BT = torch.randint(0, 60, (2, 11), generator=torch.Generator().manual_seed(3))


def small(kind: str, **over: Any) -> HeadfoldDecoderForCausalLM:
    model = HeadfoldDecoderForCausalLM(HeadfoldDecoderConfig(**{**SMALL, **KINDS[kind], **over})).eval()
    randomise(model, 0)
    return model


def logits(model: Any, **inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**{"input_ids": IDS_BT, **inputs}).logits


@EVERY
def test_text_in_pieces_is_text_at_once(kind: str) -> None:
    model, whole = small(kind), logits(small(kind))
    first = model(input_ids=IDS_BT[:, :5], use_cache=True)
    cache = first.past_key_values
    assert {layer.keys.shape[1:] for layer in cache.layers} == {(2, 5, 8)}
    second = logits(model, input_ids=IDS_BT[:, 5:], past_key_values=cache)
    assert torch.allclose(whole, torch.cat([first.logits, second], 1), atol=1e-5)


@EVERY
def test_padding_changes_nothing_and_a_position_does(kind: str) -> None:
    model = small(kind)
    mask_BT = torch.ones_like(IDS_BT)
    mask_BT[:, :4] = 0
    positions = {"position_ids": (mask_BT.cumsum(1) - 1).clamp(min=0)}
    alone = logits(model, input_ids=IDS_BT[:, 4:])
    assert torch.allclose(logits(model, attention_mask=mask_BT, **positions)[:, 4:], alone, atol=1e-5)
    bare = logits(model, attention_mask=mask_BT)[:, 4:]
    counts_padding = kind in ("gpt2", "gpt_neo")  # as their sources do where no positions are given
    assert torch.allclose(bare, alone, atol=1e-5) is not counts_padding
    assert not torch.allclose(logits(model)[:, 4:], alone, atol=1e-3)


def test_a_window_hides_what_is_further_back() -> None:
    model = small("gpt_neo", attention_windows=[3, 3])
    changed = IDS_BT.clone()
    changed[:, 0] = (changed[:, 0] + 1) % 60
    before, after = logits(model), logits(model, input_ids=changed)
    assert torch.equal(before[:, 5:], after[:, 5:])  # two layers look two tokens back each
    assert not torch.allclose(before[:, 4], after[:, 4], atol=1e-4)


def test_control_slopes_belong_to_their_heads() -> None:
    assert not torch.allclose(
        logits(small("bloom")), logits(small("bloom", alibi_slopes=[0.0625, 0.125, 0.25, 0.5])), atol=1e-3
    )


@EVERY
def test_a_training_step_with_and_without_checkpointing(kind: str) -> None:
    gradients = []
    for checkpointing in (False, True):
        model = small(kind).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        labels_BT = IDS_BT.masked_fill(IDS_BT % 5 == 0, -100)
        found = model(input_ids=IDS_BT, labels=labels_BT)
        shifted = found.logits[:, :-1].flatten(0, 1), labels_BT[:, 1:].flatten()
        assert torch.allclose(found.loss, torch.nn.functional.cross_entropy(*shifted))
        found.loss.backward()
        gradients.append(torch.cat([weight.grad.flatten() for weight in model.parameters()]))
        assert (found.past_key_values is None) is checkpointing
    assert gradients[0].isfinite().all()
    assert gradients[0].norm() > 0
    assert torch.allclose(*gradients, atol=1e-6)


@EVERY
def test_under_autocast_with_padding_no_number_is_lost(kind: str) -> None:
    mask_BT = torch.ones_like(IDS_BT)
    mask_BT[0, :4] = 0
    expected = logits(small(kind), attention_mask=mask_BT)
    with torch.autocast("cpu", torch.bfloat16):
        found = logits(small(kind), attention_mask=mask_BT)
    assert found.isfinite().all()
    assert (found - expected)[mask_BT.bool()].abs().max() < 0.05 * expected.abs().max()


def test_hidden_states_and_single_logits_on_request() -> None:
    model = small("opt-350m")
    with torch.no_grad():
        found = model(input_ids=IDS_BT, output_hidden_states=True, logits_to_keep=1)
    assert [states.shape for states in found.hidden_states] == [(2, 11, 32)] * 3
    assert torch.allclose(found.logits, logits(model)[:, -1:], atol=1e-6)


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ({"output_attentions": True}, "attention weights"),
        ({"return_dict": False}, "by name"),
        ({"attention_mask": torch.ones(2, 5)}, "a column for each of 11 tokens"),
        ({"token_type_ids": IDS_BT}, "does not know token_type_ids"),
        ({"inputs_embeds": torch.zeros(2, 11, 32)}, "either input_ids or inputs_embeds"),
    ],
)
def test_what_it_does_not_have_is_refused(inputs: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        logits(small("gpt2"), **inputs)


def test_what_generation_hands_on_changes_nothing() -> None:
    model = small("gpt2")
    beside = {"cache_position": torch.arange(11), "head_mask": None, "output_attentions": False, "return_dict": True}
    assert torch.equal(logits(model, **beside), logits(model))
    with torch.no_grad():
        mean = model(input_ids=IDS_BT, labels=IDS_BT).loss
        assert torch.allclose(model(input_ids=IDS_BT, labels=IDS_BT, num_items_in_batch=5).loss, mean * 20 / 5)


def test_a_cache_while_checkpointing_is_refused() -> None:
    model = small("gpt2").train()
    cache = model(input_ids=IDS_BT[:, :4], use_cache=True).past_key_values
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="takes no cache while it trains"):
        model(input_ids=IDS_BT[:, 4:], past_key_values=cache)


def test_a_cache_of_fixed_size_is_refused() -> None:
    model = small("gpt2")
    with pytest.raises(ValueError, match="none of a fixed size"):
        logits(model, past_key_values=StaticCache(config=model.config, max_cache_len=32))


def test_kv_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of the KV heads"):
        HeadfoldDecoderConfig(**{**SMALL, "num_key_value_heads": 3})


def test_in_16_bits_bloom_rounds_what_it_adds_as_its_source_does(tmp_path: Path) -> None:
    """Far from the start, bf16 can represent only every fourth position. The model was trained with that."""
    source = tiny_model("bloom").to(torch.bfloat16)
    source.save_pretrained(tmp_path / "source")
    made = load_language_model(convert_checkpoint(tmp_path / "source", tmp_path / "out", groups=4)).eval()
    ids_BT = torch.randint(5, 200, (1, 700), generator=torch.Generator().manual_seed(1))
    expected = logits(source, input_ids=ids_BT).float()
    rounded = (logits(made, input_ids=ids_BT).float() - expected).square().mean()
    made.config.alibi_in_model_dtype = False
    exact = (logits(made, input_ids=ids_BT).float() - expected).square().mean()
    assert rounded < 0.7 * exact  # the rest is the rounding of its scores, which ours do not have


@pytest.mark.parametrize("trusted", [True, False])
def test_a_missing_or_misshapen_weight_is_an_error(
    trusted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For whoever runs the file beside the weights, and for us."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    tiny_model("gpt2").save_pretrained(tmp_path / "source")
    out = convert_checkpoint(tmp_path / "source", tmp_path / "out", groups=2)
    load = AutoModelForCausalLM if trusted else HeadfoldDecoderForCausalLM
    how = {"trust_remote_code": True} if trusted else {}
    assert load.from_pretrained(out, **how).config.num_key_value_heads == 2
    weights = load_file(out / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.weight"
    for damaged in (weights[name][:16].clone(), None):
        kept = {key: tensor for key, tensor in weights.items() if key != name}
        save_file(kept if damaged is None else {**kept, name: damaged}, out / "model.safetensors", {"format": "pt"})
        with pytest.raises((ValueError, RuntimeError), match=r"k_proj|mismatch"):
            load.from_pretrained(out, **how)


def test_another_transformers_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    file = modeling_headfold_decoder.__file__
    spec = importlib.util.spec_from_file_location("copied", file)
    assert spec is not None
    assert spec.loader is not None
    monkeypatch.setattr("transformers.__version__", "6.1.0")
    with pytest.raises(ImportError, match=r"4.57 and 5.24, not with 6.1.0. Install one of these"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_what_is_said_of_the_file_is_its_name() -> None:
    said = where_it_runs({"model_type": "headfold_decoder"}, fewer_heads=True)
    assert OWN_TYPES["headfold_decoder"].file_name in said.runs


@pytest.mark.parametrize("model_type", ["bloom", "mpt"])
def test_heads_with_slopes_do_not_change_positions(model_type: str, tmp_path: Path) -> None:
    tiny_model(model_type).save_pretrained(tmp_path / "m")
    with pytest.raises(UnsupportedError, match="ALiBi"):
        plan_conversion(tmp_path / "m", groups=2, method="folded", grouping="similarity")
    assert plan_conversion(tmp_path / "m", groups=2, method="folded", grouping=None).grouping == "contiguous"


def test_config_json_names_the_file(tmp_path: Path) -> None:
    tiny_model("bloom").save_pretrained(tmp_path / "m")
    out = convert_checkpoint(tmp_path / "m", tmp_path / "out", groups=2)
    config = json.loads((out / "config.json").read_text())
    assert config["auto_map"]["AutoModelForCausalLM"] == "modeling_headfold_decoder.HeadfoldDecoderForCausalLM"
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (4, 2)
    assert (out / "modeling_headfold_decoder.py").read_bytes() == OWN_TYPES["headfold_decoder"].code


PRESENT = {
    "modeling_headfold_decoder.py": "ff4efd78a7dad13f8be5948be072e19ff63de470d73312886870c472c1d75542",
    "modeling_headfold_encoder_decoder.py": "ac4d5c97b82ec88359b7eb32888359e3d6e61ad1d7562f9bf4a767f2c456f928",
}
"""SHA-256 of the shipped files. To change a file, first add its hash to EARLIER, so that older results stay ours."""


def test_a_changed_file_leaves_its_hash_among_the_earlier_ones() -> None:
    assert {own.file_name: hashlib.sha256(own.code).hexdigest() for own in OWN_TYPES.values()} == PRESENT
    assert not EARLIER & set(PRESENT.values())
