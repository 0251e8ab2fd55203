"""The content of results.json: every number of a comparison with its interval and its protocol.

Schema 2, the keys a reader may rely on::

    schema, kind, created, command, settings, versions
    protocol        corpus, revision, text_sha256, ids_sha256, documents, skipped, truncated, tokens, utf8_bytes,
                    window, stride, batch_size, bos, dtype, device, processes, attention, vocab, uniform_perplexity,
                    interval, decode, needle, targets (null, or what an encoder-decoder was to write),
                    source_from_cache
    documents       name, tokens, utf8_bytes
    models[]        name, role, path, digest, model_type, parameters, weight_bytes, query_heads, kv_heads, perplexity,
                    bits_per_byte, nll_nats (one per document), cache_bytes_per_token, cross_cache_bytes_per_token
                    (of an encoder-decoder, per token read; null of others), cache_formula_bytes, capacity, decode[],
                    needle[], tasks[], recovery[]
    models[1:]      also against_source, see :mod:`headfold.eval.vs_source`

An estimate is ``{"value", "low", "high"}``; low and high are null with a single document. What was not measured is null
or an empty list.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from importlib.metadata import version
from typing import Any

import numpy as np

from .measures.capacity import CacheSize
from .measures.intervals import LEVEL, RESAMPLES, SEED, Array, Estimate, ratio_estimate
from .measures.kv_cache import DecodeTimes, spread
from .measures.recovery import read_recovery
from .measures.retrieval import Retrieved, gains
from .measures.tasks import Answered
from .models import Subject
from .scoring.perplexity import Scores, exponential
from .scoring.windows import TokenText

SCHEMA, KIND = 2, "headfold.eval"
_PACKAGES = ("headfold", "torch", "transformers", "tokenizers", "scipy")


@dataclass(frozen=True)
class Measured:
    """One model's own numbers.

    Attributes:
        formula_bytes: KV cache per token by the config, None where it does not say.
        capacity: what fits into a given memory, see :func:`headfold.eval.measures.capacity.capacity`.
        cross_cache: of an encoder-decoder: what a token that is read takes; ``cache`` is then of those written.
    """

    subject: Subject
    parameters: int
    scores: Scores
    cache: CacheSize
    cross_cache: CacheSize | None = None
    formula_bytes: float | None = None
    capacity: dict[str, Any] | None = None
    decode: list[DecodeTimes] = field(default_factory=list)
    retrieved: list[Retrieved] = field(default_factory=list)
    answered: list[Answered] = field(default_factory=list)


def pooled(runs: Sequence[Measured]) -> Measured:
    """The source over all groups of models that it ran beside: scores are the same, timings are put together."""
    by_point = zip(*(run.decode for run in runs), strict=True)
    decode = [
        replace(
            times[0],
            first_token_seconds=[second for time in times for second in time.first_token_seconds],
            decode_seconds=[second for time in times for second in time.decode_seconds],
        )
        for times in by_point
    ]
    return replace(runs[0], decode=decode)


def collect(
    source: Measured,
    others: Sequence[tuple[Measured, dict[str, Any]]],
    text: TokenText,
    protocol: dict[str, Any],
    command: str,
    settings: dict[str, Any],
) -> dict[str, Any]:
    """Put everything measured into the form of results.json.

    Args:
        others: each model with its ``against_source``.
    """
    total = source.scores.total()
    return {
        "schema": SCHEMA,
        "kind": KIND,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command,
        "settings": settings,
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
        "models": [_model_row(source), *({**_model_row(one), "against_source": against} for one, against in others)],
    }


def _model_row(measured: Measured) -> dict[str, Any]:
    subject, parts = measured.subject, measured.scores.per_document()
    nats, tokens = array(part.nll_nats for part in parts), array(part.tokens for part in parts)
    text_config = subject.config.get_text_config()
    return {
        "name": subject.name,
        "role": subject.role,
        "path": subject.spec,
        "digest": subject.checkpoint.digest(),
        "model_type": subject.config.model_type,
        "parameters": measured.parameters,
        "weight_bytes": subject.checkpoint.weight_bytes,
        "query_heads": getattr(text_config, "num_attention_heads", None),
        "kv_heads": sorted(set(measured.cache.kv_heads)),
        "perplexity": ratio_estimate(nats, tokens).map(exponential).as_dict(),
        "bits_per_byte": _bits_per_byte(nats, array(part.utf8_bytes for part in parts)).as_dict(),
        "nll_nats": nats.tolist(),
        "cache_bytes_per_token": measured.cache.bytes_per_token,
        "cross_cache_bytes_per_token": None if measured.cross_cache is None else measured.cross_cache.bytes_per_token,
        "cache_formula_bytes": measured.formula_bytes,
        "capacity": measured.capacity,
        "decode": [_decode_row(times) for times in measured.decode],
        "needle": [_needle_row(found) for found in measured.retrieved],
        "tasks": [_task_row(found) for found in measured.answered],
        # the source may hold the metrics of its own pretraining, which are no recovery of anything
        "recovery": [] if subject.role == "source" else read_recovery(subject.folder),
    }


def _bits_per_byte(nats: Array, utf8_bytes: Array) -> Estimate:
    # Documents of special tokens alone have no bytes; added to every document, nothing would be left to divide by.
    if not utf8_bytes.any():
        return Estimate(math.nan, None, None)
    if not utf8_bytes.all():
        return Estimate(float(nats.sum() / math.log(2) / max(utf8_bytes.sum(), 1)), None, None)
    return ratio_estimate(nats / math.log(2), utf8_bytes)


def _decode_row(times: DecodeTimes) -> dict[str, Any]:
    return {
        "context": times.context,
        "batch": times.batch,
        "new_tokens": times.new_tokens,
        "tokens_per_second": spread(times.tokens_per_second),
        "first_token_seconds": spread(times.first_token_seconds),
        "peak_bytes": times.peak_bytes,
    }


def _needle_row(found: Retrieved) -> dict[str, Any]:
    return {
        "length": found.length,
        "gain_nats": mean_estimate(gains(found)),
        "gain_by_depth": np.mean(found.gain_LD, axis=0).tolist(),
        "found_by_depth": np.mean(found.found_LD, axis=0).tolist(),
    }


def _task_row(found: Answered) -> dict[str, Any]:
    values = array(found.values)
    return {
        "task": found.task,
        "measure": found.measure,
        "higher_is_better": found.higher_is_better,
        "questions": len(values),
        "mean": mean_estimate(values),
        "standard_error": float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None,
    }


def mean_estimate(values: Array) -> dict[str, float | None]:
    """The mean of values that count the same, with its interval."""
    return ratio_estimate(values, np.ones_like(values)).as_dict()


def array(numbers: Any) -> Array:
    """Float64 of any numbers."""
    return np.array([float(number) for number in numbers], dtype=np.float64)


Decoder = Callable[[Sequence[int]], str]
"""Token ids to text."""
