"""Run the models of a comparison: groups of models beside the source, each measurement done once and written down."""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import psutil
import torch

from ..console import info
from ..errors import CheckpointError
from .measures.capacity import CacheSize, capacity
from .measures.kv_cache import DecodeTimes, cache_formula, measure_cache, measure_cross_cache, measure_decoding
from .measures.retrieval import Hidden, Retrieved, retrieve
from .measures.tasks import Answered, TaskSettings, answer_tasks
from .models import Subject
from .protocol import Protocol
from .results import Measured, pooled
from .scoring.paired import SourceScores, score_beside
from .scoring.perplexity import Scores
from .scoring.resume import Kept
from .scoring.score_loop import Reading
from .scoring.source_cache import CachedSource, SourceCache
from .scoring.windows import TokenText
from .vs_source import ModelPair

if TYPE_CHECKING:
    from accelerate import Accelerator

_ROOM = 0.6
"""Of the free memory that the weights of models measured together may take."""
_UNKNOWN_LIMIT = 4096


@dataclass
class Runner:
    """Measures all subjects of one comparison, the source first.

    Attributes:
        hidden: passages to retrieve; the same for all models.
        tasks: how tasks are asked, and what lm-eval knows of them.
        cache: where the source's scores may lie.
        attention: the attention implementation that the models ran with.
        source_from_cache: the source was not run.
    """

    protocol: Protocol
    subjects: Sequence[Subject]
    text: TokenText
    kept: Kept
    accelerator: Accelerator | None
    hidden: Sequence[Hidden]
    tasks: tuple[TaskSettings, tuple[Any, list[str]]] | None
    cache: SourceCache | None
    attention: str = "unknown"
    source_from_cache: bool = False

    def run(self) -> tuple[Measured, list[ModelPair]]:
        """The source's numbers, and each other model's beside it."""
        cached = self._find_cached()
        self.source_from_cache = cached is not None
        source_model = None if cached else self._load(self.subjects[0])
        runs, pairs = [], []
        places = self.kept.once("groups", self._groups)  # by the memory that was free at the first try
        for number, group in enumerate([self.subjects[place] for place in group] for group in places):
            models = [self._load(subject) for subject in group]
            run, found = self._measure(number, group, models, source_model, cached)
            runs.append(run)
            pairs += found
            del models
            self._free()
        return pooled(runs), pairs

    def _find_cached(self) -> CachedSource | None:
        if self.cache is None or len(self.subjects) < 2:
            return None
        found: CachedSource | None = self.kept.shared(self.cache.find(self.text.documents) if self._first() else None)
        return found

    def _groups(self) -> list[list[int]]:
        """Models that fit into memory beside the source, in order; the source then runs once for all of them."""
        free = _ROOM * self._free_bytes()
        groups: list[list[int]] = [[]]
        taken = self._bytes_of(self.subjects[0])
        for place, subject in enumerate(self.subjects[1:], 1):
            if groups[-1] and taken + self._bytes_of(subject) > free:
                groups.append([])
                taken = self._bytes_of(self.subjects[0])
            groups[-1].append(place)
            taken += self._bytes_of(subject)
        return groups

    def _bytes_of(self, subject: Subject) -> float:
        return subject.checkpoint.weight_bytes * self.protocol.dtype.itemsize / subject.checkpoint.element_bytes

    def _free_bytes(self) -> int:
        if self.protocol.device.type == "cuda":
            return int(torch.cuda.mem_get_info(self.protocol.device)[0])
        return int(psutil.virtual_memory().available)

    def _free(self) -> None:
        gc.collect()
        if self.protocol.device.type != "cpu":
            torch.accelerator.memory.empty_cache()

    def _load(self, subject: Subject) -> Any:
        info(f"loading {subject.name}")
        model = subject.load(self.protocol.dtype, self.protocol.device)
        self.attention = str(getattr(model.config, "_attn_implementation", "unknown"))
        return model

    def _measure(
        self,
        number: int,
        group: Sequence[Subject],
        models: Sequence[Any],
        source_model: Any | None,
        cached: CachedSource | None,
    ) -> tuple[Measured, list[ModelPair]]:
        """The source and one group of models beside it."""
        known, scores = self._score(number, models, source_model, cached)
        source = self.subjects[0]
        loaded = [*([] if source_model is None else [(source, source_model)]), *zip(group, models, strict=True)]
        times = self._time(number, [model for _, model in loaded])
        facts = [self._facts(subject, model) for subject, model in loaded]
        if cached is not None:
            facts, times = [cached.facts, *facts], [[], *times]
        run = self._measured(source, facts[0], known.scores, times[0])
        if cached is None and self.cache is not None and self._first():
            self.cache.store(known, facts[0])
        rows = zip(group, facts[1:], scores, times[1:], strict=True)
        return run, [
            ModelPair(run, self._measured(one, fact, pair.other, took), pair) for one, fact, pair, took in rows
        ]

    def _name(self, kind: str, number: int) -> str:
        """Of a measurement of one group; without the source it has fewer rows."""
        return f"{'without-source-' if self.source_from_cache else ''}{kind}-{number}"

    def _first(self) -> bool:
        return self.accelerator is None or self.accelerator.is_main_process

    def _score(
        self, number: int, models: Sequence[Any], source_model: Any | None, cached: CachedSource | None
    ) -> tuple[SourceScores, list[Any]]:
        protocol = self.protocol
        reading = Reading(protocol.window, protocol.stride, protocol.batch_size, self.accelerator, self.kept)
        source = cached.scores if cached is not None else source_model
        assert source is not None
        return score_beside(
            source, models, self.text.documents, reading, vocab=protocol.vocab, name=self._name("scores", number)
        )

    def _time(self, number: int, models: Sequence[Any]) -> list[list[DecodeTimes]]:
        def measure() -> list[list[dict[str, Any]]]:
            if self.protocol.decode.points():
                info("timing the models in turn")
            return [[asdict(row) for row in rows] for rows in measure_decoding(models, self.protocol.decode)]

        return [[DecodeTimes(**row) for row in rows] for rows in self.kept.once(self._name("times", number), measure)]

    def _facts(self, subject: Subject, model: Any) -> dict[str, Any]:
        """What is measured of one model by itself, as JSON values."""

        def measure() -> dict[str, Any]:
            settings = self.protocol
            found = retrieve(model, self.hidden, batch_size=settings.batch_size, vocab=settings.vocab)
            answered = []
            if self.tasks is not None:
                info(f"{subject.name} answers {', '.join(self.tasks[1][1])}")
                answered = answer_tasks(model, subject.tokenizer(), *self.tasks)
            cross = measure_cross_cache(model)
            return {
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
                "cache": asdict(measure_cache(model)),
                "cross_cache": None if cross is None else asdict(cross),
                "retrieved": [asdict(one) for one in found],
                "answered": [asdict(one) for one in answered],
            }

        facts: dict[str, Any] = self.kept.once(f"facts-{self.subjects.index(subject)}", measure)
        return facts

    def _measured(self, subject: Subject, facts: dict[str, Any], scores: Scores, decode: list[DecodeTimes]) -> Measured:
        if not math.isfinite(scores.total().nll_nats):
            raise CheckpointError(
                f"{subject.name} gives logits that are not finite numbers on this text.",
                "Try --dtype float32; if that does not help, its weights are broken.",
            )
        cache, cross = CacheSize(**facts["cache"]), facts.get("cross_cache")
        return Measured(
            subject=subject,
            parameters=facts["parameters"],
            scores=scores,
            cache=cache,
            cross_cache=None if cross is None else CacheSize(**cross),
            formula_bytes=cache_formula(subject.config, self.protocol.dtype.itemsize),
            capacity=self._capacity(subject, cache),
            decode=decode,
            retrieved=[Retrieved(**one) for one in facts["retrieved"]],
            answered=[Answered(**one) for one in facts["answered"]],
        )

    def _capacity(self, subject: Subject, cache: CacheSize) -> dict[str, Any] | None:
        """What fits when weights and cache are of the dtype that the checkpoint is stored in."""
        if self.protocol.memory is None or subject.writes:
            return None
        shrink = subject.checkpoint.element_bytes / self.protocol.dtype.itemsize
        stored = CacheSize([size * shrink for size in cache.layer_bytes], cache.kv_heads, cache.windows)
        limit = self.protocol.limit or _UNKNOWN_LIMIT
        contexts = sorted({max(1, limit // 4), limit})
        return capacity(self.protocol.memory, subject.checkpoint.weight_bytes, stored, contexts)
