"""A model against its source, token by token, on the same windows in the same batches.

Letters of shapes: N scored tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .batches import Batch, shared_batches, split_by_document
from .logits import Features
from .perplexity import DEFAULT_BATCH, DEFAULT_WINDOW, Scores, evaluating, nll_nats
from .windows import TokenDocument


@dataclass(frozen=True)
class PairScores:
    """What the two models say about each scored token; lists hold one array per document.

    Attributes:
        kl_N: KL(source ‖ other) of the next-token distributions, nats.
        same_top_N: 1 where both rank the same token first, else 0.
    """

    source: Scores
    other: Scores
    kl_N: Sequence[np.ndarray[Any, Any]]
    same_top_N: Sequence[np.ndarray[Any, Any]]


def score_pair(
    source: nn.Module,
    other: nn.Module,
    documents: Sequence[TokenDocument],
    *,
    window: int = DEFAULT_WINDOW,
    stride: int | None = None,
    batch_size: int = DEFAULT_BATCH,
    vocab: int | None = None,
) -> PairScores:
    """Score both models batch by batch; no more than one slice of either's logits is kept at a time.

    Args and raises: as :func:`headfold.eval.perplexity.score`. ``vocab`` must be given where the two vocabularies
    are padded to different sizes; both distributions are then over the first ``vocab`` ids.
    """
    total = sum(document.scored for document in documents)
    values_4N = torch.zeros(4, total, dtype=torch.float32)
    with evaluating(source), evaluating(other):
        features = Features(source), Features(other)
        for batch, _ in shared_batches(documents, window, stride, batch_size):
            values_4N[:, batch.places_N] = _compare_batch(features, batch, vocab)
    nll_source, nll_other, kl, same = (split_by_document(values_N, documents) for values_N in values_4N)
    return PairScores(Scores(documents, nll_source), Scores(documents, nll_other), kl, same)


def _compare_batch(features: tuple[Features, Features], batch: Batch, vocab: int | None) -> Tensor:
    slices = zip(*(model.slices(batch, vocab) for model in features), strict=True)
    rows = [_compare(source_NV, other_NV, targets_N) for (source_NV, targets_N), (other_NV, _) in slices]
    return torch.cat(rows, dim=1).cpu()


def _compare(source_NV: Tensor, other_NV: Tensor, targets_N: Tensor) -> Tensor:
    """Rows: nats of the source, nats of the other, KL, same top token."""
    other_NV = other_NV.to(source_NV.device)
    same_N = source_NV.argmax(-1) == other_NV.argmax(-1)
    nats = nll_nats(source_NV, targets_N), nll_nats(other_NV, targets_N)
    log_source_NV, log_other_NV = source_NV.log_softmax(-1), other_NV.log_softmax(-1)
    # A ruled-out token (log-probability -inf in both) adds nothing; without the mask it would add NaN.
    terms_NV = log_source_NV.exp() * (log_source_NV - log_other_NV)
    kl_N = terms_NV.masked_fill(log_source_NV.isneginf(), 0).sum(-1).clamp(min=0)  # below zero only by rounding
    return torch.stack([*nats, kl_N, same_N.float()])
