"""Detection of spikes of the loss."""

from __future__ import annotations

from headfold.uptrain.monitor.spikes import SpikeDetector


def test_a_short_spike_is_tolerated():
    guard = SpikeDetector(3.0)
    for step, loss in enumerate([2.0] * 25 + [9.0, 9.0] + [2.0] * 5 + [9.0, 2.0]):
        guard.check(step, loss)
        assert guard.calm == (loss == 2.0)


def test_the_detector_needs_losses_to_compare_with_and_can_be_switched_off():
    for guard in (SpikeDetector(3.0), SpikeDetector(0.0)):
        for step, loss in enumerate([2.0] * 10 + [90.0] * 5):
            guard.check(step, loss)
    small = SpikeDetector(3.0)  # a divergence that triples while the learning rate rises is none
    for step, loss in enumerate([0.05] * 30 + [0.4] * 10):
        small.check(step, loss)
    assert small.calm
    off = SpikeDetector(0.0)
    for step, loss in enumerate([2.0] * 30 + [90.0] * 5):
        off.check(step, loss)
    assert off.calm
