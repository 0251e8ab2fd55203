"""Run the models of a comparison: groups of models beside the source, each measurement made once and saved."""

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
from .measurements import ModelMeasurements, ModelPair, OwnMeasurements, measure_alone, pool_source_runs
from .measures.capacity import CacheSize, capacity
from .measures.kv_cache import DecodeTimes, cache_formula, measure_decoding
from .measures.retrieval import HiddenPassage
from .measures.tasks import TaskSettings
from .models import ComparedModel
from .protocol import EvalProtocol
from .results import ServingCapacity
from .scoring.paired import PairScores, SourceScores, score_with_source
from .scoring.perplexity import Scores
from .scoring.resume import SavedMeasurements
from .scoring.score_loop import ScoreLoop
from .scoring.source_cache import CachedSource, SourceCache
from .scoring.windows import TokenText

if TYPE_CHECKING:
    from accelerate import Accelerator

_WEIGHTS_SHARE = 0.6
"""Share of the free memory for the weights of models measured together. Activations and caches need the rest."""
_UNKNOWN_LIMIT = 4096
"""Context to compute capacity for where no config states a limit."""


@dataclass
class Runner:
    """Measures all models of one comparison, the source first.

    Attributes:
        saved: measurements of an earlier try, and those of this one.
        passages: passages to retrieve, the same for all models.
        tasks: settings of the tasks, and what :func:`.measures.tasks.find_tasks` found.
        cache: where the source's scores may be stored.
        attention: the attention implementation that the models ran with.
        source_from_cache: the source was not run.
    """

    protocol: EvalProtocol
    models: Sequence[ComparedModel]
    text: TokenText
    saved: SavedMeasurements
    accelerator: Accelerator | None
    passages: Sequence[HiddenPassage]
    tasks: tuple[TaskSettings, tuple[Any, list[str]]] | None
    cache: SourceCache | None
    attention: str = "unknown"
    source_from_cache: bool = False

    def run(self) -> tuple[ModelMeasurements, list[ModelPair]]:
        """Measure the source, and every other model beside it."""
        cached = self._find_cached()
        self.source_from_cache = cached is not None
        source = None if cached else self._load(self.models[0])
        runs, pairs = [], []
        # Free memory differs from try to try; saved scores belong to the groups of the first one.
        places = self.saved.once("groups", self._groups)
        for number, group in enumerate([self.models[place] for place in group] for group in places):
            loaded = [self._load(model) for model in group]
            run, found = self._measure(number, group, loaded, source, cached)
            runs.append(run)
            pairs += found
            del loaded  # the next group needs the memory
            self._free()
        return pool_source_runs(runs), pairs

    def _find_cached(self) -> CachedSource | None:
        # the source alone is always measured: the cache would leave nothing to do
        if self.cache is None or len(self.models) < 2:
            return None
        # read by the first process, since the folder may not exist on other hosts
        found: CachedSource | None = self.saved.broadcast(
            self.cache.find(self.text.documents) if self._first() else None
        )
        return found

    def _groups(self) -> list[list[int]]:
        """Group models that fit into memory beside the source, so that the source runs once per group."""
        free = _WEIGHTS_SHARE * self._free_bytes()
        groups: list[list[int]] = [[]]
        taken = self._loaded_bytes(self.models[0])
        for place, model in enumerate(self.models[1:], 1):
            # a group has at least one model: the estimate is rough, so none is refused for it
            if groups[-1] and taken + self._loaded_bytes(model) > free:
                groups.append([])
                taken = self._loaded_bytes(self.models[0])
            groups[-1].append(place)
            taken += self._loaded_bytes(model)
        return groups

    def _loaded_bytes(self, model: ComparedModel) -> int:
        return model.checkpoint.elements * self.protocol.dtype.itemsize

    def _free_bytes(self) -> int:
        if self.protocol.device.type == "cuda":
            return int(torch.cuda.mem_get_info(self.protocol.device)[0])
        return int(psutil.virtual_memory().available)

    def _free(self) -> None:
        # models hold reference cycles, so their memory is free only after a collection
        gc.collect()
        # the allocator would keep the freed blocks, and the next group would find too little memory
        if self.protocol.device.type != "cpu":
            torch.accelerator.memory.empty_cache()

    def _load(self, model: ComparedModel) -> Any:
        info(f"loading {model.name}")
        loaded = model.load(self.protocol.dtype, self.protocol.device)
        self.attention = str(getattr(loaded.config, "_attn_implementation", "unknown"))
        return loaded

    def _measure(
        self,
        number: int,
        group: Sequence[ComparedModel],
        loaded: Sequence[Any],
        loaded_source: Any | None,
        cached: CachedSource | None,
    ) -> tuple[ModelMeasurements, list[ModelPair]]:
        """Measure the source, and one group of models beside it."""
        known, scores = self._score(number, loaded, loaded_source, cached)
        source = self.models[0]
        both = [*([] if loaded_source is None else [(source, loaded_source)]), *zip(group, loaded, strict=True)]
        times = self._time(number, [model for _, model in both])
        alone = [self._measure_alone(model, weights) for model, weights in both]
        if cached is not None:
            # no cached timings: a speed is comparable only if the models took turns
            alone, times = [cached.alone, *alone], [[], *times]
        run = self._measurements(source, alone[0], known.scores, times[0])
        if cached is None and self.cache is not None and self._first():
            self.cache.store(known, alone[0])
        rows = zip(group, alone[1:], scores, times[1:], strict=True)
        return run, [
            ModelPair(run, self._measurements(model, one, pair.other, took), pair) for model, one, pair, took in rows
        ]

    def _name(self, kind: str, number: int) -> str:
        """Name a measurement of one group. Without the source it has fewer rows, so it gets another name."""
        return f"{'without-source-' if self.source_from_cache else ''}{kind}-{number}"

    def _first(self) -> bool:
        return self.accelerator is None or self.accelerator.is_main_process

    def _score(
        self, number: int, loaded: Sequence[Any], loaded_source: Any | None, cached: CachedSource | None
    ) -> tuple[SourceScores, list[PairScores]]:
        protocol = self.protocol
        loop = ScoreLoop(protocol.window, protocol.stride, protocol.batch_size, self.accelerator, self.saved)
        source = cached.scores if cached is not None else loaded_source
        assert source is not None
        return score_with_source(
            source, loaded, self.text.documents, loop, vocab=protocol.vocab, name=self._name("scores", number)
        )

    def _time(self, number: int, loaded: Sequence[Any]) -> list[list[DecodeTimes]]:
        def measure() -> list[list[dict[str, Any]]]:
            if self.protocol.decode.points():
                info("timing the models in turn")
            return [[asdict(row) for row in rows] for rows in measure_decoding(loaded, self.protocol.decode)]

        saved = self.saved.once(self._name("times", number), measure)
        return [[DecodeTimes(**row) for row in rows] for rows in saved]

    def _measure_alone(self, model: ComparedModel, loaded: Any) -> dict[str, Any]:
        """Measure what needs no other model, and save it as JSON values."""

        def measure() -> dict[str, Any]:
            return asdict(measure_alone(model, loaded, self.protocol, self.passages, self.tasks))

        found: dict[str, Any] = self.saved.once(f"alone-{self.models.index(model)}", measure)
        return found

    def _measurements(
        self, model: ComparedModel, alone: dict[str, Any], scores: Scores, decode: list[DecodeTimes]
    ) -> ModelMeasurements:
        # one token is enough to make every mean of the model undefined
        if not math.isfinite(scores.total().nll_nats):
            raise CheckpointError(
                f"{model.name} gives logits that are not finite numbers on this text.",
                "Try --dtype float32; if that does not help, its weights are broken.",
            )
        own = OwnMeasurements.from_json(alone)
        return ModelMeasurements(
            model=model,
            scores=scores,
            own=own,
            formula_bytes=cache_formula(model.config, self.protocol.dtype.itemsize),
            capacity=self._capacity(model, own.cache),
            decode=decode,
        )

    def _capacity(self, model: ComparedModel, cache: CacheSize) -> ServingCapacity | None:
        """Compute what fits. Weights count as they are stored, and the cache in the dtype of keys and values."""
        if self.protocol.memory is None or model.is_encoder_decoder:
            return None
        shrink = model.checkpoint.element_bytes / self.protocol.dtype.itemsize
        stored = CacheSize([size * shrink for size in cache.layer_bytes], cache.kv_heads, cache.windows)
        limit = self.protocol.limit or _UNKNOWN_LIMIT
        contexts = sorted({max(1, limit // 4), limit})
        return capacity(self.protocol.memory, model.checkpoint.weight_bytes, stored, contexts)
