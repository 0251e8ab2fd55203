"""Score held-out text during a run, and compute how much of the conversion's loss is recovered."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from ...checkpoint.backbone import is_encoder_decoder
from ...checkpoint.load import load_language_model
from ...console import info
from ...corpus import HELDOUT, open_corpus
from ...eval.measures.recovery import recovered_share
from ...eval.scoring.perplexity import Perplexity, exponential, score
from ...eval.scoring.targets import TargetSettings, target_text
from ...eval.scoring.windows import ScoredDocument, tokenize_documents
from ..processes.devices import StopRequested, anyone
from ..settings import UptrainSettings
from .metrics import Metrics

_PORTION_WINDOWS = 32


@dataclass(frozen=True)
class HeldoutText:
    """The held-out text."""

    documents: Sequence[ScoredDocument]
    description: dict[str, str]
    window: int

    def perplexity(self, model: Any, accelerator: Accelerator, asked: Callable[[], bool] = lambda: False) -> float:
        """Collective: the processes share the windows.

        Args:
            asked: says whether this process was asked to stop; looked at between portions of the text.

        Raises:
            StopRequested: a process was.
        """
        parts: list[Perplexity] = []
        for portion in self._portions():
            if parts and anyone(accelerator, asked()):
                raise StopRequested
            parts.append(score(model, portion, window=self.window, accelerator=accelerator).total())
        nats = math.fsum(part.nll_nats for part in parts)
        return exponential(nats / sum(part.tokens for part in parts))

    def _portions(self) -> Iterator[list[ScoredDocument]]:
        """Documents that fill some windows, together."""
        portion: list[ScoredDocument] = []
        for document in self.documents:
            portion.append(document)
            if sum(len(one.ids) for one in portion) >= _PORTION_WINDOWS * self.window:
                yield portion
                portion = []
        if portion:
            yield portion

    @property
    def identity(self) -> str:
        """The same for the same tokens, seen through the same window."""
        tokens = sum(len(document.ids) for document in self.documents)
        content = json.dumps([self.description, len(self.documents), tokens, self.window], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]


def open_heldout(settings: UptrainSettings, tokenizer: Any, model: Any) -> HeldoutText | None:
    """The text that the settings name; for an encoder-decoder as targets of the kind that it is trained on."""
    if settings.eval_data is None:
        return None
    corpus = open_corpus(settings.eval_data, HELDOUT, settings.columns)
    if is_encoder_decoder(model):
        column = settings.target_column is not None
        wanted = TargetSettings(settings.sequence_length, column, settings.noise_density, settings.mean_span)
        targets = target_text(tokenizer, corpus, wanted, max_tokens=settings.eval_tokens)
        return HeldoutText(
            targets.documents, {**corpus.describe(), "asking": str(wanted.describe())}, settings.sequence_length
        )
    documents = tokenize_documents(tokenizer, corpus, max_tokens=settings.eval_tokens)
    return HeldoutText(documents, corpus.describe(), settings.sequence_length)


class Follower:
    """Scores held-out text as a run goes on, and computes how much of the conversion's loss is recovered.

    Args:
        watch: the text; None follows nothing.
        source: the model to recover, or its checkpoint; None where it is not at hand.
        start: where the checkpoint is that the run began with; None where it has no weights.
        tokens_per_step: of the run.

    Attributes:
        asked: says whether this process was asked to stop; then scoring raises ``StopRequested``.
    """

    def __init__(
        self,
        watch: HeldoutText | None,
        accelerator: Accelerator,
        metrics: Metrics,
        *,
        source: Any,
        start: Path | None,
        tokens_per_step: int,
        trust_remote_code: bool,
    ) -> None:
        self._watch, self._accelerator, self._metrics = watch, accelerator, metrics
        self._source, self._start, self._tokens_per_step = source, start, tokens_per_step
        self._trust = trust_remote_code
        self.asked: Callable[[], bool] = lambda: False

    def begin(self, model: Any, step: int, due: bool) -> None:
        """Score the source and the start, unless a run that goes on did so with the same text.

        Args:
            due: the model is to be scored at this step; a run that was stopped then has not done so.
        """
        watch, writes = self._watch, self._metrics.writes
        if watch is None:
            return
        done = [one for one in self._metrics.lines if one["kind"] == "eval" and one.get("text") == watch.identity]
        if step and not anyone(self._accelerator, writes and not done):
            if due and anyone(self._accelerator, writes and done[-1]["step"] != step):
                self.evaluate(model, step)
            return
        if step:
            info("The held-out text, or how it is read, has changed: source and start are scored anew.")
        if self._source is not None:
            self._add("source", step, self._perplexity_of(self._source))
            if step and self._start is not None:
                self._add("start", step, self._perplexity_of(self._start))
        self.evaluate(model, step)

    def evaluate(self, model: Any, step: int) -> None:
        """Score the model as it is; every process must call this, since they share the windows."""
        if self._watch is not None:
            self._add("eval", step, self._watch.perplexity(model, self._accelerator, self.asked))

    @property
    def recovered(self) -> float | None:
        """See :func:`recovered_so_far`."""
        return None if self._watch is None else recovered_so_far(self._metrics.lines, self._watch.identity)

    @property
    def heldout(self) -> dict[str, Any] | None:
        """What a record says: the text, and the last perplexity on it."""
        held = [line["perplexity"] for line in self._metrics.lines if line["kind"] == "eval"]
        return {**self._watch.description, "perplexity": held[-1]} if self._watch and held else None

    def _perplexity_of(self, place: Any) -> float:
        """That of a model, or of a checkpoint that is loaded for this alone."""
        assert self._watch is not None
        model = place
        if isinstance(place, str | Path):
            model = load_language_model(place, dtype=torch.float32, trust_remote_code=self._trust)
            model = model.to(self._accelerator.device)
        return self._watch.perplexity(model, self._accelerator, self.asked)

    def _add(self, kind: str, step: int, perplexity: float) -> None:
        assert self._watch is not None
        tokens = step * self._tokens_per_step
        self._metrics.add(kind, step=step, tokens=tokens, perplexity=perplexity, text=self._watch.identity)
        info(f"{f'step {step}' if kind == 'eval' else kind} · held-out perplexity {perplexity:.3f}")


def recovered_so_far(lines: Sequence[dict[str, Any]], text: str) -> float | None:
    """Share of the gap in log-perplexity between the start and the source that is closed at the last evaluation.

    Args:
        lines: of the metrics.
        text: :attr:`HeldoutText.identity`; only what was measured on this text counts.

    Returns:
        1 where the source is reached; None where it was not measured or was not better at the start, and before the
        first evaluation after the start.
    """
    seen: dict[str, list[float]] = {kind: [] for kind in ("source", "start", "eval")}
    for line in lines:
        if line["kind"] in seen and line.get("text") == text:
            seen[line["kind"]].append(line["perplexity"])
    source, evaluated = seen["source"], seen["eval"]
    start = (seen["start"] or evaluated)[:1]
    only_the_start = len(evaluated) == 1 and not seen["start"]  # 0 would read as if training had recovered nothing
    if not source or not evaluated or only_the_start:
        return None
    share = recovered_share(*(np.log([perplexity]) for perplexity in (source[0], start[0], evaluated[-1])))
    return None if share is None else share.value
