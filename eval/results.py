"""Define the content of results.json: every number of a comparison, with its interval and its protocol.

A number that was not measured is null, and a list of such numbers is empty.

To add a column to the report, add its field here, fill it where it is measured (``measurements.py`` for one model,
``vs_source.py`` for a model beside its source), and add its row in ``report/table.py``.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import DataError, UsageError

# The kind tells results from other JSON files, and the schema tells versions of headfold apart.
SCHEMA, KIND = 3, "headfold.eval"
_READABLE = (2, SCHEMA)
"""Schema 2 lacks effective numbers and intervals of speed ratios, which are optional here."""
RESULTS_NAME = "results.json"
SOURCE: Final = "source"
CONVERTED: Final = "converted"
UPTRAINED: Final = "uptrained"
OTHER: Final = "other"
Role = Literal["source", "converted", "uptrained", "other"]
_ANOTHER_FOLDER = "Name a folder that headfold eval wrote."


class ResultRecord(BaseModel):
    """A part of results.json. Infinite and undefined numbers are refused, since JSON has none."""

    # populate_by_name, since an alias such as "from" is a keyword of Python
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, populate_by_name=True)


class ReportedEstimate(ResultRecord):
    """A value and its 95 % interval. Low and high are null where documents are too few for an interval."""

    value: float | None
    low: float | None
    high: float | None


class RecoveredShare(ReportedEstimate):
    """Share of the log-perplexity lost by the model named ``converted`` that uptraining recovered.

    Attributes:
        missing: reason why there is no share (null where there is one).
    """

    converted: str
    missing: str | None = None


class RepeatSpread(ResultRecord):
    """Median, smallest and largest of several timings."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> RepeatSpread:
        """Summarise the timings of all repeats."""
        # the median, since one slow moment of the machine must not move the number
        return cls(median=statistics.median(values), min=min(values), max=max(values))


class SpeedGain(RepeatSpread):
    """Ratios of paired timings, and the 95 % interval of their typical value.

    Attributes:
        low, high: null where there was a single repeat.
    """

    low: float | None = None
    high: float | None = None


class CapacityBatch(ResultRecord):
    """The largest batch of sequences of one length that fits into memory."""

    context: int
    batch: int


class ServingCapacity(ResultRecord):
    """Sequences that fit into a device's memory beside the weights.

    Attributes:
        batches: one entry per context. A batch of 0 means that not even the weights fit.
        tokens: longest single sequence that fits (null where the cache stops growing before the memory is full).
    """

    memory_bytes: int
    batches: list[CapacityBatch]
    tokens: int | None


class DecodeResult(ResultRecord):
    """Decoding speed and memory of one model at one context and batch."""

    context: int
    batch: int
    new_tokens: int
    tokens_per_second: RepeatSpread
    first_token_seconds: RepeatSpread
    peak_bytes: int


class RetrievalResult(ResultRecord):
    """Nats per token that a hidden passage saves, for one length of text. Lists go by depth.

    Attributes:
        documents: documents that the passages come from.
    """

    length: int
    documents: int | None = None
    gain_nats: ReportedEstimate
    gain_by_depth: list[float]
    found_by_depth: list[float]


class TaskResult(ResultRecord):
    """One measure of one lm-eval task."""

    task: str
    measure: str
    higher_is_better: bool
    questions: int
    mean: ReportedEstimate
    standard_error: float | None


class RecoveryPoint(ResultRecord):
    """Held-out perplexity that the trainer measured after this many uptraining tokens."""

    tokens: float
    perplexity: float


class SpeedRatio(ResultRecord):
    """Speed divided by the source's speed at one context and batch. Above 1 is faster."""

    context: int
    batch: int
    decode: SpeedGain
    first_token: SpeedGain


class KlHistogram(ResultRecord):
    """Share of tokens in each bin of KL between two ``edges``, in nats."""

    edges: list[float]
    shares: list[float]


class ContextBin(ResultRecord):
    """Mean nats of both models over the tokens that could see this many tokens before them."""

    context_from: int = Field(alias="from")
    context_to: int = Field(alias="to")
    tokens: int
    source_nats: float
    nats: float


class DocumentChange(ResultRecord):
    """Perplexity of both models on one document (null where it is beyond any float)."""

    name: str
    tokens: int
    source_perplexity: float | None
    perplexity: float | None
    ratio: float | None


class TokenChange(ResultRecord):
    """A token that became less likely, and the text before it."""

    document: str
    place: int
    before: str
    token: str
    source_probability: float
    probability: float
    lost_nats: float


class RetrievalChange(ResultRecord):
    """Change in retrieval against the source, paired by passage."""

    length: int
    gain_difference_nats: ReportedEstimate


class TaskChange(ResultRecord):
    """Change of a task's measure against the source, paired by question."""

    task: str
    measure: str
    difference: ReportedEstimate


class AgainstSource(ResultRecord):
    """A model compared with its source.

    Attributes:
        perplexity_ratio, kl_nats, same_top_token: paired by document. KL is null where the source's scores came from
            a cache, which does not hold its logits.
        kl_percentiles, kl_histogram: of single tokens.
        cross_cache_ratio: null for models without an encoder.
        recovered: null unless the model was uptrained and a converted one stands before it.
    """

    perplexity_ratio: ReportedEstimate
    kl_nats: ReportedEstimate | None
    kl_percentiles: dict[str, float | None] | None
    kl_histogram: KlHistogram | None
    same_top_token: ReportedEstimate
    cache_ratio: float
    cross_cache_ratio: float | None = None
    speedup: list[SpeedRatio]
    by_context: list[ContextBin]
    worst_documents: list[DocumentChange]
    worst_tokens: list[TokenChange]
    needle: list[RetrievalChange]
    tasks: list[TaskChange]
    recovered: RecoveredShare | None


class ModelResult(ResultRecord):
    """All numbers of one model.

    Attributes:
        path: the folder or hub id as the user gave it.
        nll_nats: summed negative log-likelihood of each document.
        cache_bytes_per_token: measured on the cache (for an encoder-decoder, per token that its decoder writes).
        cross_cache_bytes_per_token: for an encoder-decoder, per token that its encoder reads.
        cache_formula_bytes: the same as computed from config.json, null where it does not say.
        recovery: held-out perplexity during uptraining.
        against_source: null for the source itself, where the file lacks the key.
    """

    name: str
    role: Role
    path: str
    digest: str
    model_type: str
    parameters: int
    weight_bytes: int
    query_heads: int | None
    kv_heads: list[int]
    perplexity: ReportedEstimate
    bits_per_byte: ReportedEstimate
    nll_nats: list[float]
    cache_bytes_per_token: float
    cross_cache_bytes_per_token: float | None = None
    cache_formula_bytes: float | None
    capacity: ServingCapacity | None
    decode: list[DecodeResult]
    needle: list[RetrievalResult]
    tasks: list[TaskResult]
    recovery: list[RecoveryPoint]
    against_source: AgainstSource | None = None


class IntervalProtocol(ResultRecord):
    """Method of the intervals.

    Attributes:
        fewest_documents, fewest_effective: below these there is no interval.
    """

    method: str
    level: float
    resamples: int
    seed: int
    fewest_documents: int = 2
    fewest_effective: float = 1.0


@dataclass(frozen=True)
class DecodeSettings:
    """Settings of the timing, which covers every pair of a context and a batch.

    Attributes:
        contexts: prompt tokens (for an encoder-decoder, tokens that its encoder reads).
        batches: sequences decoded side by side.
        new_tokens: tokens decoded after the first.
        repeats: runs per model. Models take turns, so that a slow moment of the machine hits all of them, and who goes
            first alternates. 0 measures nothing.
    """

    contexts: tuple[int, ...] = (64, 256)
    batches: tuple[int, ...] = (1, 8)
    new_tokens: int = 32
    repeats: int = 6

    def points(self) -> list[tuple[int, int]]:
        """List the pairs of context and batch, the most demanding one last."""
        grid = [(context, batch) for context in sorted(self.contexts) for batch in sorted(self.batches)]
        return grid if self.repeats else []


@dataclass(frozen=True)
class NeedleSettings:
    """Settings of the hidden passages.

    Attributes:
        passages: needles for each length, each hidden at every depth.
        lengths: tokens of the whole sequence.
        depths: 0 is the beginning of the text, 1 right before the repetition.
    """

    passages: int = 8
    lengths: tuple[int, ...] = (128, 512)
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)


class TargetProtocol(ResultRecord):
    """Targets that encoder-decoders were scored on: spans cut out of the text, or a column beside it."""

    kind: Literal["column", "spans"]
    longest: int
    noise_density: float | None = None
    mean_span: float | None = None
    seed: int | None = None
    source_column: str | None = None
    target_column: str | None = None


class MeasurementProtocol(ResultRecord):
    """Everything that must be the same to measure the same numbers again.

    Attributes:
        tokens: scored tokens.
        skipped: documents left out because they are empty or too short.
        truncated: the last document was cut.
        effective_documents: documents of equal length that would tell as much, ``(Σ tokens)² / Σ tokens²``.
        vocab: ids that all distributions are over.
        uniform_perplexity: perplexity of a model that guesses.
        targets: null for models without an encoder.
        source_from_cache: the source was not run.
    """

    corpus: str
    revision: str
    window: int
    stride: int
    batch_size: int
    dtype: str
    device: str
    processes: int
    attention: str
    vocab: int
    decode: DecodeSettings
    needle: NeedleSettings
    targets: TargetProtocol | None = None
    source_from_cache: bool
    text_sha256: str
    ids_sha256: str
    documents: int
    effective_documents: float | None = None
    skipped: int
    truncated: bool
    tokens: int
    utf8_bytes: int
    bos: bool
    uniform_perplexity: float
    interval: IntervalProtocol


class DocumentSize(ResultRecord):
    """A document that was scored."""

    name: str
    tokens: int
    utf8_bytes: int


@dataclass(frozen=True)
class SweepRow:
    """One conversion of a sweep, measured without uptraining.

    Attributes:
        method: the merging method, or ``source``.
        perplexity, low, high: with its 95 % interval over documents (low and high are None for too few documents).
        seconds: duration of the conversion without calibration.
        nll_nats: summed negative log-likelihood of each document (None in files of earlier versions).
    """

    method: str
    groups: int
    cache_bytes_per_token: float
    perplexity: float
    low: float | None
    high: float | None
    seconds: float
    nll_nats: list[float] | None = None

    @property
    def key(self) -> tuple[str, int]:
        """Tell this conversion from the others of its sweep."""
        return self.method, self.groups


class SweepResults(ResultRecord):
    """The typed content of sweep.json.

    Attributes:
        details: how the rows were measured.
        document_tokens: scored tokens of each document (None in files of earlier versions).
    """

    details: dict[str, Any]
    rows: list[SweepRow]
    document_tokens: list[int] | None = None


class Comparison(ResultRecord):
    """The results of ``headfold eval``, the source first among ``models``.

    Attributes:
        schema_version: ``schema`` in the file.
        settings: the user's settings, see :class:`headfold.eval.settings.EvalSettings`.
        sweep: curve of a sweep that ``headfold report`` merged in. The file lacks the key without one.
    """

    schema_version: int = Field(alias="schema")
    kind: str
    created: str
    command: str
    settings: dict[str, Any]
    versions: dict[str, str]
    protocol: MeasurementProtocol
    documents: list[DocumentSize]
    models: list[ModelResult]
    sweep: SweepResults | None = None

    @property
    def source(self) -> ModelResult:
        """The model that the others are compared with."""
        return self.models[0]

    @property
    def last(self) -> ModelResult:
        """The model named last, which the verdict is about."""
        return self.models[-1]

    @property
    def others(self) -> list[ModelResult]:
        """All models but the source."""
        return self.models[1:]

    @property
    def of_encoder_decoders(self) -> bool:
        """The models are encoder-decoders, and the scored tokens are targets that they write."""
        return self.protocol.targets is not None

    def to_json(self) -> str:
        """Write the text of results.json, without keys that do not apply."""
        # keys that were never set stay away, so that a file is written again as it was read
        content = self.model_dump(mode="json", by_alias=True, exclude_unset=True)
        return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)


def read_results(path: Path) -> Comparison:
    """Read the results of a comparison.

    Args:
        path: results.json, or the folder that holds it.

    Raises:
        UsageError: there are no results.
        DataError: the file holds something else, or results of another version of headfold.
    """
    file = path / RESULTS_NAME if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as problem:
        raise UsageError(f"There are no results at {file}: {problem.strerror}.", _ANOTHER_FOLDER) from problem
    except ValueError as problem:
        raise DataError(f"{file} is not valid JSON: {problem}.", "Run headfold eval again.") from problem
    # kind and schema come first: a file of another version has other keys, and its version is the reason to state
    if not isinstance(content, dict) or content.get("kind") != KIND:
        raise DataError(f"{file} does not hold the results of headfold eval.", _ANOTHER_FOLDER)
    if content.get("schema") not in _READABLE:
        raise DataError(
            f"{file} has schema {content.get('schema')}, this headfold reads {' and '.join(map(str, _READABLE))}.",
            "Use the headfold that wrote it.",
        )
    try:
        return Comparison.model_validate(content)
    except ValidationError as problem:
        fault = problem.errors()[0]
        place = ".".join(map(str, fault["loc"]))
        raise DataError(
            f"{file} does not hold the results of headfold eval: {place}: {fault['msg']}.", _ANOTHER_FOLDER
        ) from problem
