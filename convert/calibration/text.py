"""Calibration text as token sequences of one length."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import console
from ...corpus import Corpus, Encoder
from ...errors import DataError


def token_blocks(corpus: Corpus, tokenizer: Any, *, tokens: int, sequence_length: int) -> Tensor:
    """Pack the first ``tokens`` tokens of a corpus: documents follow each other with the tokenizer's separator.

    Returns:
        (B, T) token ids with T = ``sequence_length``; a rest that does not fill a sequence is dropped.

    Raises:
        DataError: the corpus gives fewer tokens than one sequence.
    """
    wanted = max(tokens // sequence_length, 1) * sequence_length
    encode, ids = Encoder(tokenizer), list[int]()
    for document in corpus:
        if len(ids) >= wanted:
            break
        ids.extend(encode(document.text))
    whole = min(len(ids), wanted) // sequence_length
    if whole == 0:
        raise DataError(
            f"The calibration text {corpus.spec} gives {len(ids)} tokens, fewer than one sequence of "
            f"{sequence_length}.",
            "Give more text with --calibration.",
        )
    if whole * sequence_length < wanted:
        console.warn(f"The calibration text {corpus.spec} gives only {whole * sequence_length:,} of {wanted:,} tokens.")
    return torch.tensor(ids[: whole * sequence_length]).view(whole, sequence_length)
