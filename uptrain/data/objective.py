"""What a model does with text to learn from it: predict the next token, fill in spans, or write what stands beside it.

Every process walks the whole stream and takes its own rows of each step, see :mod:`headfold.uptrain.data.packed`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from ...checkpoint.backbone import decoder_inputs, is_encoder_decoder
from ...corpus import Corpus, Encoder
from ...errors import UsageError
from ...pairs import Pair, PairEncoder, padded
from ...spans import MEAN_SPAN, NOISE_DENSITY, SpanCorruption
from ..settings import UptrainSettings
from .batches import PackedBatch, PairBatch, TrainingBatch
from .packed import BlockStream, Encode, PackedBlock, PairStream, Position


class Stream(Protocol):
    """Endless items of one corpus, with a position that can be saved."""

    @property
    def position(self) -> Position: ...

    def __next__(self) -> Any: ...


class TrainingObjective(Protocol):
    """Items drawn from a corpus, and how those of a step become one process's batch."""

    def stream(self, corpus: Corpus, position: Position | None) -> Stream: ...

    def batch(self, step: Sequence[Any], rank: int, processes: int) -> TrainingBatch:
        """The batch of every ``processes``-th item of the step, counted from ``rank``."""


class NextToken:
    """Packed blocks; each token is predicted from those before it.

    Args:
        block: tokens of a block.
        seed: of the order of the text.
        isolate: documents of a block do not see each other.
    """

    def __init__(self, encode: Encode, *, sequence_length: int, seed: int, isolate: bool = False) -> None:
        self._encode, self._block, self._seed, self._isolate = encode, sequence_length, seed, isolate

    def stream(self, corpus: Corpus, position: Position | None) -> BlockStream:
        return BlockStream(corpus, self._encode, sequence_length=self._block, seed=self._seed, position=position)

    def batch(self, step: Sequence[PackedBlock], rank: int, processes: int) -> PackedBatch:
        mine = step[rank::processes]
        ids_BT = torch.tensor([block.ids for block in mine], dtype=torch.long)
        opens_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
        for row, block in enumerate(mine):
            opens_BT[row, block.openings] = True
        targets = len(step) * (ids_BT.shape[1] - 1)
        if self._isolate:
            targets -= sum(place > 0 for block in step for place in block.openings)
        return PackedBatch(ids_BT, opens_BT, targets, self._isolate)


class _PairBatches:
    """Pairs as batches of one model; its weights are not touched."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def batch(self, step: Sequence[Pair], rank: int, processes: int) -> PairBatch:
        ids_BS, mask_BS, labels_BT = padded(step[rank::processes], self._model.config.pad_token_id or 0)
        written_BT = decoder_inputs(self._model, labels_BT)
        return PairBatch(ids_BS, mask_BS, written_BT, labels_BT, sum(len(pair.target) for pair in step))


class Spans(_PairBatches):
    """Span corruption of packed text, as T5 was pretrained: sources of exactly ``block`` tokens where that is possible.

    Documents follow each other without a separator, and are then cut, as in T5's own preprocessing. Which spans of a
    block are cut out hangs on the seed, the block's place in its corpus, pass after pass, and its tokens.
    """

    def __init__(self, corrupt: SpanCorruption, tokenizer: Any, model: Any, *, sequence_length: int, seed: int) -> None:
        super().__init__(model)
        self._corrupt, self._encode, self._seed = corrupt, _bare(tokenizer), seed
        self._tokens = corrupt.tokens_for(sequence_length)

    def stream(self, corpus: Corpus, position: Position | None) -> _SpanStream:
        blocks = BlockStream(corpus, self._encode, sequence_length=self._tokens, seed=self._seed, position=position)
        return _SpanStream(blocks, self._corrupt, self._seed)


class _SpanStream:
    def __init__(self, blocks: BlockStream, corrupt: SpanCorruption, seed: int) -> None:
        self._blocks, self._corrupt, self._seed = blocks, corrupt, seed

    @property
    def position(self) -> Position:
        return self._blocks.position

    def __next__(self) -> Pair:
        ids = next(self._blocks).ids
        place = self._blocks.position
        return self._corrupt(ids, random.Random(f"{self._seed}:{place.chunk}:{place.drawn}:{ids}"))


class Pairs(_PairBatches):
    """The target beside each text, as the corpus has them; sides longer than ``block`` tokens are cut."""

    def __init__(self, tokenizer: Any, model: Any, *, sequence_length: int, seed: int) -> None:
        super().__init__(model)
        self._encode, self._seed = PairEncoder(tokenizer, sequence_length), seed

    def stream(self, corpus: Corpus, position: Position | None) -> PairStream:
        return PairStream(corpus, self._encode, seed=self._seed, position=position)


def _bare(tokenizer: Any) -> Encode:
    """Token ids of a text and nothing else."""

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    return encode


def choose_objective(settings: UptrainSettings, tokenizer: Any, model: Any) -> TrainingObjective:
    """Columns where they are named, else span corruption for an encoder-decoder and the next token for a decoder.

    Raises:
        UsageError: settings that mean nothing for this model. UnsupportedError: no sentinels for span corruption.
    """
    refuse_meaningless(settings, model)
    block, seed = settings.sequence_length, settings.seed
    if not is_encoder_decoder(model):
        return NextToken(Encoder(tokenizer), sequence_length=block, seed=seed, isolate=settings.isolate_documents)
    if settings.target_column is not None:
        return Pairs(tokenizer, model, sequence_length=block, seed=seed)
    corrupt = SpanCorruption.of(tokenizer, settings.noise_density, settings.mean_span)
    return Spans(corrupt, tokenizer, model, sequence_length=block, seed=seed)


def refuse_meaningless(settings: UptrainSettings, model: Any) -> None:
    """Raise where settings mean nothing for this kind of model, which may be on the meta device.

    Raises:
        UsageError: pairs or spans for a decoder, or documents kept apart in an encoder-decoder.
    """
    if is_encoder_decoder(model):
        if settings.isolate_documents:
            raise UsageError(
                "--isolate-documents is for models without an encoder.", "Leave it out; pairs never see each other."
            )
        return
    kind, given = type(model).__name__, (settings.target_column, settings.noise_density, settings.mean_span)
    if given != (None, NOISE_DENSITY, MEAN_SPAN):
        raise UsageError(
            f"{kind} has no encoder, so it learns neither from pairs of columns nor by span corruption.",
            "Leave out --target-column, --noise-density and --mean-span.",
        )
