"""Retrieval over long context: a passage hidden in other text, and how well a model continues its repetition.

Averages of perplexity hide what a smaller cache forgets, since most tokens need only near context. Here a passage of
the text (the needle) stands at some depth of other text, and its beginning again at the end. The rest of the passage is
scored with the needle there, and without it. The difference is what the model fetched from that depth.

The passages are made of the text's own tokens, so they suit any vocabulary, and even a small model shows something.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...console import progress, warn
from ..scoring.batches import WindowBatch
from ..scoring.logits import Features
from ..scoring.perplexity import evaluating
from ..scoring.windows import ScoredDocument

CUE, ANSWER = 16, 16
NEEDLE = CUE + ANSWER
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
SEED = 0


@dataclass(frozen=True)
class NeedleSettings:
    """What is hidden where.

    Attributes:
        passages: needles for each length; each is hidden at every depth.
        lengths: tokens of the whole sequence.
        depths: 0 is the beginning of the text, 1 right before the repetition.
    """

    passages: int = 8
    lengths: tuple[int, ...] = (128, 512)
    depths: tuple[float, ...] = DEPTHS


@dataclass(frozen=True)
class Hidden:
    """One passage in one text: the sequences with the needle, by depth, and last the one without."""

    length: int
    ids_DT: list[list[int]]


@dataclass(frozen=True)
class Retrieved:
    """What one model made of the passages of one length; L passages, D depths.

    Attributes:
        gain_LD: nats per answer token that the needle saves, compared with the same text without it.
        found_LD: share of the answer's tokens that the model ranks first when the needle is there.
    """

    length: int
    gain_LD: list[list[float]]
    found_LD: list[list[float]]


def default_lengths(limit: int | None) -> tuple[int, ...]:
    """A quarter of the model's limit and all of it, but no more than 2,048 tokens unless they are asked for."""
    longest = min(limit or 2048, 2048)
    return tuple(sorted({length for length in (longest // 4, longest) if length >= 3 * NEEDLE}))


def hide(documents: Sequence[ScoredDocument], settings: NeedleSettings) -> list[Hidden]:
    """Passages and the text around them, drawn from the scored text; lengths that it is too short for are left out."""
    stream = [token for document in documents for token in document.ids[1:]]
    bos = [documents[0].ids[0]] if documents[0].bos else []
    draw = random.Random(SEED)
    made = []
    for length in settings.lengths:
        hay = length - NEEDLE - len(bos)  # with the needle, its own length of this gives way
        if hay < 2 * NEEDLE or len(stream) < 2 * (hay + NEEDLE):
            warn(f"No passages are hidden in {length} tokens: the text is too short for that, or they are too few.")
            continue
        for _ in range(settings.passages):
            text, needle = _draw(stream, hay, draw)
            room = hay - NEEDLE
            places = [round(depth * room) for depth in settings.depths]
            sequences = [[*bos, *text[:place], *needle, *text[place:room], *needle] for place in places]
            made.append(Hidden(length, [*sequences, [*bos, *text, *needle]]))
    return made


def _draw(stream: Sequence[int], hay: int, draw: random.Random) -> tuple[list[int], list[int]]:
    """A stretch of the text, and a passage that does not overlap with it."""
    begin = draw.randrange(len(stream) - hay)
    turned = [*stream[begin:], *stream[:begin]]  # the stretch comes first now; the passage is one of the rest
    place = draw.randrange(hay, len(stream) - NEEDLE + 1)
    return turned[:hay], turned[place : place + NEEDLE]


def retrieve(
    model: nn.Module, hidden: Sequence[Hidden], *, batch_size: int = 8, vocab: int | None = None
) -> list[Retrieved]:
    """Score all hidden passages with one model.

    Args:
        hidden: what :func:`hide` made; the same for every model that is compared.
        vocab: rank among the first ids only.
    """
    lengths = sorted({one.length for one in hidden})
    found = []
    with evaluating(model), progress("retrieving", total=sum(len(one.ids_DT) for one in hidden)) as advance:
        features = Features(model)
        for length in lengths:
            sequences = torch.tensor([one.ids_DT for one in hidden if one.length == length])
            rows = []
            for ids_BT in sequences.flatten(0, 1).split(batch_size):
                rows.append(_score_answers(features, ids_BT, vocab))
                advance(len(ids_BT))
            nats_LD, found_LD = torch.cat(rows, dim=1).unflatten(1, sequences.shape[:2]).double()
            gain_LD = nats_LD[:, -1:] - nats_LD[:, :-1]
            found.append(Retrieved(length, gain_LD.tolist(), found_LD[:, :-1].tolist()))
    return found


def _score_answers(features: Features, ids_BT: Tensor, vocab: int | None) -> Tensor:
    """Rows: nats per token of each sequence's last ANSWER tokens, and the share of them ranked first."""
    batch = _answers(ids_BT)
    slices = [
        torch.stack([-log_NV.gather(1, targets_N[:, None])[:, 0], (log_NV.argmax(-1) == targets_N).float()])
        for logits_NV, targets_N in features.slices(batch, vocab)
        for log_NV in [logits_NV.log_softmax(-1)]
    ]
    values_2BA: Tensor = torch.cat(slices, dim=1).cpu().unflatten(1, (len(ids_BT), ANSWER))
    return values_2BA.mean(-1)


def _answers(ids_BT: Tensor) -> WindowBatch:
    rows, tokens = ids_BT.shape
    columns_N = torch.arange(tokens - ANSWER - 1, tokens - 1).repeat(rows)
    rows_N = torch.arange(rows).repeat_interleave(ANSWER)
    return WindowBatch(ids_BT, None, rows_N, columns_N, ids_BT[rows_N, columns_N + 1], torch.arange(len(rows_N)))


def gains(retrieved: Retrieved) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Mean gain of each passage over its depths: what is resampled for an interval."""
    mean_L: np.ndarray[Any, np.dtype[np.float64]] = np.asarray(retrieved.gain_LD, dtype=np.float64).mean(axis=1)
    return mean_L


def fitting(settings: NeedleSettings, limit: int | None) -> NeedleSettings:
    """The settings without lengths beyond the models' limit."""
    lengths = tuple(length for length in settings.lengths if limit is None or length <= limit)
    for length in sorted(set(settings.lengths) - set(lengths)):
        warn(f"No passages are hidden in {length} tokens: the models take {limit} at most.")
    return replace(settings, lengths=lengths)
