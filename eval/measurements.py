"""Measure each model by itself, and summarise its numbers as results.

A new measure of one model goes into :class:`OwnMeasurements`, :func:`measure_alone` and :func:`model_result`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from ..console import info
from .measures.capacity import CacheSize
from .measures.intervals import Array, Estimate, clustered_mean, float_array, ratio_estimate
from .measures.kv_cache import DecodeTimes, measure_cache, measure_cross_cache
from .measures.recovery import read_recovery
from .measures.retrieval import HiddenPassage, RetrievalScores, mean_gains, score_retrieval
from .measures.tasks import TaskAnswers, TaskSettings, answer_tasks, answers_mean
from .models import ComparedModel
from .protocol import EvalProtocol
from .results import (
    SOURCE,
    DecodeResult,
    ModelResult,
    RepeatSpread,
    ReportedEstimate,
    RetrievalResult,
    ServingCapacity,
    TaskResult,
)
from .scoring.paired import PairScores
from .scoring.perplexity import Scores, exponential


@dataclass(frozen=True)
class OwnMeasurements:
    """Measurements of a loaded model that need no other model. They are saved, so they consist of JSON values.

    Attributes:
        cache: of an encoder-decoder, the cache of the tokens that its decoder writes.
        cross_cache: of an encoder-decoder, the cache of the tokens that its encoder reads.
    """

    parameters: int
    cache: CacheSize
    cross_cache: CacheSize | None
    retrieval: list[RetrievalScores]
    tasks: list[TaskAnswers]

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> OwnMeasurements:
        """Restore measurements that were saved as ``dataclasses.asdict`` gives them."""
        return TypeAdapter(cls).validate_python(content)


def measure_alone(
    model: ComparedModel,
    loaded: Any,
    protocol: EvalProtocol,
    passages: Sequence[HiddenPassage],
    tasks: tuple[TaskSettings, tuple[Any, list[str]]] | None,
) -> OwnMeasurements:
    """Measure what needs no other model.

    Args:
        loaded: the model with its weights.
        tasks: settings of the tasks, and the result of :func:`.measures.tasks.find_tasks`.
    """
    # vocab: models whose vocabularies are padded differently must rank among the same ids
    retrieval = score_retrieval(loaded, passages, batch_size=protocol.batch_size, vocab=protocol.vocab)
    answers = []
    if tasks is not None:
        info(f"{model.name} answers {', '.join(tasks[1][1])}")
        answers = answer_tasks(loaded, model.tokenizer(), *tasks)
    return OwnMeasurements(
        parameters=sum(parameter.numel() for parameter in loaded.parameters()),
        cache=measure_cache(loaded),
        cross_cache=measure_cross_cache(loaded),
        retrieval=retrieval,
        tasks=answers,
    )


@dataclass(frozen=True)
class ModelMeasurements:
    """Everything measured of one model.

    Attributes:
        formula_bytes: KV cache per token as computed from the config, None where it does not say.
        capacity: what fits into a given memory, None where the user named none.
        decode: empty where decoding was not timed.
    """

    model: ComparedModel
    scores: Scores
    own: OwnMeasurements
    formula_bytes: float | None
    capacity: ServingCapacity | None
    decode: list[DecodeTimes]

    @property
    def document_nats(self) -> Array:
        """Sum the negative log-likelihood of each document."""
        return float_array(part.nll_nats for part in self.scores.per_document())


@dataclass(frozen=True)
class ModelPair:
    """A model and its source, measured side by side."""

    source: ModelMeasurements
    other: ModelMeasurements
    scores: PairScores


def pool_source_runs(runs: Sequence[ModelMeasurements]) -> ModelMeasurements:
    """Join the runs of the source beside each group of models: its scores are equal, its timings are put together."""
    by_point = zip(*(run.decode for run in runs), strict=True)
    decode = [
        replace(
            # memory is equal in all runs, so only the seconds are pooled
            times[0],
            first_token_seconds=[second for time in times for second in time.first_token_seconds],
            decode_seconds=[second for time in times for second in time.decode_seconds],
        )
        for times in by_point
    ]
    return replace(runs[0], decode=decode)


def model_result(measured: ModelMeasurements) -> ModelResult:
    """Summarise one model by itself. ``vs_source.py`` adds its comparison with the source."""
    model, own, parts = measured.model, measured.own, measured.scores.per_document()
    nats, tokens = measured.document_nats, float_array(part.tokens for part in parts)
    return ModelResult(
        name=model.name,
        role=model.role,
        path=model.spec,
        digest=model.checkpoint.digest(),
        model_type=model.config.model_type,
        parameters=own.parameters,
        weight_bytes=model.checkpoint.weight_bytes,
        # some families call it something else, and the report then shows "?"
        query_heads=getattr(model.config.get_text_config(), "num_attention_heads", None),
        # layers may have different numbers of heads
        kv_heads=sorted(set(own.cache.kv_heads)),
        perplexity=ratio_estimate(nats, tokens).map(exponential).reported(),
        bits_per_byte=_bits_per_byte(nats, float_array(part.utf8_bytes for part in parts)),
        nll_nats=nats.tolist(),
        cache_bytes_per_token=own.cache.bytes_per_token,
        cross_cache_bytes_per_token=None if own.cross_cache is None else own.cross_cache.bytes_per_token,
        cache_formula_bytes=measured.formula_bytes,
        capacity=measured.capacity,
        decode=[_decode_result(times) for times in measured.decode],
        needle=[_retrieval_result(found) for found in own.retrieval],
        tasks=[_task_result(found) for found in own.tasks],
        # the source may hold the metrics of its own pretraining, during which nothing was recovered
        recovery=[] if model.role == SOURCE else read_recovery(model.folder),
    )


def _bits_per_byte(nats: Array, utf8_bytes: Array) -> ReportedEstimate:
    if not utf8_bytes.any():
        return Estimate(math.nan, None, None).reported()
    # A document of special tokens alone has no bytes. A draw of nothing but such documents would divide by zero.
    if not utf8_bytes.all():
        return Estimate(float(nats.sum() / math.log(2) / utf8_bytes.sum()), None, None).reported()
    return ratio_estimate(nats / math.log(2), utf8_bytes).reported()


def _decode_result(times: DecodeTimes) -> DecodeResult:
    return DecodeResult(
        context=times.context,
        batch=times.batch,
        new_tokens=times.new_tokens,
        tokens_per_second=RepeatSpread.of(times.tokens_per_second),
        first_token_seconds=RepeatSpread.of(times.first_token_seconds),
        peak_bytes=times.peak_bytes,
    )


def _retrieval_result(found: RetrievalScores) -> RetrievalResult:
    return RetrievalResult(
        length=found.length,
        documents=len(set(found.documents)),
        gain_nats=clustered_mean(mean_gains(found), found.documents).reported(),
        gain_by_depth=np.mean(found.gain_nats, axis=0).tolist(),
        found_by_depth=np.mean(found.found_share, axis=0).tolist(),
    )


def _task_result(answers: TaskAnswers) -> TaskResult:
    values = float_array(answers.values)
    return TaskResult(
        task=answers.task,
        measure=answers.measure,
        higher_is_better=answers.higher_is_better,
        questions=len(values),
        mean=answers_mean(answers).reported(),
        # ddof=1: the mean comes from the same questions
        standard_error=float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None,
    )
