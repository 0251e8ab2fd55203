"""Make the pairs that an encoder-decoder is scored on: sources that it reads, and targets that it writes.

Targets are spans cut out of the text (span corruption, :mod:`headfold.spans`), or a column beside it. Every token of a
target is scored exactly once, sentinels and EOS included.

Letters of shapes: B pairs in a batch, S tokens of a source, T tokens of a target, N scored tokens.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...checkpoint.backbone import decoder_inputs
from ...corpus import Document
from ...errors import DataError
from ...pairs import IGNORED, Pair, PairEncoder, padded
from ...spans import MEAN_SPAN, NOISE_DENSITY, SpanCorruption, plain_ids
from .windows import TokenText, Window

SEED = 0
"""Seed of the spans, so that they are the same for every model and every comparison."""


@dataclass(frozen=True)
class TargetSettings:
    """Settings of the targets.

    Attributes:
        longest: most tokens of a source.
        from_column: the targets come from a column, else spans are cut out of the text.
        noise_density, mean_span: of span corruption.
    """

    longest: int
    from_column: bool = False
    noise_density: float = NOISE_DENSITY
    mean_span: float = MEAN_SPAN

    def describe(self) -> dict[str, Any]:
        """Describe the targets as JSON values, for the report and to compare protocols."""
        if self.from_column:
            return {"kind": "column", "longest": self.longest}
        spans = {"noise_density": self.noise_density, "mean_span": self.mean_span, "seed": SEED}
        return {"kind": "spans", "longest": self.longest, **spans}


@dataclass(frozen=True)
class TargetDocument:
    """One document as pairs. It offers the :class:`.windows.ScoredDocument` interface.

    Attributes:
        name: the document's name in its corpus.
        pairs: its blocks, each with a source and a target.
        utf8_bytes: 0, since no text stands behind sentinels and EOS.
    """

    name: str
    pairs: list[Pair]
    utf8_bytes: int = 0
    bos: bool = False

    @property
    def ids(self) -> list[int]:
        """Join all targets. The first id is a filler, since the first id of a text is context only."""
        # the target's last token, so that the filler is an id that every tokenizer and model has
        return [self.pairs[0].target[-1], *(token for pair in self.pairs for token in pair.target)]

    @property
    def scored(self) -> int:
        """Count the tokens of the targets."""
        # every token counts, sentinels too, since the model has to write them all
        return sum(len(pair.target) for pair in self.pairs)

    @property
    def highest(self) -> int:
        """Find the largest token id on either side."""
        return max(max(*pair.source, *pair.target) for pair in self.pairs)

    @property
    def fingerprint(self) -> str:
        """Join all token ids of both sides."""
        return "".join(f"{','.join(map(str, pair.source))}>{','.join(map(str, pair.target))}|" for pair in self.pairs)

    def windows(self, document: int, window: int, step: int) -> list[TargetWindow]:
        """Make one window per pair, whatever the window size. ``document`` is this document's index."""
        made, first = [], 1
        for pair in self.pairs:
            stop = first + len(pair.target)
            # a start below zero is fine: only the difference to stop is used, to sort by length
            made.append(TargetWindow(document, first - len(pair.source), stop, first, pair))
            first = stop
        return made


@dataclass(frozen=True)
class TargetWindow(Window):
    """A pair. ``stop - start`` counts the tokens of both of its sides, so that sorting by length still works."""

    pair: Pair = field(repr=False, default=Pair([], []))


@dataclass(frozen=True)
class TargetBatch:
    """Pairs padded on the right.

    Attributes:
        ids_BS, mask_BS: sources, and 1 on their real tokens.
        labels_BT: targets.
        rows_N, columns_N: position of the logits of each scored token.
        targets_N: the scored token ids.
        places_N: index of each scored token among all scored tokens of the text.
    """

    ids_BS: Tensor
    mask_BS: Tensor
    labels_BT: Tensor
    rows_N: Tensor
    columns_N: Tensor
    targets_N: Tensor
    places_N: Tensor

    @property
    def highest(self) -> int:
        return int(max(self.ids_BS.max(), self.labels_BT.max()))

    def inputs(self, model: Any) -> dict[str, Tensor]:
        """Build the arguments that the model is called with."""
        mask = {} if bool(self.mask_BS.all()) else {"attention_mask": self.mask_BS}
        return {"input_ids": self.ids_BS, **mask, "decoder_input_ids": decoder_inputs(model, self.labels_BT)}


def collate_targets(windows: Sequence[TargetWindow], places: Sequence[Tensor]) -> TargetBatch:
    """Make one batch of these pairs. ``places`` are the indices of each one's scored tokens among all."""
    # id 0 on padding: the mask hides it, and every model has it
    ids_BS, mask_BS, labels_BT = padded([made.pair for made in windows], 0)
    rows_N, columns_N = (labels_BT != IGNORED).nonzero(as_tuple=True)
    return TargetBatch(
        ids_BS, mask_BS, labels_BT, rows_N, columns_N, labels_BT[rows_N, columns_N], torch.cat(list(places))
    )


def target_text(
    tokenizer: Any, documents: Iterable[Document], targets: TargetSettings, *, max_tokens: int | None
) -> TokenText:
    """Read whole documents in order until there are ``max_tokens`` target tokens. The last pair is whole.

    Args:
        tokenizer: a transformers tokenizer. No token is added to it.

    Raises:
        DataError: no document gives a target. UnsupportedError: no sentinels. UsageError: blocks too small or large.
    """
    pairs_of = _pairs_from_columns(tokenizer, targets) if targets.from_column else _pairs_from_spans(tokenizer, targets)
    found: list[TargetDocument] = []
    skipped, scored, truncated = 0, 0, False
    digest = hashlib.sha256()
    for document in documents:
        document.add_to(digest)
        pairs = pairs_of(document)
        taken = _up_to(pairs, None if max_tokens is None else max_tokens - scored)
        if not taken:
            skipped += 1
            continue
        found.append(TargetDocument(document.name, taken))
        scored += found[-1].scored
        truncated = len(taken) < len(pairs)
        if max_tokens is not None and scored >= max_tokens:
            break
    if not found:
        raise DataError("The text holds no target to score.", "Give a document of at least two tokens.")
    return TokenText(found, skipped, truncated, False, digest.hexdigest())


def _up_to(pairs: Sequence[Pair], tokens: int | None) -> list[Pair]:
    """Take the first pairs whose targets have this many tokens. The last one is whole."""
    taken: list[Pair] = []
    for pair in pairs:
        if tokens is not None and tokens <= 0:
            break
        taken.append(pair)
        tokens = None if tokens is None else tokens - len(pair.target)
    return taken


def _pairs_from_columns(tokenizer: Any, targets: TargetSettings) -> Callable[[Document], list[Pair]]:
    """Make one pair of each record (none where either side is empty)."""
    encode = PairEncoder(tokenizer, targets.longest)

    def pairs_of(document: Document) -> list[Pair]:
        whole = document.text.strip() and document.target and document.target.strip()
        return [encode(document.text, document.target or "")] if whole else []

    return pairs_of


def _pairs_from_spans(tokenizer: Any, targets: TargetSettings) -> Callable[[Document], list[Pair]]:
    """Cut a document into blocks and corrupt each. Its spans depend on the document's name and the block's number."""
    corrupt = SpanCorruption.of(tokenizer, targets.noise_density, targets.mean_span)
    size = corrupt.tokens_for(targets.longest)

    def pairs_of(document: Document) -> list[Pair]:
        ids = plain_ids(tokenizer, document.text)
        blocks = [ids[first : first + size] for first in range(0, len(ids), size)]
        return [
            # seeded by name and number, so that other documents before this one do not change its spans
            corrupt(block, random.Random(f"{SEED}:{document.name}:{number}"))
            for number, block in enumerate(blocks)
            if len(block) > 1
        ]

    return pairs_of
