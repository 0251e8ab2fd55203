"""The loss in chunks against the plain one: loss and gradients to 1e-6."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from headfold.uptrain.loss import chunked as headloss
from headfold.uptrain.loss.chunked import LossInputs, attach_chunked_loss
from headfold.uptrain.loss.head import SplitModel
from headfold.uptrain.loss.token_losses import TrainingLoss
from tiny import tiny_model

IDS = torch.randint(5, 200, (3, 12), generator=torch.Generator().manual_seed(2))
KEEP = torch.ones_like(IDS, dtype=torch.bool)
KEEP[:, -1] = False
TARGETS = IDS[:, 1:].flatten()
# plain, soft-capped, scaled, divided, multiplied, and tied heads
TYPES = ["llama", "gemma2", "cohere", "granite", "falcon_h1", "qwen2_moe"]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    """Seven positions of 300 tokens, so that several chunks and a last, shorter one are needed."""
    monkeypatch.setattr(headloss, "_LOGITS_BYTES", {"cpu": 7 * 300 * 4})
    monkeypatch.setattr(headloss, "_MIN_CHUNK_TOKENS", 1)


def train_once(model, objective=None, teacher=None):
    """The loss of one micro-batch, after its backward pass."""
    features = None
    if teacher is not None:
        with torch.no_grad():
            features = teacher.head_inputs(input_ids=IDS, use_cache=False)[KEEP]
    loss_inputs = LossInputs(objective or TrainingLoss(), KEEP, TARGETS, features, teacher)
    loss = model(loss_inputs=loss_inputs, input_ids=IDS, use_cache=False).loss
    loss.backward()
    return loss.detach()


def grads(model) -> dict[str, torch.Tensor]:
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def assert_equal_to_1e6(found, expected):
    assert found.keys() == expected.keys()
    for name in expected:
        scale = max(1.0, float(expected[name].abs().max()))
        assert float((found[name] - expected[name]).abs().max()) <= 2e-6 * scale, name


@pytest.mark.parametrize("model_type", TYPES)
def test_chunked_loss_and_gradients_are_the_plain_ones(model_type):
    model = tiny_model(model_type)
    logits = model(input_ids=IDS, use_cache=False).logits
    plain = F.cross_entropy(logits[:, :-1].flatten(0, 1), TARGETS, reduction="sum")
    plain.backward()
    expected = grads(model)
    model.zero_grad()
    assert not attach_chunked_loss(model).whole
    assert float(train_once(model)) == pytest.approx(float(plain.detach()), rel=1e-6)
    assert_equal_to_1e6(grads(model), expected)


def test_chunked_loss_and_gradients_with_a_teacher_a_temperature_and_text(plain_loss):
    model, teacher = tiny_model("gemma2"), tiny_model("gemma2", seed=1)
    objective = TrainingLoss(0.6, 2.0, "reverse")
    with torch.no_grad():
        teacher_logits = teacher(input_ids=IDS, use_cache=False).logits[KEEP]
    plain_loss(objective, model(input_ids=IDS, use_cache=False).logits[KEEP], TARGETS, teacher_logits).backward()
    expected = grads(model)
    model.zero_grad()
    attach_chunked_loss(model)
    train_once(model, objective, SplitModel(teacher))
    assert_equal_to_1e6(grads(model), expected)


def test_no_more_than_a_chunk_of_logits_is_made_at_once(monkeypatch):
    seen = []
    real = TrainingLoss.__call__

    def spy(self, logits_NV, targets_N, teacher_NV):
        seen.append((len(logits_NV), None if teacher_NV is None else len(teacher_NV)))
        return real(self, logits_NV, targets_N, teacher_NV)

    monkeypatch.setattr(TrainingLoss, "__call__", spy)
    model = tiny_model("llama")
    attach_chunked_loss(model)
    train_once(model, teacher=SplitModel(tiny_model("llama", seed=1)))
    assert seen == [(7, 7)] * 4 + [(5, 5)]


def test_a_model_that_cannot_be_split_is_run_whole_with_the_same_result(monkeypatch):
    whole, cut = tiny_model("llama"), tiny_model("llama")
    monkeypatch.setattr(SplitModel, "_gives_the_logits", lambda self: False)
    assert attach_chunked_loss(whole).whole
    monkeypatch.undo()
    assert not attach_chunked_loss(cut).whole
    assert float(train_once(whole)) == pytest.approx(float(train_once(cut)), rel=1e-6)
    assert_equal_to_1e6(grads(whole), grads(cut))


def test_weights_between_hidden_states_and_head_are_noticed():
    """A gate that the head's gradient would miss."""
    model = tiny_model("llama")
    model.gate = torch.nn.Parameter(torch.ones(()))
    own = type(model).forward

    def gated(self, **inputs):
        outputs = own(self, **inputs)
        outputs.logits = outputs.logits * self.gate
        return outputs

    model.forward = gated.__get__(model)
    assert SplitModel(model).whole


def test_a_frozen_head_gets_no_gradient_and_passes_it_on():
    model = tiny_model("llama")
    attach_chunked_loss(model)
    train_once(model)
    expected = grads(model)
    model.zero_grad()
    model.lm_head.weight.requires_grad_(False)
    train_once(model)
    assert model.lm_head.weight.grad is None
    name = "model.layers.0.self_attn.k_proj.weight"
    assert torch.equal(grads(model)[name], expected[name])


def test_autocast_reaches_the_head():
    model = tiny_model("llama")
    attach_chunked_loss(model)
    exact = train_once(model)
    expected = grads(model)
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        rough = train_once(model)
    assert float(rough) == pytest.approx(float(exact), rel=2e-2)
    assert float(rough) != float(exact)
    found = grads(model)["lm_head.weight"]
    assert found.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(found.flatten(), expected["lm_head.weight"].flatten(), 0) > 0.99


def test_other_calls_of_the_model_stay_as_they_are():
    model = tiny_model("llama")
    before = model(input_ids=IDS, use_cache=False).logits
    attach_chunked_loss(model)
    assert torch.equal(model(input_ids=IDS, use_cache=False).logits, before)
    assert torch.equal(
        model.lm_head(torch.ones(2, 64)), torch.nn.functional.linear(torch.ones(2, 64), model.lm_head.weight)
    )


def test_chunks_are_as_large_as_allowed_and_never_tiny(monkeypatch):
    monkeypatch.undo()
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert headloss.chunk_tokens(4096, cpu) == 1024
    assert headloss.chunk_tokens(128_000, cpu) == 256
    assert headloss.chunk_tokens(256_000, gpu) == 262


def test_a_micro_batch_without_targets_adds_nothing():
    """A micro-batch of one-token documents that are kept apart; the next one counts as always."""
    model = tiny_model("llama")
    attach_chunked_loss(model)
    empty = LossInputs(TrainingLoss(), torch.zeros_like(KEEP), TARGETS[:0])
    sums = model(loss_inputs=empty, input_ids=IDS, use_cache=False)
    sums.loss.backward()
    assert not any(float(one.detach()) for one in sums)
    assert grads(model).keys() == {name for name, _ in model.named_parameters()}
    assert not any(bool(grad.any()) for grad in grads(model).values())
    train_once(model)
    assert bool(grads(model)["lm_head.weight"].any())
