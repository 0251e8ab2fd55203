"""Pairs of token ids for encoder-decoders: what the encoder reads, and what the decoder is to write.

Letters of shapes: B pairs, S tokens of a source, T tokens of a target.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .console import warn

if TYPE_CHECKING:
    from torch import Tensor

IGNORED = -100
"""Label of a place that is padding, as the losses of transformers and PyTorch know it."""


class Pair(NamedTuple):
    """Token ids of both sides, special tokens included."""

    source: list[int]
    target: list[int]


class PairEncoder:
    """The two texts of a record as the tokenizer's own policy has them: language codes, EOS, a vocabulary per side.

    Args:
        tokenizer: of the checkpoint; no token is added to it.
        longest: tokens that a side may have; a longer one is cut, its last token (EOS, or a language) kept.
    """

    def __init__(self, tokenizer: Any, longest: int) -> None:
        self._tokenizer, self._longest = tokenizer, longest
        self._said = False

    def __call__(self, source: str, target: str) -> Pair:
        # verbose=False: what is longer than the model's context is cut below
        read = self._tokenizer(source, verbose=False)["input_ids"]
        written = self._tokenizer(text_target=target, verbose=False)["input_ids"]
        return Pair(self._cut(list(read)), self._cut(list(written)))

    def _cut(self, ids: list[int]) -> list[int]:
        if len(ids) <= self._longest:
            return ids
        if not self._said:
            warn(f"Texts of more than {self._longest} tokens are cut there; one has {len(ids)}.")
            self._said = True
        return [*ids[: self._longest - 1], ids[-1]]


def padded(pairs: Sequence[Pair], pad: int) -> tuple[Tensor, Tensor, Tensor]:
    """Padded on the right: source ids (B, S), their mask (B, S) with 1 on real tokens, labels (B, T).

    Args:
        pad: id on padding of the sources; no real token attends to it. Labels hold :data:`IGNORED` there.
    """
    import torch

    ids_BS = torch.full((len(pairs), max(len(pair.source) for pair in pairs)), pad)
    labels_BT = torch.full((len(pairs), max(len(pair.target) for pair in pairs)), IGNORED)
    mask_BS = torch.zeros_like(ids_BS)
    for row, pair in enumerate(pairs):
        ids_BS[row, : len(pair.source)] = torch.tensor(pair.source)
        mask_BS[row, : len(pair.source)] = 1
        labels_BT[row, : len(pair.target)] = torch.tensor(pair.target)
    return ids_BS, mask_BS, labels_BT
