"""Documents packed into one block that must not see each other."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from headfold.errors import UnsupportedError
from headfold.uptrain.data.batches import PackedBatch
from headfold.uptrain.loss.chunked import attach_chunked_loss
from headfold.uptrain.models import teacher
from headfold.uptrain.models.isolation import refuse_leaks
from headfold.uptrain.run import uptrain_checkpoint
from headfold.uptrain.training.optim import make_optimizer
from headfold.uptrain.training.step import Stepper
from runs import OneProcess
from tiny import tiny_model

A, B = [11, 12, 13, 14], [21, 22, 23, 24, 25, 26]
PACKED = torch.tensor([A + B])
OPENS = torch.zeros_like(PACKED, dtype=torch.bool)
OPENS[0, [0, len(A)]] = True


def logits(model, isolate: bool) -> torch.Tensor:
    return model(use_cache=False, **PackedBatch(PACKED, OPENS, 9, isolate).inputs).logits[0, len(A) :]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_packed_document_gets_the_logits_that_it_gets_alone(attention, training):
    model = tiny_model("llama")
    model.set_attn_implementation(attention)
    model.train(training)
    alone = model(input_ids=torch.tensor([B]), use_cache=False).logits[0]
    assert torch.allclose(logits(model, isolate=True), alone, atol=1e-4)
    assert not torch.allclose(logits(model, isolate=False), alone, atol=1e-2)  # the control


def test_the_step_on_packed_documents_is_that_on_separate_ones(settings):
    """Loss and gradient, and the first token of a document is nobody's target."""
    wanted = settings(isolate_documents=True, batch=1, micro_batch=1, max_grad_norm=1e9)
    model, plain = tiny_model("llama"), tiny_model("llama")
    optimizer = make_optimizer(model, wanted)
    optimizer.zero_grad = lambda: None
    attach_chunked_loss(model)
    batch = PackedBatch(PACKED, OPENS, 8, isolate=True)
    result = Stepper(OneProcess(), model, optimizer, wanted, lambda step: 0.0)(0, batch)
    total = sum(
        F.cross_entropy(plain(input_ids=torch.tensor([one]), use_cache=False).logits[0, :-1], torch.tensor(one[1:]),
                        reduction="sum")
        for one in (A, B)
    )  # fmt: skip
    mean = total / (len(A) + len(B) - 2)
    mean.backward()
    assert result.loss == pytest.approx(float(mean.detach()), rel=1e-5)
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, atol=1e-5), name


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_micro_batches_with_unequal_numbers_of_targets_are_one_big_batch(model_type, settings):
    """Blocks with 9 and 3 targets, one by one and together: gradients to 1e-6, and the same loss."""
    ids = torch.tensor([A + B, list(range(31, 41))])
    opens = torch.zeros_like(ids, dtype=torch.bool)
    opens[:, 0] = True
    opens[1, [2, 3, 5, 6, 8, 9]] = True
    found = []
    for micro_batch in (1, 2):
        wanted = settings(isolate_documents=True, batch=2, micro_batch=micro_batch, max_grad_norm=1e9)
        model = tiny_model(model_type)
        optimizer = make_optimizer(model, wanted)
        optimizer.zero_grad = lambda: None
        attach_chunked_loss(model)
        batch = PackedBatch(ids, opens, 12, isolate=True)
        result = Stepper(OneProcess(), model, optimizer, wanted, lambda step: 0.0)(0, batch)
        found.append((result.loss, [one.grad for one in model.parameters()]))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_a_model_whose_documents_leak_is_refused():
    refuse_leaks(tiny_model("llama"))
    leaky = tiny_model("llama")
    own = type(leaky).forward
    leaky.forward = lambda *, position_ids=None, **inputs: own(leaky, **inputs)
    with pytest.raises(UnsupportedError, match="see each other"):
        refuse_leaks(leaky)


def test_a_teacher_whose_documents_leak_is_refused(tiny_checkpoint, settings, tmp_path, monkeypatch):
    """Its logits would be of a text that the student does not see; without isolation they are welcome."""
    real = teacher.load_language_model

    def leaking(*arguments, **named):
        model = real(*arguments, **named)
        own = type(model).forward
        model.forward = lambda *, position_ids=None, **inputs: own(model, **inputs)
        return model

    monkeypatch.setattr(teacher, "load_language_model", leaking)
    wanted = settings(teacher=str(tiny_checkpoint), steps=2)
    with pytest.raises(UnsupportedError, match="see each other"):
        uptrain_checkpoint(tiny_checkpoint, tmp_path / "out", wanted.model_copy(update={"isolate_documents": True}))
    assert uptrain_checkpoint(tiny_checkpoint, tmp_path / "out", wanted).exists()


def test_a_run_isolates_documents_if_told_to(tiny_checkpoint, settings, tmp_path):
    apart = uptrain_checkpoint(tiny_checkpoint, tmp_path / "apart", settings(isolate_documents=True, steps=3))
    mixed = uptrain_checkpoint(tiny_checkpoint, tmp_path / "mixed", settings(steps=3))
    assert (apart / "model.safetensors").read_bytes() != (mixed / "model.safetensors").read_bytes()
