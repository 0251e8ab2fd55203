from __future__ import annotations

import numpy as np
import pytest
from headfold.eval.measures.recovery import recovered_share, reported_recovery

TOKENS = np.array([400.0, 900, 120, 2500, 700, 1500, 300, 800, 1100, 600])


def nats(per_token: float, spread: float, seed: int) -> np.ndarray:
    return TOKENS * np.random.default_rng(seed).normal(per_token, spread, len(TOKENS))


SOURCE = nats(3.0, 0.4, 0)


def test_a_share_of_a_certain_loss_is_given_with_its_interval():
    converted = SOURCE + nats(0.10, 0.03, 1)
    uptrained = SOURCE + nats(0.02, 0.01, 2)
    share = recovered_share(SOURCE, converted, uptrained, TOKENS)
    assert share.value == pytest.approx((converted - uptrained).sum() / (converted - SOURCE).sum())
    assert 0.6 < share.low < share.value < share.high < 1.1
    reached = recovered_share(SOURCE, converted, SOURCE, TOKENS)
    assert [reached.value, reached.low, reached.high] == pytest.approx([1, 1, 1], abs=1e-5)


@pytest.mark.parametrize("lost", [0.001, 0.0, -0.02])
def test_a_loss_within_its_interval_has_no_recovered_share(lost):
    """A loss of 0.001 nats ± 0.02 beside a gain of 0.03 nats was printed as 2252 % recovered."""
    converted = SOURCE + nats(lost, 0.02, 3)
    uptrained = converted - 0.03 * TOKENS
    assert recovered_share(SOURCE, converted, uptrained, TOKENS) is None
    reported = reported_recovery(SOURCE, converted, uptrained, TOKENS, "gqa-2")
    assert reported.value is None
    assert "not certain that gqa-2 lost anything" in reported.missing
    assert "reaches zero" in reported.missing


def test_too_few_documents_for_an_interval_have_no_recovered_share():
    few = slice(0, 3)
    found = reported_recovery(SOURCE[few], 1.1 * SOURCE[few], 1.02 * SOURCE[few], TOKENS[few], "gqa-2")
    assert found.value is None
    assert "too few" in found.missing
