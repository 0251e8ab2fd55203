"""Score token documents with a language model: nats per token, perplexity, bits per byte.

Letters of shapes: N scored tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from .batches import AnyBatch, split_by_document
from .logits import SlicedLogits
from .score_loop import DEFAULT_BATCH, DEFAULT_WINDOW, ScoreLoop
from .windows import ScoredDocument

if TYPE_CHECKING:
    from accelerate import Accelerator


def exponential(nats: float) -> float:
    """Compute exp (infinity where it is beyond any float, since the nats of a broken model may be that many)."""
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf


@dataclass(frozen=True)
class Perplexity:
    """Summed scores of some text.

    Attributes:
        nll_nats: negative log-likelihood, summed over tokens in float64.
        tokens: scored tokens.
        utf8_bytes: bytes of the text behind them.
    """

    nll_nats: float
    tokens: int
    utf8_bytes: int

    @property
    def perplexity(self) -> float:
        """Compute exp of the mean nats over all tokens."""
        # a mean of the documents' means would weigh short ones too much
        return exponential(self.nll_nats / self.tokens)


@dataclass(frozen=True)
class Scores:
    """One value per scored token in nats: ``nll_N[d][i]`` belongs to token ``i + 1`` of document ``d``."""

    documents: Sequence[ScoredDocument]
    nll_N: Sequence[np.ndarray[Any, np.dtype[np.float32]]]

    def per_document(self) -> list[Perplexity]:
        """Sum the scores of each document."""
        return [
            Perplexity(float(nll.sum(dtype=np.float64)), len(nll), document.utf8_bytes)
            for document, nll in zip(self.documents, self.nll_N, strict=True)
        ]

    def total(self) -> Perplexity:
        """Sum the scores of all documents."""
        parts = self.per_document()
        return Perplexity(
            math.fsum(part.nll_nats for part in parts),
            sum(part.tokens for part in parts),
            sum(part.utf8_bytes for part in parts),
        )


def score(
    model: nn.Module,
    documents: Sequence[ScoredDocument],
    *,
    window: int = DEFAULT_WINDOW,
    stride: int | None = None,
    batch_size: int = DEFAULT_BATCH,
    vocab: int | None = None,
    accelerator: Accelerator | None = None,
) -> Scores:
    """Compute the negative log-likelihood of every token but each document's first.

    Log-softmax is taken in float32 over slices of positions, so the logits of a large vocabulary never exist all
    at once. The result does not depend on the order of the windows or on the number of processes.

    Args:
        model: a language model in train or eval mode, which is restored.
        window, stride: see :func:`headfold.eval.scoring.windows.make_windows`.
        batch_size: windows in one forward pass.
        vocab: score over the first ``vocab`` ids only (default all).
        accelerator: its processes share the windows and each gets the whole result (None for a single process).

    Raises:
        UsageError: window, stride or batch size out of range.
        DataError: no documents, or token ids that the model does not have.
    """
    loop = ScoreLoop(window, stride, batch_size, accelerator)
    with evaluation_mode(model):
        sliced = SlicedLogits(model)

        def nats(batch: AnyBatch) -> Tensor:
            slices = sliced.slices(batch, vocab)
            return torch.cat([nll_nats(logits_NV, targets_N) for logits_NV, targets_N in slices])[None]

        values_1N = loop.values("perplexity", 1, documents, nats)
    return Scores(documents, split_by_document(values_1N[0].numpy(), documents))


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Switch to eval mode without gradients. Each module gets its own mode back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        # one by one, since a caller may have frozen only some of them
        for module, training in modes:
            module.training = training


def nll_nats(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """Compute the nats of each target under float32 logits."""
    return torch.nn.functional.cross_entropy(logits_NV, targets_N, reduction="none")
