from __future__ import annotations

import pytest
import torch
from headfold.libraries import transformers_internals as internals
from tiny import tiny_model
from torch import nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, M2M100Config, M2M100ForConditionalGeneration


def attention_of(model_type: str) -> nn.Module:
    modules = tiny_model(model_type).named_modules()
    return next(module for name, module in modules if name.endswith((".self_attn", ".attn", ".attention")))


def test_a_model_is_made_in_the_dtype_of_its_config():
    config = LlamaConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=1, vocab_size=8, dtype=torch.bfloat16)
    with torch.device("meta"):
        assert internals.from_config(LlamaForCausalLM, config).dtype == torch.bfloat16


def test_disk_names_that_the_loader_renames_are_found():
    model = tiny_model("llama")
    assert internals.memory_names(model, ["model.norm.weight"]) == {"model.norm.weight": "model.norm.weight"}
    assert internals.split_names(model, ["model.norm.weight"]) == {}


def test_one_tensor_of_phi3_is_not_cut():
    """Its class keeps q, k and v in one parameter, so the loader only renames."""
    model = tiny_model("phi3")
    name = "model.layers.0.self_attn.qkv_proj.weight"
    assert internals.memory_names(model, [name]) == {name: name}


@pytest.mark.parametrize(("model_type", "expected"), [("llama", True), ("gpt_neox", True), ("opt", False)])
def test_rotary_positions_show_in_the_code(model_type, expected):
    assert internals.mentions_rotation(attention_of(model_type)) == expected
    if expected:
        assert callable(internals.rotation_of(attention_of(model_type)))


@pytest.mark.parametrize(("model_type", "expected"), [("llama", False), ("qwen3", True), ("gpt_neox", False)])
def test_norms_inside_attention_show_in_the_code(model_type, expected):
    assert internals.normalises_keys(attention_of(model_type)) == expected


def test_gates_behind_queries_show_in_the_code():
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention

    with torch.device("meta"):
        gated = Qwen3NextAttention.__new__(Qwen3NextAttention)
    assert internals.gates_behind_queries(gated)
    assert not internals.gates_behind_queries(attention_of("llama"))


def test_labels_are_shifted_by_the_function_beside_the_class():
    config = M2M100Config(
        vocab_size=16, d_model=8, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=8, decoder_ffn_dim=8,
        encoder_attention_heads=2, decoder_attention_heads=2, decoder_start_token_id=2, pad_token_id=1,
    )  # fmt: skip
    model = M2M100ForConditionalGeneration(config)
    labels = torch.tensor([[5, 6, 7]])
    assert internals.shift_tokens_right(model, labels).tolist() == [[2, 5, 6]]
    with pytest.raises(AttributeError):
        internals.shift_tokens_right(tiny_model("llama"), labels)


def test_generation_settings_are_joined_without_those_of_the_model(tmp_path):
    both = internals.generation_settings(GenerationConfig(num_beams=4, max_length=7), GenerationConfig(max_length=9))
    assert (both.num_beams, both.max_length) == (4, 9)
    both.to_json_file(tmp_path / "generation_config.json")
    assert '_from_model_config": true' not in (tmp_path / "generation_config.json").read_text()


@pytest.mark.parametrize(("model_type", "layer"), [("llama", "LlamaDecoderLayer"), ("gpt_neox", "GPTNeoXLayer")])
def test_classes_name_their_layers(model_type, layer):
    model = tiny_model(model_type)
    assert [type(found).__name__ for found in internals.layers_within(model, model)] == [layer] * 2
    model._no_split_modules = None
    assert internals.layers_within(model, model) == []
