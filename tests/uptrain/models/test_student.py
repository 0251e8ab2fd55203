"""The weights that a run trains, and the options that change its speed."""

from __future__ import annotations

import pytest
import torch
from headfold.checkpoint.load import load_language_model
from headfold.errors import UnsupportedError, UsageError
from headfold.uptrain.models.student import freeze_other_weights, speed_up
from headfold.uptrain.settings import UptrainSettings
from headfold.uptrain.training.optim import make_optimizer
from tiny import tiny_model, tiny_pair


@pytest.mark.parametrize(
    ("train", "trained"),
    [
        ("all", {"embed_tokens", "q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "gate_proj", "lm_head"}),
        ("attention", {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"}),
        ("kv", {"k_proj", "v_proj", "k_norm"}),
    ],
)
def test_only_the_chosen_weights_are_trained(train, trained):
    model = tiny_model("qwen3")
    freeze_other_weights(model, train)
    kinds = {name.split(".")[-2] for name, weight in model.named_parameters() if weight.requires_grad}
    assert trained <= kinds
    assert train == "all" or trained == kinds
    counted = sum(len(group["params"]) for group in make_optimizer(model, UptrainSettings()).param_groups)
    assert counted == sum(weight.requires_grad for weight in model.parameters())


def test_keys_and_values_that_are_fused_with_queries_cannot_be_trained_alone():
    with pytest.raises(UsageError, match="no weights that `--train kv` means"):
        freeze_other_weights(tiny_model("phi3"), "kv")


@pytest.mark.parametrize(("train", "changed"), [("attention", True), ("kv", False)])
def test_train_names_the_attention_of_t5(train, changed, tiny_t5):
    from headfold.uptrain.models.student import freeze_other_weights

    model = load_language_model(tiny_t5)
    freeze_other_weights(model, train)
    trained = {name for name, one in model.named_parameters() if one.requires_grad}
    assert "decoder.block.0.layer.1.EncDecAttention.k.weight" in trained
    assert "encoder.block.0.layer.0.SelfAttention.v.weight" in trained
    assert ("decoder.block.0.layer.1.EncDecAttention.q.weight" in trained) is changed
    assert not any("DenseReluDense" in name or "shared" in name for name in trained)


def test_a_class_that_does_not_name_its_layers_is_not_compiled(settings, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: compiled.append(module))
    with pytest.raises(UnsupportedError, match="none can be compiled"):
        speed_up(tiny_pair("pegasus"), settings(compile=True))
    assert not compiled
    speed_up(tiny_pair("bart"), settings(compile=True))
    assert len(compiled) == 4
