"""Score models beside their source, token by token, on the same windows in the same batches.

Letters of shapes: N scored tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .batches import AnyBatch, split_by_document
from .logits import SlicedLogits
from .perplexity import Scores, evaluation_mode
from .score_loop import ScoreLoop
from .windows import ScoredDocument

ByDocument = Sequence[np.ndarray[Any, Any]]


@dataclass(frozen=True)
class SourceScores:
    """Scores of the source, and the token it ranks first at each position (one array per document)."""

    scores: Scores
    top_N: ByDocument


@dataclass(frozen=True)
class PairScores:
    """Scores of two models on the same tokens. Lists hold one array per document.

    Attributes:
        same_top_N: True where both rank the same token first.
        kl_N: KL(source ‖ other) of the next-token distributions in nats (None where the source was not run).
    """

    source: Scores
    other: Scores
    same_top_N: ByDocument
    kl_N: ByDocument | None


def score_with_source(
    source: nn.Module | SourceScores,
    others: Sequence[nn.Module],
    documents: Sequence[ScoredDocument],
    loop: ScoreLoop,
    *,
    vocab: int | None = None,
    name: str = "pairs",
) -> tuple[SourceScores, list[PairScores]]:
    """Score models batch by batch, with one slice of the source's logits and of one other model's in memory at a time.

    Args:
        source: the model, run once for all the others, or its scores of an earlier run.
        others: without any, the source is scored alone.
        vocab: required where the vocabularies are padded to different sizes. All distributions are then over the first
            ``vocab`` ids.
        name: of this measurement, for ``loop.saved``.

    Raises:
        UsageError, DataError: as :func:`headfold.eval.scoring.perplexity.score`.
    """
    known = source if isinstance(source, SourceScores) else None
    models = [*([] if isinstance(source, SourceScores) else [source]), *others]
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(evaluation_mode(model))
        sliced = [SlicedLogits(model) for model in models]
        values = loop.values(
            name, 3 * len(models), documents, lambda batch: _compare_batch(sliced, batch, vocab, known is None)
        )
    rows = [split_by_document(values_N, documents) for values_N in values.numpy()]
    found = [(Scores(documents, rows[place]), rows[place + 1], rows[place + 2]) for place in range(0, len(rows), 3)]
    if known is None:
        known = SourceScores(found[0][0], found[0][1])
        return known, [_pair(known, scores, top, kl) for scores, top, kl in found[1:]]
    return known, [_pair(known, scores, top, None) for scores, top, _ in found]


def _pair(source: SourceScores, scores: Scores, top_N: ByDocument, kl_N: ByDocument | None) -> PairScores:
    same = [before == after for before, after in zip(source.top_N, top_N, strict=True)]
    return PairScores(source.scores, scores, same, kl_N)


def _compare_batch(models: Sequence[SlicedLogits], batch: AnyBatch, vocab: int | None, first_is_source: bool) -> Tensor:
    """Compute three rows for each model: nats, token ranked first, KL to the source (0 for the source itself)."""
    size = models[0].slice_size(vocab)
    slices = zip(*(model.slices(batch, vocab, size) for model in models), strict=True)
    return torch.cat([_compare(found, first_is_source) for found in slices], dim=1).cpu()


def _compare(slices: Sequence[tuple[Tensor, Tensor]], first_is_source: bool) -> Tensor:
    rows: list[Tensor] = []
    source_NV: Tensor | None = None
    for logits_NV, targets_N in slices:
        log_NV = logits_NV.log_softmax(-1)
        nats_N = -log_NV.gather(1, targets_N[:, None])[:, 0]
        kl_N = torch.zeros_like(nats_N) if source_NV is None else _kl(source_NV, log_NV)
        # ids are exact in float32 below 2**24, more than any vocabulary has
        rows += [row.to(slices[0][1].device) for row in (nats_N, logits_NV.argmax(-1).float(), kl_N)]
        if first_is_source and source_NV is None:
            source_NV = log_NV
    return torch.stack(rows)


def _kl(log_source_NV: Tensor, log_other_NV: Tensor) -> Tensor:
    log_other_NV = log_other_NV.to(log_source_NV.device)
    # A ruled-out token (log-probability -inf in both) adds nothing; without the mask it would add NaN.
    terms_NV = (log_source_NV - log_other_NV).mul_(log_source_NV.exp())
    return terms_NV.masked_fill_(log_source_NV.isneginf(), 0).sum(-1).clamp(min=0)  # below zero only by rounding
