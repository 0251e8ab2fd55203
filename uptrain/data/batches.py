"""One process's share of a step, as the model takes it: packed blocks, or pairs for an encoder-decoder.

Letters of shapes: B rows, M rows of a micro-batch, S tokens of a source, T tokens of a block or target, N targets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ...pairs import IGNORED


class TrainingBatch(Protocol):
    """What a step needs to know of its text."""

    @property
    def targets(self) -> int:
        """Tokens to be predicted in the whole step, over all processes."""

    @property
    def inputs(self) -> dict[str, Tensor]:
        """What the model is called with."""

    @property
    def keep_BT(self) -> Tensor:
        """True at the positions whose logits are for a target."""

    @property
    def targets_N(self) -> Tensor:
        """The targets of these positions, in their order."""

    def split(self, rows: int) -> Iterator[TrainingBatch]:
        """Micro-batches; what is counted stays that of the whole step."""

    def to(self, device: torch.device) -> TrainingBatch: ...


@dataclass(frozen=True)
class PackedBatch:
    """Blocks of a decoder-only model: each token is predicted from those before it.

    Attributes:
        ids_BT: token ids.
        opens_BT: True where a document opens.
        targets: tokens of the whole step that are to be predicted.
        isolate: documents of a block do not see each other, and what opens one is nobody's target.
    """

    ids_BT: Tensor
    opens_BT: Tensor
    targets: int
    isolate: bool = False

    @property
    def inputs(self) -> dict[str, Tensor]:
        """Token ids, and positions that start again at each document where documents are kept apart.

        transformers reads such positions as several sequences, given no attention mask and no cache.
        """
        if not self.isolate:
            return {"input_ids": self.ids_BT}
        places_BT = torch.arange(self.ids_BT.shape[1], device=self.ids_BT.device).expand_as(self.ids_BT)
        openings_BT = torch.where(self.opens_BT, places_BT, 0).cummax(dim=1).values
        return {"input_ids": self.ids_BT, "position_ids": places_BT - openings_BT}

    @property
    def keep_BT(self) -> Tensor:
        """All but the last of each block, and but those before the opening of a document that is kept apart."""
        keep_BT = torch.ones_like(self.opens_BT)
        keep_BT[:, -1] = False
        if self.isolate:
            keep_BT[:, :-1] &= ~self.opens_BT[:, 1:]  # what opens a document cannot be told from the one before
        return keep_BT

    @property
    def targets_N(self) -> Tensor:
        return self.ids_BT.roll(-1, dims=1)[self.keep_BT]

    def split(self, rows: int) -> Iterator[PackedBatch]:
        for ids_MT, opens_MT in zip(self.ids_BT.split(rows), self.opens_BT.split(rows), strict=True):
            yield replace(self, ids_BT=ids_MT, opens_BT=opens_MT)

    def to(self, device: torch.device) -> PackedBatch:
        return replace(self, ids_BT=self.ids_BT.to(device), opens_BT=self.opens_BT.to(device))


@dataclass(frozen=True)
class PairBatch:
    """Sources and targets of an encoder-decoder, padded on the right.

    Attributes:
        ids_BS: what the encoder reads.
        mask_BS: 1 on its real tokens.
        written_BT: what the decoder is given, the labels moved on by one.
        labels_BT: what it is to write; :data:`headfold.pairs.IGNORED` on padding.
        targets: tokens of the whole step that are to be written.
        full: no source has padding; found while the tensors are on the CPU, for a GPU would have to be waited for.
    """

    ids_BS: Tensor
    mask_BS: Tensor
    written_BT: Tensor
    labels_BT: Tensor
    targets: int
    full: bool = False

    @property
    def inputs(self) -> dict[str, Tensor]:
        mask = {} if self.full else {"attention_mask": self.mask_BS}
        return {"input_ids": self.ids_BS, **mask, "decoder_input_ids": self.written_BT}

    @property
    def keep_BT(self) -> Tensor:
        return self.labels_BT != IGNORED

    @property
    def targets_N(self) -> Tensor:
        return self.labels_BT[self.keep_BT]

    def split(self, rows: int) -> Iterator[PairBatch]:
        """Micro-batches without the padding that no row of theirs needs."""
        for first in range(0, len(self.ids_BS), rows):
            mine = slice(first, first + rows)
            read = int(self.mask_BS[mine].sum(dim=1).max())
            written = int(self.keep_BT[mine].sum(dim=1).max())
            yield replace(
                self,
                ids_BS=self.ids_BS[mine, :read],
                mask_BS=self.mask_BS[mine, :read],
                written_BT=self.written_BT[mine, :written],
                labels_BT=self.labels_BT[mine, :written],
                full=bool(self.mask_BS[mine, :read].all()),
            )

    def to(self, device: torch.device) -> PairBatch:
        tensors = {name: getattr(self, name).to(device) for name in ("ids_BS", "mask_BS", "written_BT", "labels_BT")}
        return replace(self, **tensors)
