"""Measure retrieval over long context: hide a passage in other text, and score a model on continuing its repetition.

Averages of perplexity hide what a smaller cache forgets, since most tokens need only near context. Here a passage of
the text (the needle) stands at some depth of other text, and its beginning is repeated at the end. The rest of the
passage is scored twice, with the needle there and without it. The difference is what the model retrieved from there.

Passages are made of the text's own tokens, so they suit any vocabulary, and even a small model shows a difference.
Letters of shapes: W passages, B sequences of a batch, T tokens, N scored tokens, V vocabulary.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from ...console import progress, warn
from ..results import NeedleSettings
from ..scoring.batches import WindowBatch
from ..scoring.logits import SlicedLogits
from ..scoring.perplexity import evaluation_mode
from ..scoring.windows import ScoredDocument
from .intervals import Array

CUE, ANSWER = 16, 16
"""Tokens of the repetition that the model reads, and tokens after them that are scored."""
NEEDLE = CUE + ANSWER
SEED = 0
_MOST_TOKENS = 2048
"""Longest text by default. Longer ones take minutes per model, so the user must name them."""


@dataclass(frozen=True)
class HiddenPassage:
    """One passage in one text: a sequence with the needle for each depth, and last the sequence without it.

    Attributes:
        document: index of the document that the needle begins in.
    """

    length: int
    document: int
    sequences: list[list[int]]


@dataclass(frozen=True)
class RetrievalScores:
    """Scores of one model on the passages of one length. Nested lists are of shape (W, depths).

    Attributes:
        documents: index of each passage's document. Passages of one document are not independent.
        gain_nats: nats per answer token that the needle saves, compared with the same text without it.
        found_share: share of the answer's tokens that the model ranks first when the needle is there.
    """

    length: int
    documents: list[int]
    gain_nats: list[list[float]]
    found_share: list[list[float]]


def default_lengths(limit: int | None) -> tuple[int, ...]:
    """Choose a quarter of the model's limit and all of it, and no more than 2,048 tokens."""
    longest = min(limit or _MOST_TOKENS, _MOST_TOKENS)
    return tuple(sorted({length for length in (longest // 4, longest) if length >= 3 * NEEDLE}))


def drop_long_texts(settings: NeedleSettings, limit: int | None) -> NeedleSettings:
    """Leave out lengths beyond the models' limit, with a warning."""
    lengths = tuple(length for length in settings.lengths if limit is None or length <= limit)
    for length in sorted(set(settings.lengths) - set(lengths)):
        warn(f"No passages are hidden in {length} tokens: the models take {limit} at most.")
    return replace(settings, lengths=lengths)


def hide_passages(documents: Sequence[ScoredDocument], settings: NeedleSettings) -> list[HiddenPassage]:
    """Draw passages and the text around them from the scored text. Lengths that it is too short for are left out.

    Passages of one length come from different documents, until every document has given one.
    """
    stream = [token for document in documents for token in document.ids[1:]]
    bos = [documents[0].ids[0]] if documents[0].bos else []
    draw = random.Random(SEED)
    made = []
    for length in settings.lengths:
        hay = length - NEEDLE - len(bos)  # tokens around the repetition; the needle takes the place of some of them
        if hay < 2 * NEEDLE or len(stream) < 2 * (hay + NEEDLE):
            warn(f"No passages are hidden in {length} tokens: the text or this length is too short.")
            continue
        for document, place in _places(documents, settings.passages, draw):
            text, needle = _draw(stream, hay, place, draw)
            room = hay - NEEDLE
            places = [round(depth * room) for depth in settings.depths]
            sequences = [[*bos, *text[:place], *needle, *text[place:room], *needle] for place in places]
            made.append(HiddenPassage(length, document, [*sequences, [*bos, *text, *needle]]))
    return made


def _places(documents: Sequence[ScoredDocument], passages: int, draw: random.Random) -> Iterator[tuple[int, int]]:
    """Draw the documents of the passages, and the place in the text where each passage begins."""
    begins = list(itertools.accumulate((document.scored for document in documents), initial=0))
    # a passage that runs on into the next document is taken only where no document holds a whole one
    whole = [index for index, document in enumerate(documents) if document.scored >= NEEDLE]
    order = whole or [index for index in range(len(documents)) if begins[index] <= begins[-1] - NEEDLE]
    draw.shuffle(order)
    for index in itertools.islice(itertools.cycle(order), passages):
        last = begins[index + 1] - NEEDLE if whole else min(begins[index + 1], begins[-1] - NEEDLE)
        yield index, draw.randint(begins[index], last)


def _draw(stream: Sequence[int], hay: int, place: int, draw: random.Random) -> tuple[list[int], list[int]]:
    """Cut the passage out of the text, and draw a stretch of the rest."""
    rest = [*stream[place + NEEDLE :], *stream[:place]]  # the passage would stand between its end and its beginning
    begin = draw.randrange(len(rest) - hay + 1)
    return rest[begin : begin + hay], list(stream[place : place + NEEDLE])


def score_retrieval(
    model: nn.Module, passages: Sequence[HiddenPassage], *, batch_size: int = 8, vocab: int | None = None
) -> list[RetrievalScores]:
    """Score all hidden passages with one model.

    Args:
        passages: from :func:`hide_passages`, the same for every model of a comparison.
        vocab: rank among the first ids only.
    """
    lengths = sorted({one.length for one in passages})
    found = []
    with evaluation_mode(model), progress("retrieving", total=sum(len(one.sequences) for one in passages)) as advance:
        sliced = SlicedLogits(model)
        for length in lengths:
            ids = torch.tensor([one.sequences for one in passages if one.length == length])  # (W, depths + 1, T)
            scores = []
            for ids_BT in ids.flatten(0, 1).split(batch_size):
                scores.append(_score_answers(sliced, ids_BT, vocab))
                advance(len(ids_BT))
            nats, share = torch.cat(scores, dim=1).unflatten(1, ids.shape[:2]).double()  # each (W, depths + 1)
            gains = nats[:, -1:] - nats[:, :-1]  # the last sequence of a passage has no needle
            documents = [one.document for one in passages if one.length == length]
            found.append(RetrievalScores(length, documents, gains.tolist(), share[:, :-1].tolist()))
    return found


def _score_answers(sliced: SlicedLogits, ids_BT: Tensor, vocab: int | None) -> Tensor:
    """Score each sequence's last ANSWER tokens: a row of nats per token, and a row of the share ranked first."""
    slices = [
        torch.stack([-log_NV.gather(1, targets_N[:, None])[:, 0], (log_NV.argmax(-1) == targets_N).float()])
        for logits_NV, targets_N in sliced.slices(_answer_batch(ids_BT), vocab)
        for log_NV in [logits_NV.log_softmax(-1)]
    ]
    values_2BT: Tensor = torch.cat(slices, dim=1).cpu().unflatten(1, (len(ids_BT), ANSWER))
    return values_2BT.mean(-1)


def _answer_batch(ids_BT: Tensor) -> WindowBatch:
    """Mark the last ANSWER tokens of each sequence as the ones to score."""
    sequences, tokens = ids_BT.shape
    columns_N = torch.arange(tokens - ANSWER - 1, tokens - 1).repeat(sequences)
    rows_N = torch.arange(sequences).repeat_interleave(ANSWER)
    return WindowBatch(ids_BT, None, rows_N, columns_N, ids_BT[rows_N, columns_N + 1], torch.arange(len(rows_N)))


def mean_gains(scores: RetrievalScores) -> Array:
    """Average the gain of each passage over its depths: these means are what an interval is computed from."""
    mean_W: Array = np.asarray(scores.gain_nats, dtype=np.float64).mean(axis=1)
    return mean_W
