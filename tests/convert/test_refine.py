"""Refinement brings a converted model closer to its source on text that it was not fitted to."""

from __future__ import annotations

import copy

import pytest
import torch
from headfold.checkpoint.load import load_causal_lm
from headfold.convert.refine import RefineSettings, refine_layers
from headfold.convert.refit import refine_folder
from headfold.convert.run import plan_conversion, run_plan
from headfold.errors import DataError, UnsupportedError
from safetensors.torch import load_file
from torch import nn
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM

SETTINGS = RefineSettings(steps=40, learning_rate=2e-2, batch_tokens=64)


def _llama(kv_heads: int, dtype: torch.dtype = torch.float32, layers: int = 2) -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=8,
        attention_bias=True,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval().to(dtype)


def _converted(source: LlamaForCausalLM, groups: int = 1) -> LlamaForCausalLM:
    """The first head of each group: a crude conversion, with room for improvement."""
    config = copy.deepcopy(source.config)
    config.num_key_value_heads = groups
    model = LlamaForCausalLM(config).eval().to(source.dtype)
    weights = source.state_dict()
    for name, value in model.state_dict().items():
        found = weights[name]
        if found.shape != value.shape:
            weights[name] = found.unflatten(0, (groups, 4 // groups, 8))[:, 0].flatten(0, 1)
    model.load_state_dict(weights)
    return model


def _text(seed: int, blocks: int = 40) -> torch.Tensor:
    return torch.randint(0, 40, (blocks, 16), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def _distance(source: nn.Module, model: nn.Module) -> float:
    """Mean squared difference of logits on text that no fit has seen."""
    ids = _text(99)
    return (source(ids).logits.float() - model(ids).logits.float()).square().mean().item()


def test_unseen_text_comes_closer_and_errors_say_so() -> None:
    source = _llama(4)
    model = _converted(source)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    distance = _distance(source, model)
    source_before = copy.deepcopy(source.state_dict())
    fits = refine_layers(source, model, _text(1), SETTINGS)
    assert _distance(source, model) < 0.75 * distance
    assert [fit.layer for fit in fits] == [0, 1]
    assert all(fit.error_after < fit.error_before for fit in fits)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {
        f"model.layers.{layer}.self_attn.{part}"
        for layer in range(2)
        for part in ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", "q_proj.bias", "v_proj.bias")
    } | {name for name in changed if name.endswith("k_proj.bias")}
    assert all(torch.equal(value, source_before[name]) for name, value in source.state_dict().items())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_targets_repair_what_earlier_layers_left_wrong() -> None:
    """The second layer of the result, fitted to the source's stream, undoes part of a fault of the first."""
    source = _llama(4)
    model = _converted(source, groups=4)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(0.7)
    distance = _distance(source, model)
    first, second = refine_layers(source, model, _text(1), SETTINGS)
    assert first.error_before == first.error_after == pytest.approx(0, abs=1e-9)
    assert second.error_after < 0.85 * second.error_before
    assert _distance(source, model) < distance


def test_same_seed_gives_the_same_weights_and_no_steps_change_nothing() -> None:
    source = _llama(4)
    one, other, still = (_converted(source) for _ in range(3))
    for model in (one, other):
        refine_layers(source, model, _text(1), SETTINGS)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())
    refine_layers(source, still, _text(1), RefineSettings(steps=0, batch_tokens=64))
    assert all(torch.equal(value, still.state_dict()[name]) for name, value in _converted(source).state_dict().items())


def test_a_fit_that_does_not_help_is_undone() -> None:
    source = _llama(4)
    model = _converted(source)
    before = copy.deepcopy(model.state_dict())
    fits = refine_layers(source, model, _text(1), RefineSettings(steps=3, learning_rate=100.0, batch_tokens=64))
    assert all(fit.error_after == fit.error_before for fit in fits)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_half_precision_models_keep_their_dtype() -> None:
    source = _llama(4, torch.bfloat16)
    model = _converted(source)
    distance = _distance(source, model)
    refine_layers(source, model, _text(1), SETTINGS)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert _distance(source, model) < 0.75 * distance


class _Parallel(nn.Module):
    """A decoder layer whose attention and MLP both read its input, as in Phi or Cohere."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.self_attn, self.mlp, self.norm = layer.self_attn, layer.mlp, layer.input_layernorm

    def forward(self, hidden_states: torch.Tensor, **arguments: object) -> torch.Tensor:
        read = self.norm(hidden_states)
        return hidden_states + self.self_attn(read, **arguments)[0] + self.mlp(read)


def test_other_arrangements_are_fitted_as_whole_layers() -> None:
    source = _llama(4)
    model = _converted(source)
    for each in (source, model):
        each.model.layers = nn.ModuleList(_Parallel(layer) for layer in each.model.layers)
    distance = _distance(source, model)
    fits = refine_layers(source, model, _text(1), SETTINGS)
    assert all(fit.error_after < fit.error_before for fit in fits)
    assert _distance(source, model) < 0.75 * distance


def test_what_cannot_be_refined_is_refused() -> None:
    source = _llama(4)
    with pytest.raises(DataError, match="fewer than two steps"):
        refine_layers(source, _converted(source), _text(1, blocks=7), SETTINGS)
    fused = GPTNeoXForCausalLM(
        GPTNeoXConfig(vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4)
    )
    with pytest.raises(UnsupportedError, match="no attention with separate"):
        refine_layers(fused, fused, _text(1), SETTINGS)
    with pytest.raises(UnsupportedError, match="plain way"):
        refine_layers(source, source, _text(1), SETTINGS, modules=["lm_head"])


def test_a_checkpoint_on_disk_is_refined_in_place(tmp_path) -> None:
    source = _llama(4, torch.bfloat16)
    source.save_pretrained(tmp_path / "source")
    plan = plan_conversion(tmp_path / "source", groups=1, method="folded")
    run_plan(plan, tmp_path / "out")
    # load_file maps the file, which is about to change
    before = {name: value.clone() for name, value in load_file(tmp_path / "out" / "model.safetensors").items()}
    distance = _distance(source, load_causal_lm(tmp_path / "out"))
    fits = refine_folder(tmp_path / "source", tmp_path / "out", plan.family.blocks, _text(1), SETTINGS)
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert _distance(source, load_causal_lm(tmp_path / "out")) < distance
    assert len(fits) == 2
    assert {name: (value.dtype, value.shape) for name, value in after.items()} == {
        name: (value.dtype, value.shape) for name, value in before.items()
    }
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    kinds = {name.split("self_attn.")[-1] for name in changed}
    assert kinds >= {"q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", "q_proj.bias", "v_proj.bias"}
    assert kinds <= {f"{side}_proj.{kind}" for side in "qkv" for kind in ("weight", "bias")} | {"o_proj.weight"}
