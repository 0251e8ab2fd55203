"""``similarity`` grouping: the dynamic programme against brute force, planted groups, and the block's output."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from headfold.convert.methods.context import MethodContext
from headfold.convert.methods.folded import folded, predicted_loss
from headfold.convert.methods.grouping import best_partition, searched_partition, similarity_order
from headfold.convert.methods.permutation import permuted_attention


def _all_partitions(heads: tuple[int, ...], members: int) -> list[list[tuple[int, ...]]]:
    if not heads:
        return [[]]
    found = []
    for mates in combinations(heads[1:], members - 1):
        rest = tuple(head for head in heads[1:] if head not in mates)
        found += [[(heads[0], *mates), *tail] for tail in _all_partitions(rest, members)]
    return found


def _random_cost(seed: int):
    random = np.random.default_rng(seed)
    known: dict[tuple[int, ...], float] = {}
    return lambda group: known.setdefault(group, float(random.random()))


@pytest.mark.parametrize(("members", "partitions"), [(2, 105), (4, 35)])
def test_dynamic_programme_equals_brute_force(members, partitions) -> None:
    everything = _all_partitions(tuple(range(8)), members)
    assert len(everything) == partitions
    for seed in range(10):
        cost = _random_cost(seed)
        best = min(everything, key=lambda partition: sum(map(cost, partition)))
        assert best_partition(8, members, cost) == best


def test_sixteen_heads_in_pairs_are_exact_and_quick() -> None:
    cost = _random_cost(3)
    pairs = best_partition(16, 2, cost)
    assert sorted(head for pair in pairs for head in pair) == list(range(16))
    assert sum(map(cost, pairs)) <= sum(cost(pair) for pair in searched_partition(16, 2, cost)) + 1e-9


def test_neighbours_win_a_tie() -> None:
    assert best_partition(6, 2, lambda group: 1.0) == [(0, 1), (2, 3), (4, 5)]
    assert searched_partition(6, 2, lambda group: 1.0) == [(0, 1), (2, 3), (4, 5)]


def test_search_finds_planted_groups_and_never_loses_to_neighbours() -> None:
    kind = np.random.default_rng(1).permutation(np.repeat(range(5), 4))

    def planted(group: tuple[int, ...]) -> float:
        return float(len({kind[head] for head in group}) - 1)

    found = searched_partition(20, 4, planted)
    assert sum(map(planted, found)) == 0
    for seed in range(5):
        cost = _random_cost(seed)
        assert sum(map(cost, searched_partition(8, 4, cost))) <= cost((0, 1, 2, 3)) + cost((4, 5, 6, 7)) + 1e-9


@pytest.mark.parametrize("kv_heads", [8, 4], ids=["mha", "gqa"])
def test_planted_heads_are_found(kv_heads, make_attention, make_equal, make_moment, output_of) -> None:
    attention = make_equal(make_attention(8, kv_heads), groups=2)
    mixed = permuted_attention(attention, [0, 2, 1, 3] if kv_heads == 4 else [0, 4, 1, 5, 2, 6, 7, 3])
    context = MethodContext(0, second_moment=make_moment())
    order = similarity_order(mixed, 2, context)
    assert order == ([0, 2, 1, 3] if kv_heads == 4 else [0, 2, 4, 7, 1, 3, 5, 6])
    x_TC = torch.randn(9, 24)
    expected = output_of(mixed, x_TC)
    torch.testing.assert_close(output_of(permuted_attention(mixed, order), x_TC), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        output_of(folded(permuted_attention(mixed, order), 2, context), x_TC), expected, atol=1e-5, rtol=1e-5
    )
    as_they_come = output_of(folded(mixed, 2, context), x_TC)
    assert (as_they_come - expected).abs().max() > 0.05, "the control must fail"


def test_order_has_the_least_predicted_loss_of_all(make_attention, make_moment) -> None:
    attention = make_attention(6, 6)
    context = MethodContext(0, second_moment=make_moment())

    def loss(order: list[int]) -> float:
        predicted = predicted_loss(permuted_attention(attention, order), 3, context)
        return predicted.keys + predicted.values

    orders = [[head for group in partition for head in group] for partition in _all_partitions(tuple(range(6)), 2)]
    best = min(map(loss, orders))
    assert loss(similarity_order(attention, 3, context)) == pytest.approx(best, abs=1e-9)
    assert loss(list(range(6))) > best


def test_one_group_and_no_merging_leave_the_order(make_attention) -> None:
    attention = make_attention(8, 4)
    assert similarity_order(attention, 4, MethodContext(0)) == [0, 1, 2, 3]
    assert similarity_order(attention, 1, MethodContext(0)) == [0, 1, 2, 3]


def test_heads_without_values_do_not_divide_by_zero(make_attention) -> None:
    attention = make_attention(8, 4)
    silent = replace(attention, o_CHD=attention.o_CHD * 0)
    assert sorted(similarity_order(silent, 2, MethodContext(0))) == [0, 1, 2, 3]
