"""Hidden states drawn to the teacher's: against a slow reference, and in whole runs."""

from __future__ import annotations

import shutil

import pytest
import torch
from headfold.errors import UnsupportedError, UsageError
from headfold.uptrain.loss.chunked import LossInputs, attach_chunked_loss
from headfold.uptrain.loss.head import SplitModel
from headfold.uptrain.loss.hidden_states import LayerOutputs, layer_distance, refuse_unlike_layers
from headfold.uptrain.loss.token_losses import TrainingLoss
from headfold.uptrain.models.teacher import Teacher
from headfold.uptrain.run import uptrain_checkpoint
from runs import metrics, same, weights
from safetensors.torch import save_file
from tiny import tiny_model

IDS = torch.randint(5, 200, (3, 12), generator=torch.Generator().manual_seed(2))
KEEP = torch.ones_like(IDS, dtype=torch.bool)
KEEP[:, -1] = False
KEEP[1, 4] = False
TARGETS = IDS.roll(-1, dims=1)[KEEP]


def states(layers: int, seed: int) -> list[torch.Tensor]:
    """Positions whose sizes differ a thousandfold, as those of real models do."""
    generator = torch.Generator().manual_seed(seed)
    size = 10 ** torch.linspace(-1, 2, 12)[:, None]
    return [torch.randn(3, 12, 5, generator=generator) * size for _ in range(layers)]


def slow(student, teacher) -> torch.Tensor:
    """Position by position in float64."""
    total = torch.zeros((), dtype=torch.float64)
    for mine, theirs in zip(student, teacher, strict=True):
        for row, column in KEEP.nonzero().tolist():
            s, t = mine[row, column].double(), theirs[row, column].double()
            total = total + ((s - t) ** 2).mean() / (t**2).mean()
    return total / len(teacher)


def test_the_distance_is_the_slow_reference_and_so_is_its_gradient():
    student, teacher = [one.requires_grad_() for one in states(4, 0)], states(4, 1)
    expected = slow(student, teacher)
    wanted = torch.autograd.grad(expected, student)
    held = list(teacher)
    found = layer_distance(student, held, KEEP)
    assert held == []  # they do not wait in memory for the backward pass
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    for one, other in zip(torch.autograd.grad(found, student), wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-8)
    assert float(layer_distance(teacher, list(teacher), KEEP)) == 0
    assert float(layer_distance([10 * one for one in teacher], list(teacher), KEEP)) == pytest.approx(81 * KEEP.sum())
    scaled = layer_distance([3 * one for one in student], [3 * one for one in teacher], KEEP)
    assert float(scaled.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)  # it has no unit


def loss_inputs_of(teacher, objective) -> LossInputs:
    taps, split = LayerOutputs(teacher), SplitModel(teacher)
    with torch.no_grad(), taps.collecting() as layers:
        head_inputs_N = split.head_inputs(input_ids=IDS, use_cache=False)[KEEP]
    return LossInputs(objective, KEEP, TARGETS, head_inputs_N, split, layers)


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt_bigcode"])
def test_the_loss_of_a_model_is_that_of_its_own_hidden_states(model_type, plain_loss):
    """Against `output_hidden_states` and autograd; the last of those is taken after the final norm, so a tap of the
    teacher's and the student's last layer stands in for it."""
    model, teacher = tiny_model(model_type), tiny_model(model_type, seed=1)
    objective = TrainingLoss(0.6, 2.0, "forward", 0.7)
    found = {}
    for name, one in (("student", model), ("teacher", teacher)):
        last = []
        final = LayerOutputs(one).layers[-1]
        hook = final.register_forward_hook(lambda *given, seen=last: seen.append(given[2]))
        with torch.set_grad_enabled(name == "student"):
            outputs = one(input_ids=IDS, use_cache=False, output_hidden_states=True)
        hook.remove()
        put_out = last[0][0] if isinstance(last[0], tuple) else last[0]
        found[name] = outputs.logits[KEEP], [*outputs.hidden_states[1:-1], put_out]
    plain = plain_loss(objective, found["student"][0], TARGETS, found["teacher"][0])
    plain = plain + 0.7 * slow(found["student"][1], found["teacher"][1])
    plain.backward()
    expected = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    model.zero_grad()
    attach_chunked_loss(model, LayerOutputs(model))
    sums = model(loss_inputs=loss_inputs_of(teacher, objective), input_ids=IDS, use_cache=False)
    sums.loss.backward()
    assert float(sums.loss.detach()) == pytest.approx(float(plain.detach()), rel=1e-6)
    assert float(sums.hidden.detach()) > 1
    for name, one in expected.items():
        scale = max(1.0, float(one.abs().max()))
        assert float((model.get_parameter(name).grad - one).abs().max()) <= 4e-6 * scale, name


def test_a_model_is_at_no_distance_from_itself():
    model, teacher = tiny_model("llama"), tiny_model("llama")
    attach_chunked_loss(model, LayerOutputs(model))
    sums = model(loss_inputs=loss_inputs_of(teacher, TrainingLoss(hidden_weight=1.0)), input_ids=IDS, use_cache=False)
    assert float(sums.hidden.detach()) == pytest.approx(0, abs=1e-8)


def test_outputs_of_decoder_layers_are_collected_and_not_of_encoder_layers():
    model = tiny_model("t5")
    taps = LayerOutputs(model)
    assert taps.layers == list(model.decoder.block)
    assert taps.hidden_size == model.config.d_model


def test_what_cannot_be_compared_layer_by_layer_is_refused():
    model = tiny_model("llama")
    with pytest.raises(UsageError, match="2 layers of width 64 and the teacher 6 layers of width 64"):
        refuse_unlike_layers(LayerOutputs(model), LayerOutputs(tiny_model("gemma3_text")))
    with pytest.raises(UnsupportedError, match="ran 1 layers in a pass and its teacher 2"):
        layer_distance(states(1, 0), states(2, 0), KEEP)
    model._no_split_modules = None
    with pytest.raises(UsageError, match="does not say which of its modules are layers"):
        LayerOutputs(model)


@pytest.fixture(scope="module")
def damaged(tiny_checkpoint, tmp_path_factory):
    """The tiny checkpoint with one matrix drawn anew."""
    student = tmp_path_factory.mktemp("damaged") / "student"
    shutil.copytree(tiny_checkpoint, student)
    changed, name = weights(student), "model.layers.0.self_attn.v_proj.weight"
    changed[name] = torch.randn(changed[name].shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    save_file(changed, student / "model.safetensors", metadata={"format": "pt"})
    return student


def test_a_run_closes_the_distance_whatever_the_micro_batch(
    damaged, tiny_checkpoint, settings, tmp_path, monkeypatch, capfd
):
    """And with activations computed again to the bit; the teacher's states never outlive their micro-batch."""
    wanted = settings(teacher=str(tiny_checkpoint), hidden_weight=1.0, steps=12, micro_batch=4)
    out = uptrain_checkpoint(damaged, tmp_path / "whole", wanted)
    lines = metrics(out, "train")
    distances = [line["hidden"] for line in lines]
    assert 0 < distances[-1] < 0.5 * distances[0]
    assert lines[0]["loss"] == pytest.approx(lines[0]["divergence"] + lines[0]["hidden"], rel=1e-5)
    assert "hidden " in capfd.readouterr().err
    again = wanted.model_copy(update={"gradient_checkpointing": True})
    assert same(weights(uptrain_checkpoint(damaged, tmp_path / "again", again)), weights(out))
    held, rows = [], []
    real = Teacher.head_inputs

    def spy(self, **inputs):
        assert not any(held)
        head_inputs_BT, layers = real(self, **inputs)
        held.append(layers)
        rows.append(len(layers[0]))
        return head_inputs_BT, layers

    monkeypatch.setattr(Teacher, "head_inputs", spy)
    small = wanted.model_copy(update={"micro_batch": 3})
    curve = metrics(uptrain_checkpoint(damaged, tmp_path / "small", small), "train")
    assert rows[:4] == [3, 1, 3, 1]
    for name in ("loss", "hidden", "divergence"):
        assert [line[name] for line in curve] == pytest.approx([line[name] for line in lines], rel=1e-4)


def test_without_a_teacher_there_is_nothing_to_compare_with(tiny_checkpoint, settings, tmp_path):
    with pytest.raises(UsageError, match="--hidden-weight would change nothing: there is no teacher"):
        uptrain_checkpoint(tiny_checkpoint, tmp_path / "out", settings(hidden_weight=1.0))


def test_an_encoder_decoder_is_compared_where_it_writes():
    """Padded targets do not count, and the encoder's layers neither."""
    import random

    from headfold.pairs import Pair, padded

    draw = random.Random(0)
    pairs = [Pair(*([draw.randrange(5, 290) for _ in range(size)] for size in sizes)) for sizes in ((9, 4), (5, 7))]
    ids_BS, mask_BS, labels_BT = padded(pairs, 1)
    models = [tiny_model("t5", seed=seed) for seed in (0, 1)]
    inputs = {"input_ids": ids_BS, "attention_mask": mask_BS, "decoder_input_ids": labels_BT.clamp_min(1)}
    scored_BT, taps = labels_BT >= 0, [LayerOutputs(model) for model in models]
    with torch.no_grad():
        found = []
        for model, tap in zip(models, taps, strict=True):
            with tap.collecting() as layers:
                model(use_cache=False, **inputs)
            found.append(layers)
    expected = 0.0
    for mine, theirs in zip(*found, strict=True):
        for row, column in scored_BT.nonzero().tolist():
            s, t = mine[row, column].double(), theirs[row, column].double()
            expected += float(((s - t) ** 2).mean() / (t**2).mean()) / len(found[0])
    assert len(found[0]) == models[0].config.num_decoder_layers
    attach_chunked_loss(models[0], taps[0])
    split = SplitModel(models[1])
    with torch.no_grad(), taps[1].collecting() as layers:
        head_inputs_N = split.head_inputs(use_cache=False, **inputs)[scored_BT]
    loss_inputs = LossInputs(
        TrainingLoss(hidden_weight=1.0), scored_BT, labels_BT[scored_BT], head_inputs_N, split, layers
    )
    sums = models[0](loss_inputs=loss_inputs, use_cache=False, **inputs)
    assert float(sums.hidden.detach()) == pytest.approx(expected, rel=1e-5)
    sums.loss.backward()
    assert models[0].encoder.block[0].layer[0].SelfAttention.k.weight.grad is not None
