from __future__ import annotations

import torch
from headfold.eval.measures.capacity import CacheSize, capacity, peak_bytes
from headfold.eval.results import CapacityBatch, ServingCapacity

CPU = torch.device("cpu")
MEGABYTE = 1_000_000


def test_peak_is_the_most_memory_held_at_once():
    kept = torch.ones(250_000)

    def compute():
        first = torch.ones(250_000)  # 1 MB
        second = first + 1  # 2 MB
        del first
        third = second.view(10, -1) * 2  # a view costs nothing; its product does: 2 MB
        del second, third
        return torch.ones(500_000)  # 2 MB again

    assert peak_bytes(CPU, compute) == 2 * MEGABYTE
    assert peak_bytes(CPU, lambda: kept.add_(1)) == 0
    assert peak_bytes(CPU, lambda: [kept + 1 for _ in range(3)]) == 3 * MEGABYTE


def test_capacity_follows_the_formula():
    """weights + batch × cache(context) ≤ 0.9 × memory, and one more would not fit."""
    cache = CacheSize([100.0, 100.0], [2, 2], [None, None])
    found = capacity(1_000_000, 100_000, cache, [10, 500])
    assert [(row.context, row.batch) for row in found.batches] == [(10, 400), (500, 8)]
    assert found.tokens == 4000
    for row in found.batches:
        assert 100_000 + row.batch * cache.total(row.context) <= 900_000
        assert 100_000 + (row.batch + 1) * cache.total(row.context) > 900_000


def test_sliding_windows_stop_growing():
    cache = CacheSize([100.0, 100.0], [2, 2], [None, 16])
    assert cache.total(10) == 2000
    assert cache.total(100) == 100 * 100 + 16 * 100
    assert capacity(1_000_000, 100_000, cache, [100]).tokens == (800_000 - 1600) // 100
    assert capacity(1_000_000, 100_000, CacheSize([100.0], [2], [16]), [10**6]) == ServingCapacity(
        memory_bytes=1_000_000, batches=[CapacityBatch(context=10**6, batch=500)], tokens=None
    )


def test_nothing_fits_beside_weights_that_are_too_large():
    found = capacity(1_000_000, 950_000, CacheSize([100.0], [2], [None]), [10])
    assert (found.batches[0].batch, found.tokens) == (0, 0)
