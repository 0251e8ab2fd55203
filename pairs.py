"""Pairs of token ids for encoder-decoders: the source that the encoder reads, and the target that the decoder writes.

Letters of shapes: B pairs, S tokens that an encoder reads, T tokens that a decoder writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .console import warn
from .corpus import refuse_unknown_ids
from .errors import UsageError

if TYPE_CHECKING:  # importing torch takes seconds, and commands that only print help import this module
    from torch import Tensor

IGNORED = -100
"""Label of padding, as the losses of transformers and PyTorch know it."""


class Pair(NamedTuple):
    """Token ids of both sides, special tokens included."""

    source: list[int]
    target: list[int]


class PairEncoder:
    """Encodes the two texts of a record by the tokenizer's own rules: language codes, EOS, a vocabulary per side.

    Args:
        tokenizer: of the checkpoint; no token is added to it.
        longest: most tokens of a side. The text of a longer one is cut, but not the tokens that the tokenizer adds.
        embeddings: rows of the model's embedding; None: any token is taken.

    Raises:
        UsageError: the tokenizer was not told the language of the targets, or a side has no room for text.
    """

    def __init__(self, tokenizer: Any, longest: int, embeddings: int | None = None) -> None:
        if getattr(tokenizer, "tgt_lang", "") is None:
            raise UsageError(
                "The tokenizer knows many languages and does not say which one the targets are in.",
                'State both in its tokenizer_config.json, such as "src_lang": "en_XX", "tgt_lang": "ro_RO".',
            )
        added = tokenizer.num_special_tokens_to_add()
        if longest <= added:
            raise UsageError(
                f"{longest} tokens leave no room for text: the tokenizer adds {added} to each side.",
                "Give a larger --sequence-length (of eval: --window).",
            )
        self._tokenizer, self._longest, self._embeddings = tokenizer, longest, embeddings
        self._warned = False

    def __call__(self, source: str, target: str) -> Pair:
        """Encode a pair.

        Raises:
            DataError: the model has no embedding for one of its tokens.
        """
        pair = Pair(self._ids(text=source), self._ids(text_target=target))
        if self._embeddings is not None and (pair.source or pair.target):
            refuse_unknown_ids(max((*pair.source, *pair.target)), self._embeddings)
        return pair

    def _ids(self, **text: str) -> list[int]:
        # verbose=False: no warning that a text is longer than the model's context, since it is cut below
        ids = list(self._tokenizer(**text, verbose=False)["input_ids"])
        if len(ids) <= self._longest:
            return ids
        if not self._warned:
            warn(f"Texts of more than {self._longest} tokens are cut there; one has {len(ids)}.")
            self._warned = True
        return list(self._tokenizer(**text, truncation=True, max_length=self._longest)["input_ids"])


def padded(pairs: Sequence[Pair], pad: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pad pairs on the right: source ids (B, S), their mask (B, S) with 1 on real tokens, and labels (B, T).

    Args:
        pad: id on padding of the sources; no real token attends to it. Padded labels are :data:`IGNORED`.
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
