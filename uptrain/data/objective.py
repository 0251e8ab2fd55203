"""Training objectives: predict the next token, fill in spans that were cut out, or write the target of a pair.

Every process walks the whole stream and takes its own items of each step, see :mod:`headfold.uptrain.data.packed`.

Letters of shapes: B sequences, S tokens that an encoder reads, T tokens that a decoder reads or writes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import torch

from ...checkpoint.backbone import decoder_inputs
from ...corpus import Corpus, Encoder
from ...errors import UsageError
from ...pairs import Pair, PairEncoder, padded
from ...spans import MEAN_SPAN, NOISE_DENSITY, SpanCorruption, plain_ids
from ..settings import UptrainSettings
from .batches import PackedBatch, PairBatch, TrainingBatch
from .packed import Encode, PackedTokens, Position, SequenceStream
from .pair_stream import PairStream


class Stream(Protocol):
    """Endless items of one corpus, with a position that can be saved."""

    @property
    def position(self) -> Position: ...

    def __next__(self) -> Any: ...


class TrainingObjective(Protocol):
    """Draws items from a corpus, and makes those of a step into one process's batch."""

    def stream(self, corpus: Corpus, position: Position | None) -> Stream: ...

    def batch(self, step: Sequence[Any], rank: int, processes: int) -> TrainingBatch:
        """Make a batch of every ``processes``-th item of the step, counted from ``rank``."""


class NextToken:
    """Predict each token of packed sequences from those before it.

    Args:
        sequence_length: in tokens.
        seed: of the order of the text.
        isolate: documents of a sequence do not see each other.
    """

    def __init__(self, encode: Encode, *, sequence_length: int, seed: int, isolate: bool = False) -> None:
        self._encode, self._sequence_length, self._seed, self._isolate = encode, sequence_length, seed, isolate

    def stream(self, corpus: Corpus, position: Position | None) -> SequenceStream:
        return SequenceStream(
            corpus, self._encode, sequence_length=self._sequence_length, seed=self._seed, position=position
        )

    def batch(self, step: Sequence[PackedTokens], rank: int, processes: int) -> PackedBatch:
        mine = step[rank::processes]
        ids_BT = torch.tensor([packed.ids for packed in mine], dtype=torch.long)
        opens_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
        for row, packed in enumerate(mine):
            opens_BT[row, packed.openings] = True
        # of all processes, since each divides its loss by the targets of the whole step
        targets = len(step) * (ids_BT.shape[1] - 1)
        if self._isolate:  # the first token of a sequence is not predicted anyway, so it is not subtracted again
            targets -= sum(place > 0 for packed in step for place in packed.openings)
        return PackedBatch(ids_BT, opens_BT, targets, self._isolate)


class _PairBatches:
    """Makes batches of pairs by the rules of one model, whose weights are not used."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def batch(self, step: Sequence[Pair], rank: int, processes: int) -> PairBatch:
        # any id will do, since no token attends to padding
        ids_BS, mask_BS, labels_BT = padded(step[rank::processes], self._model.config.pad_token_id or 0)
        decoder_ids_BT = decoder_inputs(self._model, labels_BT)
        return PairBatch(ids_BS, mask_BS, decoder_ids_BT, labels_BT, sum(len(pair.target) for pair in step))


class Spans(_PairBatches):
    """Span corruption of packed text, as T5 was pretrained: sources of exactly ``sequence_length`` tokens if possible.

    Documents follow each other without a separator, and are then cut, as in T5's own preprocessing. The spans that are
    cut out depend on the seed, on the place of the text in its corpus, pass after pass, and on its tokens.
    """

    def __init__(self, corrupt: SpanCorruption, tokenizer: Any, model: Any, *, sequence_length: int, seed: int) -> None:
        super().__init__(model)
        self._corrupt, self._encode, self._seed = (
            corrupt,
            partial(plain_ids, tokenizer, embeddings=_embeddings(model)),
            seed,
        )
        self._tokens = corrupt.tokens_for(sequence_length)

    def stream(self, corpus: Corpus, position: Position | None) -> _SpanStream:
        texts = SequenceStream(corpus, self._encode, sequence_length=self._tokens, seed=self._seed, position=position)
        return _SpanStream(texts, self._corrupt, self._seed)


class _SpanStream:
    def __init__(self, texts: SequenceStream, corrupt: SpanCorruption, seed: int) -> None:
        self._texts, self._corrupt, self._seed = texts, corrupt, seed

    @property
    def position(self) -> Position:
        return self._texts.position

    def __next__(self) -> Pair:
        ids = next(self._texts).ids
        place = self._texts.position
        # no path or name of the corpus is in the seed, so a corpus that was moved gives the same spans
        return self._corrupt(ids, random.Random(f"{self._seed}:{place.chunk}:{place.drawn}:{ids}"))


class Pairs(_PairBatches):
    """Write the target of each pair of the corpus. Sides longer than ``sequence_length`` tokens are cut."""

    def __init__(self, tokenizer: Any, model: Any, *, sequence_length: int, seed: int) -> None:
        super().__init__(model)
        self._encode, self._seed = PairEncoder(tokenizer, sequence_length, _embeddings(model)), seed

    def stream(self, corpus: Corpus, position: Position | None) -> PairStream:
        return PairStream(corpus, self._encode, seed=self._seed, position=position)


def choose_objective(settings: UptrainSettings, tokenizer: Any, model: Any, encoder_decoder: bool) -> TrainingObjective:
    """Choose by the kind of model: decoders predict the next token, encoder-decoders write pairs or fill in spans.

    Raises:
        UsageError: settings that do not fit the model. UnsupportedError: no sentinels for span corruption.
    """
    refuse_unfit_settings(settings, model, encoder_decoder)
    length, seed = settings.sequence_length, settings.seed
    if not encoder_decoder:
        encode = Encoder(tokenizer, _embeddings(model))
        return NextToken(encode, sequence_length=length, seed=seed, isolate=settings.isolate_documents)
    if settings.target_column is not None:
        return Pairs(tokenizer, model, sequence_length=length, seed=seed)
    corrupt = SpanCorruption.of(tokenizer, settings.noise_density, settings.mean_span)
    return Spans(corrupt, tokenizer, model, sequence_length=length, seed=seed)


def _embeddings(model: Any) -> int:
    """Count the rows of the model's embedding, padding included."""
    return int(model.get_input_embeddings().weight.shape[0])


def refuse_unfit_settings(settings: UptrainSettings, model: Any, encoder_decoder: bool) -> None:
    """Check that the settings fit this kind of model, which may be on the meta device.

    Raises:
        UsageError: pairs or spans for a decoder, or isolated documents for an encoder-decoder.
    """
    if encoder_decoder:
        if settings.isolate_documents:
            raise UsageError(
                "--isolate-documents is for models without an encoder.", "Leave it out: pairs never see each other."
            )
        return
    kind, given = type(model).__name__, (settings.target_column, settings.noise_density, settings.mean_span)
    if given != (None, NOISE_DENSITY, MEAN_SPAN):
        raise UsageError(
            f"{kind} has no encoder, so it learns neither from pairs of columns nor by span corruption.",
            "Leave out --target-column, --noise-density and --mean-span.",
        )
