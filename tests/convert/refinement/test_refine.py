"""Refinement brings a converted model closer to its source on text that it was not fitted to."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path

import pytest
import torch
from headfold.checkpoint.load import load_language_model
from headfold.convert.refinement.fit import RefineSettings
from headfold.convert.refinement.layer_runner import decoder_layers
from headfold.convert.refinement.on_disk import refine_folder
from headfold.convert.refinement.refine import refine_layers
from headfold.convert.refinement.resume import LayerFit, RefinementFolder
from headfold.convert.run import plan_conversion, run_plan
from headfold.errors import DataError, UnsupportedError
from safetensors.torch import load_file
from tiny import tiny_model
from torch import nn
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM

SETTINGS = RefineSettings(steps=40, learning_rate=0.07, batch_tokens=64)


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
    """Take the first head of each group: a crude conversion, with room for improvement."""
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


def _refine(
    source: nn.Module, model: nn.Module, text: torch.Tensor, settings: RefineSettings = SETTINGS, **options: object
) -> list[LayerFit]:
    with tempfile.TemporaryDirectory() as folder:
        return refine_layers(source, model, text, settings, RefinementFolder(Path(folder) / "work", {}), **options)


@torch.no_grad()
def _distance(source: nn.Module, model: nn.Module) -> float:
    """Mean squared difference of logits on text that no fit has seen."""
    ids = _text(99)
    return (source(ids).logits.float() - model(ids).logits.float()).square().mean().item()


def test_logits_on_unseen_text_come_closer_and_the_errors_show_it() -> None:
    source = _llama(4)
    model = _converted(source)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    distance = _distance(source, model)
    source_before = copy.deepcopy(source.state_dict())
    fits = _refine(source, model, _text(1))
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


def test_a_layer_repairs_errors_of_earlier_layers() -> None:
    """The second layer, fitted to the source's stream, undoes part of an error of the first."""
    source = _llama(4)
    model = _converted(source, groups=4)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(0.7)
    distance = _distance(source, model)
    first, second = _refine(source, model, _text(1))
    assert first.error_before == first.error_after == pytest.approx(0, abs=1e-9)
    assert second.error_after < 0.85 * second.error_before
    assert _distance(source, model) < distance


def test_same_seed_gives_the_same_weights_and_no_steps_change_nothing() -> None:
    source = _llama(4)
    one, other, still = (_converted(source) for _ in range(3))
    for model in (one, other):
        _refine(source, model, _text(1))
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())
    _refine(source, still, _text(1), RefineSettings(steps=0, batch_tokens=64))
    assert all(torch.equal(value, still.state_dict()[name]) for name, value in _converted(source).state_dict().items())


def test_a_fit_that_does_not_help_is_undone() -> None:
    source = _llama(4)
    model = _converted(source)
    before = copy.deepcopy(model.state_dict())
    fits = _refine(source, model, _text(1), RefineSettings(steps=3, learning_rate=100.0, batch_tokens=64))
    assert all(fit.error_after == fit.error_before for fit in fits)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_nothing_is_run_after_the_last_layer_that_is_fitted() -> None:
    source = _llama(4)
    model, calls = _converted(source), [0, 0]
    for index, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_hook(lambda *_, index=index: calls.__setitem__(index, calls[index] + 1))
    _refine(source, model, _text(1), RefineSettings(steps=2, batch_tokens=64))
    assert calls == [1 + 10, 1]  # one look at the model, then ten batches of text past the first layer


def test_half_precision_models_keep_their_dtype() -> None:
    source = _llama(4, torch.bfloat16)
    model = _converted(source)
    distance = _distance(source, model)
    _refine(source, model, _text(1))
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


def test_layers_with_parallel_attention_and_mlp_are_fitted_whole() -> None:
    source = _llama(4)
    model = _converted(source)
    for each in (source, model):
        each.model.layers = nn.ModuleList(_Parallel(layer) for layer in each.model.layers)
    distance = _distance(source, model)
    fits = _refine(source, model, _text(1))
    assert all(fit.error_after < fit.error_before for fit in fits)
    assert _distance(source, model) < 0.75 * distance


class _ToldMore(nn.Module):
    """A decoder layer that reads something of the text besides the states, as in Gemma 3n."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states: torch.Tensor, extra: torch.Tensor, **arguments: object) -> torch.Tensor:
        return self.layer(hidden_states, **arguments) + extra


class _Telling(nn.Module):
    def __init__(self, model: nn.Module, of_text: bool) -> None:
        super().__init__()
        self.layer, self.embed, self.rotary, self.of_text = (
            _ToldMore(model.layers[0]), model.embed_tokens, model.rotary_emb, of_text,
        )  # fmt: skip
        self.layers = nn.ModuleList([self.layer])
        self.base_model = lambda **given: self(**given)

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> torch.Tensor:
        states = self.embed(input_ids)
        places = self.rotary(states, torch.arange(input_ids.shape[1])[None])
        extra = states * 0.1 if self.of_text else torch.ones_like(states)
        return self.layer(states, extra=extra, attention_mask=None, position_embeddings=places)


@pytest.mark.parametrize("of_text", [True, False])
def test_layers_that_read_more_of_the_text_are_refused(of_text) -> None:
    readers = ["layers.0.layer.self_attn.q_proj"]
    model = _Telling(_llama(4, layers=1).model, of_text)
    if of_text:
        with pytest.raises(UnsupportedError, match="plain way"):
            decoder_layers(model, readers, _text(1, blocks=2))
    else:
        assert len(decoder_layers(model, readers, _text(1, blocks=2))) == 1


def test_fused_projections_are_fitted_whole(tmp_path) -> None:
    source = tiny_model("phi3", num_hidden_layers=1, pad_token_id=0)
    source.save_pretrained(tmp_path / "source")
    plan = plan_conversion(tmp_path / "source", groups=1, method="folded")
    for name in ("out", "plain"):
        run_plan(plan, tmp_path / name)
    (fit,) = refine_folder(tmp_path / "source", tmp_path / "out", plan.family.layers, _text(1), SETTINGS)
    assert fit.error_after < 0.95 * fit.error_before
    name = "model.layers.0.self_attn.qkv_proj.weight"
    before, after = (load_file(tmp_path / folder / "model.safetensors")[name] for folder in ("plain", "out"))
    assert not any(torch.equal(one, other) for one, other in zip(before.split(16), after.split(16), strict=True))


def test_what_cannot_be_refined_is_refused() -> None:
    source = _llama(4)
    with pytest.raises(DataError, match="fewer than two steps"):
        _refine(source, _converted(source), _text(1, blocks=7))
    fused = GPTNeoXForCausalLM(
        GPTNeoXConfig(vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4)
    )
    with pytest.raises(UnsupportedError, match="no attention with separate"):
        _refine(fused, fused, _text(1))
    with pytest.raises(UnsupportedError, match="plain way"):
        _refine(source, source, _text(1), SETTINGS, readers=["lm_head"])


def test_a_checkpoint_on_disk_is_refined_in_place(tmp_path) -> None:
    source = _llama(4, torch.bfloat16)
    source.save_pretrained(tmp_path / "source")
    plan = plan_conversion(tmp_path / "source", groups=1, method="folded")
    run_plan(plan, tmp_path / "out")
    # load_file maps the file, which is about to change
    before = {name: value.clone() for name, value in load_file(tmp_path / "out" / "model.safetensors").items()}
    distance = _distance(source, load_language_model(tmp_path / "out"))
    fits = refine_folder(tmp_path / "source", tmp_path / "out", plan.family.layers, _text(1), SETTINGS)
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert _distance(source, load_language_model(tmp_path / "out")) < distance
    assert len(fits) == 2
    assert {name: (value.dtype, value.shape) for name, value in after.items()} == {
        name: (value.dtype, value.shape) for name, value in before.items()
    }
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    kinds = {name.split("self_attn.")[-1] for name in changed}
    assert kinds >= {"q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", "q_proj.bias", "v_proj.bias"}
    assert kinds <= {f"{side}_proj.{kind}" for side in "qkv" for kind in ("weight", "bias")} | {"o_proj.weight"}
