"""One process's share of a step, as the model takes it: packed sequences, or pairs for an encoder-decoder.

Letters of shapes: B sequences, S tokens that an encoder reads, T tokens that a decoder reads or writes,
N target tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ...pairs import IGNORED


class TrainingBatch(Protocol):
    """The text of a step."""

    @property
    def targets(self) -> int:
        """Number of tokens to predict in the whole step, over all processes."""

    @property
    def inputs(self) -> dict[str, Tensor]:
        """Arguments of the model."""

    @property
    def scored_BT(self) -> Tensor:
        """True at the tokens whose logits predict a target."""

    @property
    def targets_N(self) -> Tensor:
        """Targets of the scored tokens, in the same order."""

    def split(self, sequences: int) -> Iterator[TrainingBatch]:
        """Cut the batch into micro-batches, whose ``targets`` still counts the whole step."""

    def to(self, device: torch.device) -> TrainingBatch: ...


@dataclass(frozen=True)
class PackedBatch:
    """Sequences of a decoder-only model: each token is predicted from those before it.

    Attributes:
        ids_BT: token ids.
        opens_BT: True where a document begins.
        targets: number of tokens to predict in the whole step.
        isolate: documents of a sequence do not see each other, and their first tokens are not predicted.
    """

    ids_BT: Tensor
    opens_BT: Tensor
    targets: int
    isolate: bool = False

    @property
    def inputs(self) -> dict[str, Tensor]:
        """Token ids, and for isolated documents positions that begin anew at each one.

        transformers takes such positions for several sequences if it gets neither an attention mask nor a cache.
        """
        if not self.isolate:
            return {"input_ids": self.ids_BT}
        places_BT = torch.arange(self.ids_BT.shape[1], device=self.ids_BT.device).expand_as(self.ids_BT)
        openings_BT = torch.where(self.opens_BT, places_BT, 0).cummax(dim=1).values
        return {"input_ids": self.ids_BT, "position_ids": places_BT - openings_BT}

    @property
    def scored_BT(self) -> Tensor:
        """All tokens but the last of each sequence, and but the last of each document if documents are isolated."""
        scored_BT = torch.ones_like(self.opens_BT)
        scored_BT[:, -1] = False
        if self.isolate:
            scored_BT[:, :-1] &= ~self.opens_BT[:, 1:]  # the next document cannot be predicted from this one
        return scored_BT

    @property
    def targets_N(self) -> Tensor:
        return self.ids_BT.roll(-1, dims=1)[self.scored_BT]

    def split(self, sequences: int) -> Iterator[PackedBatch]:
        for ids_BT, opens_BT in zip(self.ids_BT.split(sequences), self.opens_BT.split(sequences), strict=True):
            yield replace(self, ids_BT=ids_BT, opens_BT=opens_BT)

    def to(self, device: torch.device) -> PackedBatch:
        return replace(self, ids_BT=self.ids_BT.to(device), opens_BT=self.opens_BT.to(device))


@dataclass(frozen=True)
class PairBatch:
    """Sources and targets of an encoder-decoder, padded on the right.

    Attributes:
        ids_BS: tokens that the encoder reads.
        mask_BS: 1 on its real tokens.
        decoder_ids_BT: tokens that the decoder reads: the labels, moved on by one.
        labels_BT: tokens that the decoder is to write; :data:`headfold.pairs.IGNORED` on padding.
        targets: number of tokens to write in the whole step.
        full: no source has padding. Found while the tensors are on the CPU: asking a GPU would mean to wait for it.
    """

    ids_BS: Tensor
    mask_BS: Tensor
    decoder_ids_BT: Tensor
    labels_BT: Tensor
    targets: int
    full: bool = False

    @property
    def inputs(self) -> dict[str, Tensor]:
        # without a mask, attention may take its faster path
        mask = {} if self.full else {"attention_mask": self.mask_BS}
        return {"input_ids": self.ids_BS, **mask, "decoder_input_ids": self.decoder_ids_BT}

    @property
    def scored_BT(self) -> Tensor:
        return self.labels_BT != IGNORED

    @property
    def targets_N(self) -> Tensor:
        return self.labels_BT[self.scored_BT]

    def split(self, sequences: int) -> Iterator[PairBatch]:
        """Cut the batch into micro-batches, each without the padding that none of its pairs needs."""
        for first in range(0, len(self.ids_BS), sequences):
            mine = slice(first, first + sequences)
            # the tensors are still on the CPU, so reading a number does not wait for a GPU
            read = int(self.mask_BS[mine].sum(dim=1).max())
            written = int(self.scored_BT[mine].sum(dim=1).max())
            yield replace(
                self,
                ids_BS=self.ids_BS[mine, :read],
                mask_BS=self.mask_BS[mine, :read],
                decoder_ids_BT=self.decoder_ids_BT[mine, :written],
                labels_BT=self.labels_BT[mine, :written],
                full=bool(self.mask_BS[mine, :read].all()),
            )

    def to(self, device: torch.device) -> PairBatch:
        tensors = {
            name: getattr(self, name).to(device) for name in ("ids_BS", "mask_BS", "decoder_ids_BT", "labels_BT")
        }
        return replace(self, **tensors)
