"""Choose which KV heads form a group: ``similarity`` puts those together that share a head best."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import combinations
from math import comb

from .attention import Attention
from .basis_change import contiguous_groups
from .context import MethodContext
from .folded import weighted_grams

Cost = Callable[[tuple[int, ...]], float]
"""Heads of one group in ascending order → its predicted loss."""

_EXACT_HEADS = 16
_EXACT_SUBSETS = 2000
"""Each possible group costs an eigenvalue problem of M·D rows: 10 ms for four heads of 64. 16 heads give 1,820 groups
of four (exact), but 12,870 groups of eight (searched)."""
_CHECKS_PER_HEAD = 12


def similarity_order(attention: Attention, groups: int, context: MethodContext) -> list[int]:
    """Order the KV heads so that neighbours share best: least summed predicted loss over groups of equal size.

    The loss of a group is the share of the layer's K energy plus the share of its V energy that ``folded`` would lose.
    The partition is the best of all for up to 16 heads with up to 2,000 possible groups. Beyond that a search swaps
    heads between groups; its result is never worse than neighbours.

    Returns:
        A permutation of range(K) for :func:`.permutation.permuted_attention`; groups are sorted by their first head.

    Raises:
        UnsupportedError: the rotary layout is not known.
        UsageError: the statistics belong to a model of another width.
    """
    heads = attention.kv_heads
    members = heads // groups
    if members in (1, heads):  # one possible partition only
        return list(range(heads))
    grams = weighted_grams(attention, context)
    totals = grams.total_energy()

    @cache
    def cost(group: tuple[int, ...]) -> float:
        lost = grams.lost_energy(list(group))
        # Squared scores and squared outputs have different units; their shares of the whole can be added.
        return sum(part / total for part, total in zip(lost, totals, strict=True) if total > 0)

    exact = heads <= _EXACT_HEADS and comb(heads, members) <= _EXACT_SUBSETS
    partition = best_partition(heads, members, cost) if exact else searched_partition(heads, members, cost)
    return [head for group in partition for head in group]


def best_partition(heads: int, members: int, cost: Cost) -> list[tuple[int, ...]]:
    """Find the cheapest partition of range(heads) into groups of ``members``.

    Dynamic programming: groups are taken in the order of their lowest head, so each set of remaining heads is solved
    once. That takes at most 2^heads steps, where 16 heads in pairs have over two million partitions. Neighbours win a
    tie.
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
            # The margin makes ties independent of rounding: neighbours come first and win them.
            if best is None or total < best[0] - 1e-12:
                best = total, (group, *partition)
        assert best is not None
        return best

    return list(solve(tuple(range(heads)))[1])


def searched_partition(heads: int, members: int, cost: Cost) -> list[tuple[int, ...]]:
    """Find a good partition where the best takes too long: swap heads between groups while the summed cost falls.

    Swaps are tried in the order of the gain that pairwise costs estimate. The search starts twice, from neighbours and
    from a good partition by pairwise costs; the number of costs computed is proportional to the number of heads.
    """
    estimate = _pairwise(heads, cost)
    # The start by pairs can end in a worse optimum, so the search starts from neighbours as well.
    neighbours = [set(group) for group in contiguous_groups(heads, heads // members)]
    by_pairs = _swapped([set(group) for group in neighbours], estimate, estimate, checks=heads**3)
    candidates = [_swapped(start, cost, estimate, _CHECKS_PER_HEAD * heads) for start in (neighbours, by_pairs)]
    best = min(candidates, key=lambda partition: sum(cost(_key(group)) for group in partition))
    return sorted(_key(group) for group in best)


def _pairwise(heads: int, cost: Cost) -> Cost:
    """Estimate the cost of a group by the sum over its pairs: K² eigenvalue problems serve all groups."""
    pairs = {pair: cost(pair) for pair in combinations(range(heads), 2)}
    return lambda group: sum(pairs[pair] for pair in combinations(group, 2))


def _swapped(start: list[set[int]], cost: Cost, estimate: Cost, checks: int) -> list[set[int]]:
    """Take the first swap that lowers the cost, again and again, and stop after checking ``checks`` swaps."""
    partition = start
    while True:
        for _, first, second, one, other in _swaps(partition, estimate):
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


def _swaps(partition: list[set[int]], estimate: Cost) -> list[tuple[float, int, int, int, int]]:
    """List (estimated change, two groups, the head that each gives), largest fall first."""
    found = []
    for first, second in combinations(range(len(partition)), 2):
        before = estimate(_key(partition[first])) + estimate(_key(partition[second]))
        for one in sorted(partition[first]):
            for other in sorted(partition[second]):
                new_one, new_other = _exchanged(partition[first], partition[second], one, other)
                change = estimate(_key(new_one)) + estimate(_key(new_other)) - before
                found.append((change, first, second, one, other))
    return sorted(found)


def _exchanged(group: set[int], mates: set[int], one: int, other: int) -> tuple[set[int], set[int]]:
    return group - {one} | {other}, mates - {other} | {one}


def _key(group: set[int]) -> tuple[int, ...]:
    return tuple(sorted(group))
