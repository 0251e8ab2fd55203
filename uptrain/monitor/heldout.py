"""Score held-out text during a run, and compute how much of the loss by conversion is recovered."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from ...checkpoint.load import load_language_model
from ...console import info
from ...corpus import HELDOUT, open_corpus
from ...eval.measures.intervals import ENOUGH, Array, float_array
from ...eval.measures.recovery import least_loss
from ...eval.scoring.perplexity import Perplexity, exponential, score
from ...eval.scoring.targets import TargetSettings, target_text
from ...eval.scoring.windows import ScoredDocument, tokenize_text
from ..processes.devices import StopRequested, on_any_process
from ..settings import UptrainSettings
from .metrics import Metrics

_PORTION_WINDOWS = 32
"""The processes ask each other after this many windows whether one of them should stop."""
_LEAST_LOSS = "least_loss"
"""Key of the line of the start: the lower end of the interval of its loss against the source, in nats per token."""


@dataclass(frozen=True)
class HeldoutScores:
    """Summed nats and scored tokens of each held-out document."""

    nats: Array
    tokens: Array

    @property
    def perplexity(self) -> float:
        """Compute exp of the mean nats over all tokens."""
        # exact, so that the portions have no effect on the number
        return exponential(math.fsum(self.nats) / self.tokens.sum())


@dataclass(frozen=True)
class HeldoutText:
    """Held-out text, and how it is read."""

    documents: Sequence[ScoredDocument]
    description: dict[str, str]
    window: int

    def scores(
        self, model: Any, accelerator: Accelerator, stop_requested: Callable[[], bool] = lambda: False
    ) -> HeldoutScores:
        """Score the text. Every process must call this, since they share the windows.

        Args:
            stop_requested: whether this process should stop; called between portions of the text.

        Raises:
            StopRequested: a process should stop.
        """
        parts: list[Perplexity] = []
        for portion in self._portions():
            if parts and on_any_process(accelerator, stop_requested()):
                raise StopRequested
            parts += score(model, portion, window=self.window, accelerator=accelerator).per_document()
        return HeldoutScores(float_array(part.nll_nats for part in parts), float_array(part.tokens for part in parts))

    def _portions(self) -> Iterator[list[ScoredDocument]]:
        """Group documents so that each group fills some windows."""
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
        """A hash that is the same for the same text and window."""
        tokens = sum(len(document.ids) for document in self.documents)
        # numbers of documents and tokens stand in for the hash that a streamed text does not have
        content = json.dumps([self.description, len(self.documents), tokens, self.window], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]


def open_heldout(settings: UptrainSettings, tokenizer: Any, encoder_decoder: bool) -> HeldoutText | None:
    """Open the text that the settings name. For an encoder-decoder it becomes targets as in training."""
    if settings.eval_data is None:
        return None
    corpus = open_corpus(settings.eval_data, HELDOUT, settings.columns)
    if encoder_decoder:
        column = settings.target_column is not None
        wanted = TargetSettings(settings.sequence_length, column, settings.noise_density, settings.mean_span)
        targets = target_text(tokenizer, corpus, wanted, max_tokens=settings.eval_tokens)
        return HeldoutText(
            targets.documents, {**corpus.describe(), "asking": str(wanted.describe())}, settings.sequence_length
        )
    documents = tokenize_text(tokenizer, corpus, max_tokens=settings.eval_tokens).documents
    return HeldoutText(documents, corpus.describe(), settings.sequence_length)


class HeldoutMonitor:
    """Scores held-out text during a run, and computes how much of the loss by conversion is recovered.

    Args:
        text: None scores nothing.
        source: the model whose quality is to be recovered, or the place of its checkpoint; None if not at hand.
        start: folder of the checkpoint that the run began with; None if it has no weights.
        tokens_per_step: of the run.

    Attributes:
        stop_requested: whether this process should stop; then scoring raises ``StopRequested``.
    """

    def __init__(
        self,
        text: HeldoutText | None,
        accelerator: Accelerator,
        metrics: Metrics,
        *,
        source: Any,
        start: Path | None,
        tokens_per_step: int,
        trust_remote_code: bool,
    ) -> None:
        self._text, self._accelerator, self._metrics = text, accelerator, metrics
        self._source, self._start, self._tokens_per_step = source, start, tokens_per_step
        self._trust = trust_remote_code
        # replaced when training begins and signals are caught
        self.stop_requested: Callable[[], bool] = lambda: False

    def begin(self, model: Any, step: int, due: bool) -> None:
        """Score the source and the start, unless the run continues and has done so with the same text.

        Args:
            due: the model is due for scoring at this step. A run that was stopped at this step has not done it.
        """
        text, writes = self._text, self._metrics.writes
        if text is None:
            return
        done = [one for one in self._metrics.lines if one["kind"] == "eval" and one.get("text") == text.identity]
        # only the process that writes has the earlier lines, so the others have to ask it
        if step and not on_any_process(self._accelerator, writes and not done):
            if due and on_any_process(self._accelerator, writes and done[-1]["step"] != step):
                self.evaluate(model, step)
            return
        if step:
            info("The held-out text, or how it is read, has changed: source and start are scored anew.")
        if self._source is None:
            self.evaluate(model, step)
            return
        source = self._scores_of(self._source)
        self._add("source", step, source)
        # at step 0 the model itself is the start
        if step and self._start is not None:
            self._add("start", step, self._scores_of(self._start), source)
            self.evaluate(model, step)
        else:
            self._add("eval", step, text.scores(model, self._accelerator, self.stop_requested), source)

    def evaluate(self, model: Any, step: int) -> None:
        """Score the model as it is. Every process must call this, since they share the windows."""
        if self._text is not None:
            self._add("eval", step, self._text.scores(model, self._accelerator, self.stop_requested))

    @property
    def recovered(self) -> float | None:
        """Share of the loss by conversion that is recovered so far, see :func:`recovered_so_far`."""
        return None if self._text is None else recovered_so_far(self._metrics.lines, self._text.identity)

    @property
    def for_record(self) -> dict[str, Any] | None:
        """Entry for the record: the text, and the last perplexity on it."""
        held = [line["perplexity"] for line in self._metrics.lines if line["kind"] == "eval"]
        return {**self._text.description, "perplexity": held[-1]} if self._text and held else None

    def _scores_of(self, place: Any) -> HeldoutScores:
        """Score a model, or a checkpoint that is loaded for this alone."""
        assert self._text is not None
        model = place
        if isinstance(place, str | Path):
            # float32, as the weights of the student are
            model = load_language_model(place, dtype=torch.float32, trust_remote_code=self._trust)
            model = model.to(self._accelerator.device)
        return self._text.scores(model, self._accelerator, self.stop_requested)

    def _add(self, kind: str, step: int, scores: HeldoutScores, source: HeldoutScores | None = None) -> None:
        """Add a line of metrics.

        Args:
            source: scores to compute the least loss of this model against, which a recovered share is allowed by.
        """
        assert self._text is not None
        tokens, perplexity = step * self._tokens_per_step, scores.perplexity
        least = {} if source is None else {_LEAST_LOSS: least_loss(source.nats, scores.nats, scores.tokens)}
        self._metrics.add(kind, step=step, tokens=tokens, perplexity=perplexity, text=self._text.identity, **least)
        info(f"{f'step {step}' if kind == 'eval' else kind} · held-out perplexity {perplexity:.3f}")
        if source is not None and not _is_loss(least[_LEAST_LOSS]):
            info(
                "This text does not show for certain that the start is worse than the source, so no recovered share is "
                f"given ({'its interval reaches zero' if least[_LEAST_LOSS] is not None else ENOUGH})."
            )


def recovered_so_far(lines: Sequence[dict[str, Any]], text: str) -> float | None:
    """Compute the share of the gap in log-perplexity between start and source that the last evaluation has closed.

    Args:
        lines: of the metrics.
        text: :attr:`HeldoutText.identity`; only measurements on this text count.

    Returns:
        1 if the source is reached; None if it was not measured or was not certainly better at the start, and before the
        first evaluation after the start.
    """
    seen: dict[str, list[dict[str, Any]]] = {kind: [] for kind in ("source", "start", "eval")}
    for line in lines:
        if line["kind"] in seen and line.get("text") == text:
            seen[line["kind"]].append(line)
    source, evaluated = seen["source"], seen["eval"]
    start = (seen["start"] or evaluated)[:1]
    only_the_start = len(evaluated) == 1 and not seen["start"]  # 0 would read as if training had recovered nothing
    if not source or not evaluated or only_the_start or not _is_loss(start[0].get(_LEAST_LOSS)):
        return None
    before, lost, now = (math.log(line["perplexity"]) for line in (source[0], start[0], evaluated[-1]))
    share = (lost - now) / (lost - before)
    return share if math.isfinite(share) else None


def _is_loss(least: float | None) -> bool:
    return least is not None and least > 0
