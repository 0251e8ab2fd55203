"""Compare a model with its source: the part ``against_source`` of results.json."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from .measurements import ModelPair
from .measures.intervals import Array, bounded_estimate, clustered_mean, float_array, paired_ratio, ratio_estimate
from .measures.kv_cache import DecodeTimes
from .measures.recovery import reported_recovery
from .measures.retrieval import mean_gains
from .measures.tasks import answers_change
from .results import (
    UPTRAINED,
    AgainstSource,
    ContextBin,
    DocumentChange,
    KlHistogram,
    RecoveredShare,
    RetrievalChange,
    SpeedGain,
    SpeedRatio,
    TaskChange,
    TokenChange,
)
from .scoring.paired import PairScores
from .scoring.perplexity import exponential
from .scoring.windows import ScoredDocument, make_windows

Decoder = Callable[[Sequence[int]], str]
"""Turns token ids into text."""
_WORST = 5
_WORST_TOKENS = 10
# Text before a token, enough for a reader to see what was to be predicted.
_CONTEXT_TOKENS = 12
_FEWEST_TOKENS = 32
"""Documents below this are not listed as worst: a single bad token would put them there."""
_KL_EDGES = [10 ** (quarter / 4) for quarter in range(-24, 7)]
"""Bins of the KL histogram, four per decade, 1e-6 to 30 nats. The first and last bins take everything beyond."""


def against_source(
    pair: ModelPair, pairs: Sequence[ModelPair], window: int, stride: int, decode: Decoder
) -> AgainstSource:
    """Compute all numbers of one pair.

    Args:
        pairs: all pairs of the comparison in order, to find the conversion that this model was uptrained from.
        window, stride: that the text was scored with.
    """
    before, after = pair.source.document_nats, pair.other.document_nats
    # per token, so that long documents count by their length
    tokens = float_array(document.scored for document in pair.scores.source.documents)
    kl_N = pair.scores.kl_N
    all_kl = None if kl_N is None else np.concatenate(list(kl_N))
    return AgainstSource(
        perplexity_ratio=ratio_estimate(after - before, tokens).map(exponential).reported(),
        kl_nats=None if kl_N is None else bounded_estimate(_sums(kl_N), tokens, 0).reported(),
        kl_percentiles=None if all_kl is None else _percentiles(all_kl),
        kl_histogram=None if all_kl is None else _histogram(all_kl),
        same_top_token=bounded_estimate(_sums(pair.scores.same_top_N), tokens, 0, 1).reported(),
        cache_ratio=pair.source.own.cache.bytes_per_token / pair.other.own.cache.bytes_per_token,
        cross_cache_ratio=_cross_cache_ratio(pair),
        speedup=_speed_ratios(pair),
        by_context=[] if pair.source.own.cross_cache else _by_context(pair.scores, window, stride),
        worst_documents=_worst_documents(pair.scores),
        worst_tokens=_worst_tokens(pair.scores, decode),
        needle=_retrieval_changes(pair),
        tasks=_task_changes(pair),
        recovered=_recovered(pair, pairs),
    )


def _cross_cache_ratio(pair: ModelPair) -> float | None:
    before, after = pair.source.own.cross_cache, pair.other.own.cross_cache
    return None if before is None or after is None else before.bytes_per_token / after.bytes_per_token


def _sums(values_N: Iterable[np.ndarray[Any, Any]]) -> Array:
    return float_array(values.sum(dtype=np.float64) for values in values_N)


def _percentiles(values_N: np.ndarray[Any, Any]) -> dict[str, float | None]:
    levels = (50, 90, 99, 99.9)
    found = np.percentile(values_N, levels)
    return {f"{level:g}": _finite(float(value)) for level, value in zip(levels, found, strict=True)}


def _histogram(values_N: np.ndarray[Any, Any]) -> KlHistogram:
    """Count tokens by KL."""
    # numpy leaves out what lies beyond the edges, and the share of such tokens must not vanish
    inside = np.clip(values_N.astype(np.float64), _KL_EDGES[0], np.nextafter(_KL_EDGES[-1], 0))
    counts, _ = np.histogram(inside, _KL_EDGES)
    return KlHistogram(edges=_KL_EDGES, shares=(counts / len(values_N)).tolist())


def _speed_ratios(pair: ModelPair) -> list[SpeedRatio]:
    """Divide speeds, one entry per context and batch (none where the source was not timed beside the model)."""
    if not pair.source.decode:
        return []
    return [_speed_ratio(*times) for times in zip(pair.source.decode, pair.other.decode, strict=True)]


def _speed_ratio(source: DecodeTimes, other: DecodeTimes) -> SpeedRatio:
    """Divide the timings repeat by repeat, since a slow moment of the machine hits both models of a repeat."""
    first = zip(source.first_token_seconds, other.first_token_seconds, strict=True)
    # seconds of the source on top, so that more than 1 is faster
    decode = zip(source.decode_seconds, other.decode_seconds, strict=True)
    return SpeedRatio(
        context=source.context,
        batch=source.batch,
        decode=_gain([before / after for before, after in decode]),
        first_token=_gain([before / after for before, after in first]),
    )


def _gain(ratios: Sequence[float]) -> SpeedGain:
    found = paired_ratio(ratios)
    return SpeedGain(median=found.value, min=min(ratios), max=max(ratios), low=found.low, high=found.high)


def _by_context(scores: PairScores, window: int, stride: int) -> list[ContextBin]:
    """Average both models' nats by the number of tokens that the scored token could see, in bins that double."""
    context_N = np.concatenate(
        [
            np.arange(made.first_scored, made.stop) - made.start
            for made in make_windows(scores.source.documents, window, stride)
        ]
    )
    before_N, after_N = (
        # float64, since the sum of many float32 numbers loses digits
        np.concatenate(list(found.nll_N)).astype(np.float64)
        for found in (scores.source, scores.other)
    )
    bins, low = [], 1
    while low < window:
        chosen = (context_N >= low) & (context_N < 2 * low)
        if chosen.any():
            bins.append(
                ContextBin(
                    context_from=low,
                    context_to=min(2 * low, window) - 1,
                    tokens=int(chosen.sum()),
                    source_nats=float(before_N[chosen].mean()),
                    nats=float(after_N[chosen].mean()),
                )
            )
        low *= 2
    return bins


def _worst_documents(scores: PairScores) -> list[DocumentChange]:
    """List the documents whose perplexity grew most."""
    parts = zip(scores.source.documents, scores.source.per_document(), scores.other.per_document(), strict=True)
    rows = [
        DocumentChange(
            name=document.name,
            tokens=document.scored,
            source_perplexity=_finite(before.perplexity),
            perplexity=_finite(after.perplexity),
            ratio=_finite(exponential((after.nll_nats - before.nll_nats) / document.scored)),
        )
        for document, before, after in parts
        if document.scored >= _FEWEST_TOKENS
    ]
    # no ratio means beyond any float, which is worst of all
    return sorted(rows, key=lambda row: -(row.ratio or math.inf))[:_WORST]


def _finite(value: float) -> float | None:
    """Turn infinite and undefined numbers into None, since JSON has none."""
    return value if math.isfinite(value) else None


def _worst_tokens(scores: PairScores, decode: Decoder) -> list[TokenChange]:
    """List the tokens whose probability fell most."""
    rows = []
    parts = zip(scores.source.documents, scores.source.nll_N, scores.other.nll_N, strict=True)
    for document, before_N, after_N in parts:
        for place in np.argsort(before_N - after_N)[:_WORST_TOKENS]:
            rows.append((float(before_N[place]), float(after_N[place]), document, int(place) + 1))
    # each document gave its own worst tokens; the worst of all are among them
    rows.sort(key=lambda row: row[0] - row[1])
    return [_token_change(*row, decode) for row in rows[:_WORST_TOKENS] if row[1] > row[0]]


def _token_change(before: float, after: float, document: ScoredDocument, place: int, decode: Decoder) -> TokenChange:
    return TokenChange(
        document=document.name,
        place=place,
        before=decode(document.ids[max(0, place - _CONTEXT_TOKENS) : place]),
        token=decode([document.ids[place]]),
        source_probability=math.exp(-before),
        probability=math.exp(-after),
        lost_nats=after - before,
    )


def _retrieval_changes(pair: ModelPair) -> list[RetrievalChange]:
    """Subtract the source's gains, paired by passage."""
    return [
        RetrievalChange(
            length=before.length,
            gain_difference_nats=clustered_mean(mean_gains(after) - mean_gains(before), before.documents).reported(),
        )
        for before, after in zip(pair.source.own.retrieval, pair.other.own.retrieval, strict=True)
    ]


def _task_changes(pair: ModelPair) -> list[TaskChange]:
    """Subtract the source's task measures, paired by question."""
    return [
        TaskChange(
            task=before.task,
            measure=before.measure,
            difference=answers_change(before, after).reported(),
        )
        for before, after in zip(pair.source.own.tasks, pair.other.own.tasks, strict=True)
    ]


def _recovered(pair: ModelPair, pairs: Sequence[ModelPair]) -> RecoveredShare | None:
    """Find the share that uptraining recovered of the conversion before it: the last model not itself uptrained."""
    if pair.other.model.role != UPTRAINED:
        return None
    earlier = itertools.takewhile(lambda found: found is not pair, pairs)
    converted = [found.other for found in earlier if found.other.model.role != UPTRAINED]
    if not converted:
        return None
    before, lost, after = (found.document_nats for found in (pair.source, converted[-1], pair.other))
    tokens = float_array(document.scored for document in pair.scores.source.documents)
    return reported_recovery(before, lost, after, tokens, converted[-1].model.name)
