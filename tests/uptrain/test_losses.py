from __future__ import annotations

import math

import pytest
import torch
from headfold.uptrain.losses import cross_entropy_sum, distillation_sum


def test_cross_entropy_scores_the_next_token():
    """A table that knows the next token with probability 0.7 and spreads the rest over the other two."""
    ids = torch.tensor([[0, 1, 2, 0, 1]])
    table = torch.full((3, 3), math.log(0.15))
    for token in range(3):
        table[token, (token + 1) % 3] = math.log(0.7)
    assert float(cross_entropy_sum(table[ids], ids)) == pytest.approx(-4 * math.log(0.7), rel=1e-6)
    wrong = torch.tensor([[0, 2, 1, 0, 2]])
    assert float(cross_entropy_sum(table[wrong], wrong)) == pytest.approx(-4 * math.log(0.15), rel=1e-6)


def test_distillation_is_the_divergence_from_the_teacher():
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(2, 5, 7, generator=generator) for _ in range(2))
    p, q = teacher[:, :-1].double().softmax(-1), student[:, :-1].double().softmax(-1)
    expected = float((p * (p / q).log()).sum())
    assert float(distillation_sum(student, teacher)) == pytest.approx(expected, rel=1e-5)
    assert float(distillation_sum(teacher, teacher)) == pytest.approx(0, abs=1e-6)
    assert float(distillation_sum(student, teacher)) != pytest.approx(
        float(distillation_sum(teacher, student)), rel=1e-2
    )


def test_bfloat16_logits_are_summed_in_float32():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 4000, 11, generator=generator).bfloat16()
    ids = torch.randint(0, 11, (1, 4000), generator=generator)
    exact = -float(logits[0, :-1].double().log_softmax(-1).gather(1, ids[0, 1:, None]).sum())
    assert float(cross_entropy_sum(logits, ids)) == pytest.approx(exact, rel=1e-5)
