"""The content of results.json: every number of a comparison with its interval and its protocol.

Schema 1, the keys a reader may rely on::

    schema, kind, created, command, versions
    protocol        corpus, revision, text_sha256, ids_sha256, documents, skipped, truncated, tokens, utf8_bytes,
                    window, stride, batch_size, bos, dtype, device, attention, vocab, uniform_perplexity, interval,
                    decode
    documents       name, tokens, utf8_bytes
    models[]        name, role, path, model_type, parameters, weight_bytes, query_heads, kv_heads, perplexity,
                    bits_per_byte, nll_nats (one per document), cache_bytes_per_token, decode[], recovery[]
    models[1:]      also against_source: perplexity_ratio, kl_nats, kl_percentiles, same_top_token, cache_ratio,
                    speedup[], by_context[], worst_documents[], and recovered (null where it does not apply)

An estimate is ``{"value", "low", "high"}``; low and high are null with a single document.
"""

from __future__ import annotations

import itertools
import math
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from importlib.metadata import version
from typing import Any

import numpy as np

from .footprint import CacheSize, DecodeTimes, spread
from .intervals import LEVEL, RESAMPLES, SEED, Array, Estimate, ratio_estimate
from .paired import PairScores
from .perplexity import Scores
from .recovery import read_recovery
from .subjects import UPTRAINED, Subject
from .windows import TokenText, make_windows

SCHEMA, KIND = 1, "headfold.eval"
_PACKAGES = ("headfold", "torch", "transformers", "tokenizers", "scipy")
_WORST = 5


@dataclass(frozen=True)
class Measured:
    """One model's own numbers."""

    subject: Subject
    parameters: int
    scores: Scores
    cache: CacheSize
    decode: list[DecodeTimes]


@dataclass(frozen=True)
class Pair:
    """A model and the source, measured side by side."""

    source: Measured
    other: Measured
    scores: PairScores


def pooled(runs: Sequence[Measured]) -> Measured:
    """The source over all its pairs: the scores are the same each time, the timings are put together."""
    by_batch = zip(*(run.decode for run in runs), strict=True)
    decode = [
        replace(
            times[0],
            first_token_seconds=[second for time in times for second in time.first_token_seconds],
            decode_seconds=[second for time in times for second in time.decode_seconds],
        )
        for times in by_batch
    ]
    return replace(runs[0], decode=decode)


def collect(
    source: Measured, pairs: Sequence[Pair], text: TokenText, protocol: dict[str, Any], command: str
) -> dict[str, Any]:
    """Put everything measured into the form of results.json."""
    total = source.scores.total()
    return {
        "schema": SCHEMA,
        "kind": KIND,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command,
        "versions": {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}},
        "protocol": {
            **protocol,
            "text_sha256": text.text_sha256,
            "ids_sha256": text.ids_sha256,
            "documents": len(text.documents),
            "skipped": text.skipped,
            "truncated": text.truncated,
            "tokens": total.tokens,
            "utf8_bytes": total.utf8_bytes,
            "bos": text.bos,
            "uniform_perplexity": float(protocol["vocab"]),
            "interval": {
                "method": "BCa bootstrap over documents",
                "level": LEVEL,
                "resamples": RESAMPLES,
                "seed": SEED,
            },
        },
        "documents": [
            {"name": document.name, "tokens": document.scored, "utf8_bytes": document.utf8_bytes}
            for document in text.documents
        ],
        "models": [_model_row(source), *(_pair_row(pair, pairs, protocol) for pair in pairs)],
    }


def _model_row(measured: Measured) -> dict[str, Any]:
    subject, parts = measured.subject, measured.scores.per_document()
    nats, tokens = _array(part.nll_nats for part in parts), _array(part.tokens for part in parts)
    text_config = subject.config.get_text_config()
    return {
        "name": subject.name,
        "role": subject.role,
        "path": subject.spec,
        "model_type": subject.config.model_type,
        "parameters": measured.parameters,
        "weight_bytes": subject.checkpoint.weight_bytes,
        "query_heads": getattr(text_config, "num_attention_heads", None),
        "kv_heads": sorted(set(measured.cache.kv_heads)),
        "perplexity": ratio_estimate(nats, tokens).map(math.exp).as_dict(),
        "bits_per_byte": _bits_per_byte(nats, _array(part.utf8_bytes for part in parts)).as_dict(),
        "nll_nats": nats.tolist(),
        "cache_bytes_per_token": measured.cache.bytes_per_token,
        "decode": [
            {
                "batch": times.batch,
                "context": times.context,
                "new_tokens": times.new_tokens,
                "tokens_per_second": spread(times.tokens_per_second),
                "first_token_seconds": spread(times.first_token_seconds),
            }
            for times in measured.decode
        ],
        # the source may hold the metrics of its own pretraining, which are no recovery of anything
        "recovery": [] if subject.role == "source" else read_recovery(subject.folder),
    }


def _bits_per_byte(nats: Array, utf8_bytes: Array) -> Estimate:
    # Documents of special tokens alone have no bytes; added to every document, nothing would be left to divide by.
    if not utf8_bytes.all():
        return Estimate(float(nats.sum() / math.log(2) / max(utf8_bytes.sum(), 1)), None, None)
    return ratio_estimate(nats / math.log(2), utf8_bytes)


def _pair_row(pair: Pair, pairs: Sequence[Pair], protocol: dict[str, Any]) -> dict[str, Any]:
    before, after = _nats(pair.source), _nats(pair.other)
    tokens = _array(document.scored for document in pair.scores.source.documents)
    kl = pair.scores.kl_N
    against = {
        "perplexity_ratio": ratio_estimate(after - before, tokens).map(math.exp).as_dict(),
        "kl_nats": ratio_estimate(_sums(kl), tokens).as_dict(),
        "kl_percentiles": _percentiles(np.concatenate(list(kl))),
        "same_top_token": ratio_estimate(_sums(pair.scores.same_top_N), tokens).as_dict(),
        "cache_ratio": pair.source.cache.bytes_per_token / pair.other.cache.bytes_per_token,
        "speedup": [_speedup(*times) for times in zip(pair.source.decode, pair.other.decode, strict=True)],
        "by_context": _by_context(pair.scores, protocol["window"], protocol["stride"]),
        "worst_documents": _worst_documents(pair),
        "recovered": _recovered(pair, pairs),
    }
    return {**_model_row(pair.other), "against_source": against}


def _nats(measured: Measured) -> Array:
    return _array(part.nll_nats for part in measured.scores.per_document())


def _sums(values_N: Sequence[np.ndarray[Any, Any]]) -> Array:
    return _array(values.sum(dtype=np.float64) for values in values_N)


def _array(numbers: Any) -> Array:
    return np.array([float(number) for number in numbers], dtype=np.float64)


def _percentiles(values_N: np.ndarray[Any, Any]) -> dict[str, float]:
    levels = (50, 90, 99, 99.9)
    return {f"{level:g}": float(found) for level, found in zip(levels, np.percentile(values_N, levels), strict=True)}


def _speedup(source: DecodeTimes, other: DecodeTimes) -> dict[str, Any]:
    """How many times as fast, repeat by repeat; above one is faster than the source."""
    first = zip(source.first_token_seconds, other.first_token_seconds, strict=True)
    decode = zip(source.decode_seconds, other.decode_seconds, strict=True)
    return {
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


def _worst_documents(pair: Pair) -> list[dict[str, Any]]:
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
                    "source_perplexity": before.perplexity,
                    "perplexity": after.perplexity,
                    "ratio": after.perplexity / before.perplexity,
                }
            )
    return sorted(rows, key=lambda row: -float(row["ratio"]))[:_WORST]


def _recovered(pair: Pair, pairs: Sequence[Pair]) -> dict[str, Any] | None:
    """Share of the log-perplexity that conversion lost and uptraining won back: ln(ppl_c/ppl_u) / ln(ppl_c/ppl_s).

    The converted model is the last one named before the uptrained one that was not uptrained itself.
    """
    if pair.other.subject.role != UPTRAINED:
        return None
    earlier = list(itertools.takewhile(lambda found: found is not pair, pairs))
    candidates = [found.other for found in earlier if found.other.subject.role != UPTRAINED]
    if not candidates:
        return None
    converted = candidates[-1]
    lost = _nats(converted) - _nats(pair.source)
    if lost.sum() <= 0:
        return None  # nothing was lost, so there is nothing to recover
    share = ratio_estimate(_nats(converted) - _nats(pair.other), lost)
    return {**share.as_dict(), "converted": converted.subject.name}
