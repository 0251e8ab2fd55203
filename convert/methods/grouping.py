"""Which KV heads form a group: neighbours as they come, or those that share best (``similarity``)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import combinations
from math import comb
from typing import TYPE_CHECKING

from .attention import Attention
from .basis_change import contiguous_groups
from .folded import spectra

if TYPE_CHECKING:
    from .table import MethodContext

Cost = Callable[[tuple[int, ...]], float]
"""Predicted loss of one group, given its heads in ascending order."""

_EXACT_HEADS = 16
_EXACT_SUBSETS = 2000
"""Each possible group costs an eigenvalue problem of m·D rows: 10 ms for four heads of 64. 16 heads give 1,820 groups
of four (exact), but 12,870 groups of eight (searched)."""
_CHECKS_PER_HEAD = 12


def similarity_order(attention: Attention, groups: int, context: MethodContext) -> list[int]:
    """The order of KV heads in which neighbours share best: least summed predicted loss over equal-size groups.

    The loss of a group is the share of the layer's K energy plus the share of its V energy that ``folded`` would lose.
    The partition is the best of all where the heads are at most 16 and the possible groups at most 2,000; beyond, it
    is found by swaps that start from the sums of pairwise losses, and is never worse than neighbours.

    Returns:
        A permutation of range(K) for :func:`headfold.convert.methods.attention.permuted`; groups by their first head.

    Raises:
        UnsupportedError: the rotary layout is not known.
        UsageError: the statistics belong to a model of another width.
    """
    heads = attention.kv_heads
    members = heads // groups
    if members in (1, heads):
        return list(range(heads))
    layer = spectra(attention, context)
    totals = layer.total()

    @cache
    def cost(group: tuple[int, ...]) -> float:
        lost = layer.lost(list(group))
        return sum(part / total for part, total in zip(lost, totals, strict=True) if total > 0)

    exact = heads <= _EXACT_HEADS and comb(heads, members) <= _EXACT_SUBSETS
    partition = best_partition(heads, members, cost) if exact else searched_partition(heads, members, cost)
    return [head for group in partition for head in group]


def best_partition(heads: int, members: int, cost: Cost) -> list[tuple[int, ...]]:
    """The cheapest partition of range(heads) into groups of ``members``: dynamic programming over sets of heads.

    Groups are taken in the order of their lowest head, so each set of heads is solved once: at most 2^heads steps
    where trying all partitions takes over two million for 16 heads in pairs. Neighbours win a tie.
    """

    @cache
    def solve(left: tuple[int, ...]) -> tuple[float, tuple[tuple[int, ...], ...]]:
        if not left:
            return 0.0, ()
        first, others = left[0], left[1:]
        best: tuple[float, tuple[tuple[int, ...], ...]] | None = None
        for mates in combinations(others, members - 1):
            group = (first, *mates)
            rest, partition = solve(tuple(head for head in others if head not in mates))
            total = cost(group) + rest
            if best is None or total < best[0] - 1e-12:
                best = total, (group, *partition)
        assert best is not None
        return best

    return list(solve(tuple(range(heads)))[1])


def searched_partition(heads: int, members: int, cost: Cost) -> list[tuple[int, ...]]:
    """A good partition where the best is out of reach: swap heads between groups while the summed cost falls.

    Swaps are tried in the order of what the pairwise costs promise, from neighbours and from the partition that is
    best by pairwise costs; the number of costs computed stays proportional to the number of heads.
    """
    promise = _pairwise(heads, cost)
    neighbours = [set(group) for group in contiguous_groups(heads, heads // members)]
    promising = _swapped([set(group) for group in neighbours], promise, promise, checks=heads**3)
    candidates = [_swapped(start, cost, promise, _CHECKS_PER_HEAD * heads) for start in (neighbours, promising)]
    best = min(candidates, key=lambda partition: sum(cost(_key(group)) for group in partition))
    return sorted(_key(group) for group in best)


def _pairwise(heads: int, cost: Cost) -> Cost:
    pairs = {pair: cost(pair) for pair in combinations(range(heads), 2)}
    return lambda group: sum(pairs[pair] for pair in combinations(group, 2))


def _swapped(start: list[set[int]], cost: Cost, promise: Cost, checks: int) -> list[set[int]]:
    """Take the first swap that lowers the cost, again and again; give up after ``checks`` swaps looked at."""
    partition = start
    while True:
        for _, first, second, one, other in _swaps(partition, promise):
            if checks == 0:
                return partition
            checks -= 1
            new_one, new_other = _exchanged(partition[first], partition[second], one, other)
            before = cost(_key(partition[first])) + cost(_key(partition[second]))
            if cost(_key(new_one)) + cost(_key(new_other)) < before - 1e-12:
                partition = [*partition]
                partition[first], partition[second] = new_one, new_other
                break
        else:
            return partition


def _swaps(partition: list[set[int]], promise: Cost) -> list[tuple[float, int, int, int, int]]:
    """(promised change, two groups, the head that each gives), most promising first."""
    found = []
    for first, second in combinations(range(len(partition)), 2):
        before = promise(_key(partition[first])) + promise(_key(partition[second]))
        for one in sorted(partition[first]):
            for other in sorted(partition[second]):
                new_one, new_other = _exchanged(partition[first], partition[second], one, other)
                found.append((promise(_key(new_one)) + promise(_key(new_other)) - before, first, second, one, other))
    return sorted(found)


def _exchanged(group: set[int], mates: set[int], one: int, other: int) -> tuple[set[int], set[int]]:
    return group - {one} | {other}, mates - {other} | {one}


def _key(group: set[int]) -> tuple[int, ...]:
    return tuple(sorted(group))
