"""Pairs of token ids for encoder-decoders: what the encoder reads, and what the decoder is to write.

Letters of shapes: B pairs, S tokens of a source, T tokens of a target.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .console import warn
from .errors import UsageError

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
        longest: tokens that a side may have; of a longer one the text is cut, and what the tokenizer adds is kept.

    Raises:
        UsageError: the tokenizer was not told which language the targets are in, or a side has no room for text.
    """

    def __init__(self, tokenizer: Any, longest: int) -> None:
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
        self._tokenizer, self._longest = tokenizer, longest
        self._said = False

    def __call__(self, source: str, target: str) -> Pair:
        return Pair(self._ids(text=source), self._ids(text_target=target))

    def _ids(self, **text: str) -> list[int]:
        # verbose=False: what is longer than the model's context is cut below
        ids = list(self._tokenizer(**text, verbose=False)["input_ids"])
        if len(ids) <= self._longest:
            return ids
        if not self._said:
            warn(f"Texts of more than {self._longest} tokens are cut there; one has {len(ids)}.")
            self._said = True
        return list(self._tokenizer(**text, truncation=True, max_length=self._longest)["input_ids"])


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
