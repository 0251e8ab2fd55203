"""A model against its source: the numbers of ``against_source`` in results.json.

``perplexity_ratio``, ``kl_nats``, ``same_top_token`` are estimates paired by document; ``kl_percentiles`` and
``kl_histogram`` describe single tokens; ``needle`` and ``tasks`` are differences paired by passage and by question;
``recovered`` is null where it does not apply, and so is ``cross_cache_ratio`` of models without an encoder. KL is null
where the source's scores came from a cache.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .measures.intervals import Array, ratio_estimate
from .measures.kv_cache import DecodeTimes, spread
from .measures.retrieval import gains
from .models import UPTRAINED
from .results import Decoder, Measured, array, mean_estimate
from .scoring.paired import PairScores
from .scoring.perplexity import exponential
from .scoring.windows import ScoredDocument, make_windows

_WORST = 5
_WORST_TOKENS = 10
_CONTEXT_TOKENS = 12
_KL_EDGES = [10 ** (quarter / 4) for quarter in range(-24, 7)]
"""Bins of the KL histogram: four to a decade, 1e-6 to 30 nats; the first and the last are open."""


@dataclass(frozen=True)
class ModelPair:
    """A model and the source, measured side by side."""

    source: Measured
    other: Measured
    scores: PairScores


def against_source(
    pair: ModelPair, pairs: Sequence[ModelPair], window: int, stride: int, decode: Decoder
) -> dict[str, Any]:
    """All numbers of one pair.

    Args:
        pairs: all of the comparison, in its order, for what uptraining won back.
        window, stride: of the reading.
        decode: token ids to text.
    """
    before, after = _nats(pair.source), _nats(pair.other)
    tokens = array(document.scored for document in pair.scores.source.documents)
    kl = pair.scores.kl_N
    together = None if kl is None else np.concatenate(list(kl))
    return {
        "perplexity_ratio": ratio_estimate(after - before, tokens).map(exponential).as_dict(),
        "kl_nats": None if kl is None else ratio_estimate(_sums(kl), tokens).as_dict(),
        "kl_percentiles": None if together is None else _percentiles(together),
        "kl_histogram": None if together is None else _histogram(together),
        "same_top_token": ratio_estimate(_sums(pair.scores.same_top_N), tokens).as_dict(),
        "cache_ratio": pair.source.cache.bytes_per_token / pair.other.cache.bytes_per_token,
        "cross_cache_ratio": _cross_cache_ratio(pair),
        "speedup": _speedups(pair),
        "by_context": [] if pair.source.cross_cache else _by_context(pair.scores, window, stride),
        "worst_documents": _worst_documents(pair),
        "worst_tokens": _worst_tokens(pair.scores, decode),
        "needle": _needle(pair),
        "tasks": _tasks(pair),
        "recovered": _recovered(pair, pairs),
    }


def _cross_cache_ratio(pair: ModelPair) -> float | None:
    before, after = pair.source.cross_cache, pair.other.cross_cache
    return None if before is None or after is None else before.bytes_per_token / after.bytes_per_token


def _nats(measured: Measured) -> Array:
    return array(part.nll_nats for part in measured.scores.per_document())


def _sums(values_N: Iterable[np.ndarray[Any, Any]]) -> Array:
    return array(values.sum(dtype=np.float64) for values in values_N)


def _percentiles(values_N: np.ndarray[Any, Any]) -> dict[str, float | None]:
    levels = (50, 90, 99, 99.9)
    return {
        f"{level:g}": _finite(float(found))
        for level, found in zip(levels, np.percentile(values_N, levels), strict=True)
    }


def _histogram(values_N: np.ndarray[Any, Any]) -> dict[str, list[float]]:
    """Share of tokens by KL: ``edges`` in nats, and ``shares`` of the bins between them."""
    inside = np.clip(values_N.astype(np.float64), _KL_EDGES[0], np.nextafter(_KL_EDGES[-1], 0))
    counts, _ = np.histogram(inside, _KL_EDGES)
    return {"edges": _KL_EDGES, "shares": (counts / len(values_N)).tolist()}


def _speedups(pair: ModelPair) -> list[dict[str, Any]]:
    """One entry per point of the grid; none where the source was not timed beside the model."""
    if not pair.source.decode:
        return []
    return [_speedup(*times) for times in zip(pair.source.decode, pair.other.decode, strict=True)]


def _speedup(source: DecodeTimes, other: DecodeTimes) -> dict[str, Any]:
    """How many times as fast, repeat by repeat; above one is faster than the source."""
    first = zip(source.first_token_seconds, other.first_token_seconds, strict=True)
    decode = zip(source.decode_seconds, other.decode_seconds, strict=True)
    return {
        "context": source.context,
        "batch": source.batch,
        "decode": spread([before / after for before, after in decode]),
        "first_token": spread([before / after for before, after in first]),
    }


def _by_context(scores: PairScores, window: int, stride: int) -> list[dict[str, Any]]:
    """Perplexity of both by the number of tokens that the scored token could see, in bins that double."""
    documents = scores.source.documents
    context_N = np.concatenate(
        [np.arange(made.first_scored, made.stop) - made.start for made in make_windows(documents, window, stride)]
    )
    before_N, after_N = (
        np.concatenate(list(found.nll_N)).astype(np.float64) for found in (scores.source, scores.other)
    )
    rows, low = [], 1
    while low < window:
        chosen = (context_N >= low) & (context_N < 2 * low)
        if chosen.any():
            means = {"source_nats": float(before_N[chosen].mean()), "nats": float(after_N[chosen].mean())}
            rows.append({"from": low, "to": min(2 * low, window) - 1, "tokens": int(chosen.sum()), **means})
        low *= 2
    return rows


def _worst_documents(pair: ModelPair) -> list[dict[str, Any]]:
    """Documents of at least 32 tokens whose perplexity grew most."""
    rows: list[dict[str, Any]] = []
    parts = zip(
        pair.scores.source.documents, pair.scores.source.per_document(), pair.scores.other.per_document(), strict=True
    )
    for document, before, after in parts:
        if document.scored >= 32:
            rows.append(
                {
                    "name": document.name,
                    "tokens": document.scored,
                    "source_perplexity": _finite(before.perplexity),
                    "perplexity": _finite(after.perplexity),
                    "ratio": _finite(exponential((after.nll_nats - before.nll_nats) / document.scored)),
                }
            )
    return sorted(rows, key=lambda row: -float(row["ratio"] or math.inf))[:_WORST]


def _finite(value: float) -> float | None:
    """A number that JSON can hold."""
    return value if math.isfinite(value) else None


def _worst_tokens(scores: PairScores, decode: Decoder) -> list[dict[str, Any]]:
    """Tokens that became most unlikely: what stood before them, and their probability in both models."""
    rows = []
    parts = scores.source.documents, scores.source.nll_N, scores.other.nll_N
    for document, before_N, after_N in zip(*parts, strict=True):
        for place in np.argsort(before_N - after_N)[:_WORST_TOKENS]:
            rows.append((float(after_N[place] - before_N[place]), document, int(place) + 1))
    rows.sort(key=lambda row: -row[0])
    return [_token_row(scores, *row, decode) for row in rows[:_WORST_TOKENS] if row[0] > 0]


def _token_row(
    scores: PairScores, lost_nats: float, document: ScoredDocument, place: int, decode: Decoder
) -> dict[str, Any]:
    number = next(index for index, one in enumerate(scores.source.documents) if one is document)
    before, after = (float(found.nll_N[number][place - 1]) for found in (scores.source, scores.other))
    return {
        "document": document.name,
        "place": place,
        "before": decode(document.ids[max(0, place - _CONTEXT_TOKENS) : place]),
        "token": decode([document.ids[place]]),
        "source_probability": math.exp(-before),
        "probability": math.exp(-after),
        "lost_nats": lost_nats,
    }


def _needle(pair: ModelPair) -> list[dict[str, Any]]:
    """How much more (or less) the model fetches than the source, paired by passage."""
    return [
        {"length": before.length, "gain_difference_nats": mean_estimate(gains(after) - gains(before))}
        for before, after in zip(pair.source.retrieved, pair.other.retrieved, strict=True)
    ]


def _tasks(pair: ModelPair) -> list[dict[str, Any]]:
    """Differences of task measures, paired by question."""
    return [
        {
            "task": before.task,
            "measure": before.measure,
            "difference": mean_estimate(array(after.values) - array(before.values)),
        }
        for before, after in zip(pair.source.answered, pair.other.answered, strict=True)
    ]


def _recovered(pair: ModelPair, pairs: Sequence[ModelPair]) -> dict[str, Any] | None:
    """Share of the log-perplexity that conversion lost and uptraining won back.

    The converted model is the last one named before the uptrained one that was not uptrained itself.
    """
    if pair.other.subject.role != UPTRAINED:
        return None
    earlier = list(itertools.takewhile(lambda found: found is not pair, pairs))
    candidates = [found.other for found in earlier if found.other.subject.role != UPTRAINED]
    if not candidates:
        return None
    converted = candidates[-1]
    return recovered_share(_nats(pair.source), _nats(converted), _nats(pair.other), converted.subject.name)


def recovered_share(source: Array, converted: Array, uptrained: Array, name: str) -> dict[str, Any] | None:
    """ln(ppl_c/ppl_u) / ln(ppl_c/ppl_s) from nats by document; None where the conversion lost nothing."""
    lost = converted - source
    if lost.sum() <= 0:
        return None
    return {**ratio_estimate(converted - uptrained, lost).as_dict(), "converted": name}
