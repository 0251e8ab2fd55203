from __future__ import annotations

import math

import pytest
import torch
from headfold.uptrain.loss.token_losses import TrainingLoss, cross_entropy, forward_divergence, reverse_divergence


def random_logits(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_cross_entropy_scores_the_next_token():
    """A table that knows the next token with probability 0.7 and spreads the rest over the other two."""
    table = torch.full((3, 3), math.log(0.15))
    for token in range(3):
        table[token, (token + 1) % 3] = math.log(0.7)
    ids = torch.tensor([0, 1, 2, 0, 1])
    assert float(cross_entropy(table[ids[:-1]], ids[1:])[0]) == pytest.approx(-4 * math.log(0.7), rel=1e-6)
    wrong = torch.tensor([0, 2, 1, 0, 2])
    assert float(cross_entropy(table[wrong[:-1]], wrong[1:])[0]) == pytest.approx(-4 * math.log(0.15), rel=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize(("divergence", "swap"), [(forward_divergence, False), (reverse_divergence, True)])
def test_divergences_match_their_definitions(divergence, swap, temperature):
    student, teacher = 3 * random_logits(9, 7), random_logits(9, 7, seed=1)
    q, p = ((one.double() / temperature).softmax(-1) for one in (student, teacher))
    p, q = (q, p) if swap else (p, q)
    expected = float((p * (p / q).log()).sum()) * temperature**2
    assert float(divergence(student, teacher, temperature)[0]) == pytest.approx(expected, rel=1e-5)
    assert float(divergence(teacher, teacher, temperature)[0]) == pytest.approx(0, abs=1e-5)
    other = reverse_divergence if divergence is forward_divergence else forward_divergence
    assert expected != pytest.approx(float(other(student, teacher, temperature)[0]), rel=1e-2)


OBJECTIVES = [
    (TrainingLoss(), False), (TrainingLoss(), True), (TrainingLoss(0.3), True), (TrainingLoss(0.7, 2.0), True),
    (TrainingLoss(1.0, 3.0, "reverse"), True), (TrainingLoss(0.5, 1.0, "reverse"), True), (TrainingLoss(0.0), True),
]  # fmt: skip


@pytest.mark.parametrize(("objective", "with_teacher"), OBJECTIVES)
def test_gradients_are_those_of_autograd(objective, with_teacher, plain_loss):
    logits = random_logits(40, 17).double().requires_grad_()
    teacher = random_logits(40, 17, seed=1) if with_teacher else None
    targets = torch.arange(40) % 17
    sums, grad = objective(logits.detach().float(), targets, teacher)
    expected = plain_loss(objective, logits, targets, None if teacher is None else teacher.double())
    expected.backward()
    assert float(sums.loss) == pytest.approx(float(expected.detach()), rel=1e-6)
    assert torch.allclose(grad.double(), logits.grad, atol=1e-6)


def test_bfloat16_logits_are_summed_in_float32():
    logits = random_logits(4000, 11).bfloat16()
    ids = torch.randint(0, 11, (4000,), generator=torch.Generator().manual_seed(0))
    exact = -float(logits.double().log_softmax(-1).gather(1, ids[:, None]).sum())
    assert float(cross_entropy(logits, ids)[0]) == pytest.approx(exact, rel=1e-5)
