"""Dropout and layer drop of loaded models, wherever their classes keep the rates."""

from __future__ import annotations

import pytest
import torch
from headfold import convert_checkpoint
from headfold.checkpoint.load import load_language_model, load_tokenizer
from headfold.uptrain.models.dropout import keep_all_layers, set_dropout
from headfold.uptrain.run import uptrain_checkpoint
from runs import batch_of, some_pairs, tiny_pair_model
from tiny import tiny_config, tiny_model, tiny_pair
from transformers import AutoModelForSeq2SeqLM

IDS = torch.arange(5, 29)[None]


@pytest.mark.parametrize("model_type", ["gpt_bigcode", "opt", "mpt"])
def test_rates_outside_dropout_modules_are_set_too(model_type):
    """Classes read them off the config once, when they are built, and call them what they like."""
    torch.manual_seed(0)
    model = tiny_model(model_type).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in ("attn_dropout", "attn_dropout_p", "dropout"):
            if isinstance(getattr(module, name, None), int | float):
                setattr(module, name, 0.5)
    assert not torch.allclose(model(IDS).logits, model(IDS).logits)
    set_dropout(model, 0.0)
    assert torch.equal(model(IDS).logits, model.eval()(IDS).logits)


@pytest.mark.parametrize("model_type", ["gpt2", "opt"])
def test_rates_of_converted_models_are_set_too(model_type, tmp_path):
    tiny_model(model_type).save_pretrained(tmp_path / "source")
    for groups in (1, 2):
        out = convert_checkpoint(tmp_path / "source", tmp_path / f"few-{groups}", groups=groups)
        model = load_language_model(out).train()
        set_dropout(model, 0.5)
        assert not torch.allclose(model(IDS).logits, model(IDS).logits)
        set_dropout(model, 0.0)
        assert torch.equal(model(IDS).logits, model.eval()(IDS).logits)


@pytest.mark.parametrize("how", [keep_all_layers, lambda model: set_dropout(model, 0.5)])
def test_no_layer_is_left_out(how):
    """At any rate of dropout: layer drop is not a dropout of that rate."""
    model = tiny_pair("m2m_100", dropout=0.0, encoder_layerdrop=0.9, decoder_layerdrop=0.9).train()
    ran = []
    for stack in (model.get_encoder(), model.get_decoder()):
        for layer in stack.layers:
            layer.register_forward_hook(lambda *_: ran.append(1))
    inputs = {"input_ids": IDS, "decoder_input_ids": IDS[:, :5]}
    torch.manual_seed(0)
    for _ in range(3):
        model(**inputs)
    assert len(ran) < 12
    ran.clear()
    how(model)
    for _ in range(3):
        model(**inputs)
    assert len(ran) == 12
    assert keep_all_layers(model) is False


def test_comparing_hidden_states_switches_layer_drop_off_with_a_message(tiny_checkpoint, settings, tmp_path, capfd):
    folder = tmp_path / "opt"
    model = tiny_model("opt")
    model.config.layerdrop = 0.9
    model.save_pretrained(folder)
    load_tokenizer(tiny_checkpoint).save_pretrained(folder)
    wanted = settings(teacher=str(folder), steps=3, hidden_weight=0.5)
    uptrain_checkpoint(folder, tmp_path / "drawn", wanted)
    assert "Layer drop is off" in capfd.readouterr().err
    uptrain_checkpoint(folder, tmp_path / "plain", settings(teacher=None, steps=1))
    assert "Layer drop is off" not in capfd.readouterr().err


@pytest.mark.parametrize("model_type", ["t5", "bart", "m2m_100"])
def test_dropout_goes_where_the_settings_say(model_type):
    from headfold.uptrain.models.dropout import set_dropout

    over = {"dropout_rate": 0.5, "dropout": 0.5, "attention_dropout": 0.5, "activation_dropout": 0.5}
    config = tiny_config(model_type, decoder_start_token_id=0, pad_token_id=1, **over, encoder_layerdrop=0.0,
                         decoder_layerdrop=0.0)  # fmt: skip
    model = AutoModelForSeq2SeqLM.from_config(config).train()
    inputs = batch_of(model, some_pairs()).inputs
    runs = [model(**inputs).logits for _ in range(2)]
    assert not torch.allclose(*runs)
    set_dropout(model, 0.0)
    assert torch.equal(model(**inputs).logits, model(**inputs).logits)
    assert torch.equal(model(**inputs).logits, model.eval()(**inputs).logits)


def test_a_converted_bart_loses_its_dropout_too(tmp_path):
    from headfold import convert_checkpoint
    from headfold.uptrain.models.dropout import set_dropout

    model = tiny_pair_model("bart")
    for name in ("dropout", "attention_dropout", "activation_dropout"):
        setattr(model.config, name, 0.5)
    model.save_pretrained(tmp_path / "bart")
    model = load_language_model(convert_checkpoint(tmp_path / "bart", tmp_path / "few", groups=2)).train()
    inputs = batch_of(model, some_pairs()).inputs
    assert not torch.allclose(model(**inputs).logits, model(**inputs).logits)
    set_dropout(model, 0.0)
    assert torch.equal(model(**inputs).logits, model.eval()(**inputs).logits)
