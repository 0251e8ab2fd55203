"""Calibration text: a corpus as token sequences of one length, in the source's own tokens."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ... import console
from ...checkpoint.load import load_tokenizer
from ...checkpoint.source import Checkpoint
from ...corpus import TRAIN, Columns, Corpus, Encoder, open_corpus, refuse_idle_column
from ...errors import DataError
from ..family.model_type import ModelType
from ..settings import ConvertSettings

IDS = "ids_sha256"
"""Key of the metadata of statistics: the hash of the token ids they were collected on."""
_HELD_OUT_SHARE, _MOST_HELD_OUT = 16, 8192
"""Tokens held out: one in so many of those that calibration reads, and no more than so many."""
_FEWEST, _LONGEST = 4, 2048
"""Held-out sequences: at least so many, and each of at most so many tokens."""
_LEAST_SHARE_LEFT = 8
"""Text is too little to hold any out where more than one token in so many would go."""


@dataclass(frozen=True)
class CalibrationText:
    """Calibration text: the corpus, and its token ids.

    Attributes:
        ids_BT: what statistics and refinement read.
        held_out_BT: sequences after those, which neither reads; None where the text is too little. They may be shorter
            than the others.
    """

    corpus: Corpus
    ids_BT: Tensor
    held_out_BT: Tensor | None = None

    def describe(self) -> dict[str, str]:
        """Name the corpus, and give a hash of the very token ids that are used."""
        ids = hashlib.sha256(self.ids_BT.numpy().tobytes()).hexdigest()
        known = {"corpus": self.corpus.spec, "revision": self.corpus.revision}
        size = {"tokens": str(self.ids_BT.numel()), "sequence_length": str(self.ids_BT.shape[1])}
        return {**known, **size, IDS: ids}


def read_text(source: Checkpoint, settings: ConvertSettings, *, trust_remote_code: bool) -> CalibrationText | None:
    """Read the calibration text in the source's own tokens; None where no text is named."""
    if settings.calibration is None:
        return None
    columns = Columns(settings.text_column)
    corpus = open_corpus(settings.calibration, TRAIN, columns)
    refuse_idle_column([corpus], columns)
    tokenizer = load_tokenizer(source.folder, trust_remote_code=trust_remote_code)
    tokens, length = settings.calibration_tokens, settings.sequence_length
    rows = int(ModelType(source.config).resolved.get_text_config().vocab_size)
    encode = Encoder(tokenizer, rows)
    return CalibrationText(corpus, *_read_blocks(corpus, encode, tokens, length, held_out=True))


def token_blocks(
    corpus: Corpus, tokenizer: Any, *, tokens: int, sequence_length: int, embeddings: int | None = None
) -> Tensor:
    """Pack the first ``tokens`` tokens of a corpus: documents follow each other with the tokenizer's separator.

    Args:
        embeddings: rows of the model's embedding; None: any token is taken.

    Returns:
        (B, T) token ids with T = ``sequence_length``; a rest that does not fill a sequence is dropped.

    Raises:
        DataError: the corpus gives fewer tokens than one sequence, or one that the model has no embedding for.
    """
    encode = Encoder(tokenizer, embeddings)
    return _read_blocks(corpus, encode, tokens, sequence_length, held_out=False)[0]


def _read_blocks(
    corpus: Corpus, encode: Encoder, tokens: int, length: int, *, held_out: bool
) -> tuple[Tensor, Tensor | None]:
    """Pack the first tokens of a corpus for calibration, and some after them that are held out.

    Only the text and the sizes decide on both parts, so a repeated run has the same.
    """
    wanted = max(tokens // length, 1) * length
    count, size = _held_out_size(wanted, length) if held_out else (0, 0)
    ids, after = _token_ids(corpus, encode, wanted, count * size)
    if len(ids) < wanted + count * size:  # a short text gives up its end
        count, size = _held_out_size(len(ids), length)
        if not held_out or count * size > min(len(ids) // _LEAST_SHARE_LEFT, len(ids) - length):
            count = 0
    end = len(ids) - count * size
    # At the start of a document if possible: the second half of one that was calibrated on is easier.
    begin = after if wanted <= after <= end else end
    whole = min(begin, wanted) // length
    if whole == 0:
        raise DataError(
            f"The calibration text {corpus.spec} gives {console.counted(len(ids), 'token')}, fewer than one sequence "
            f"of {length}.",
            "Give more text with --calibration.",
        )
    if whole * length < wanted:
        console.warn(f"The calibration text {corpus.spec} gives only {whole * length:,} of {wanted:,} tokens.")
    ids_BT = torch.tensor(ids[: whole * length]).view(whole, length)
    return ids_BT, torch.tensor(ids[begin : begin + count * size]).view(count, size) if count else None


def _held_out_size(tokens: int, length: int) -> tuple[int, int]:
    """Return the number of held-out sequences beside so many tokens of calibration, and the tokens of each."""
    size = min(length, _LONGEST)
    return max(min(tokens // _HELD_OUT_SHARE, _MOST_HELD_OUT) // size, _FEWEST), size


def _token_ids(corpus: Corpus, encode: Encoder, wanted: int, more: int) -> tuple[list[int], int]:
    """Read whole documents until there are ``wanted`` tokens, and then ``more`` of the documents after them.

    Returns:
        The token ids, and the place where the documents after the wanted tokens begin; 0 where there are too few.
    """
    # No padding: every token counts once in the statistics, and refinement knows no masks.
    ids, after = list[int](), 0
    for document in corpus:
        if not after and len(ids) >= wanted:
            after = len(ids)
        if after and len(ids) >= after + more:
            break
        ids.extend(encode(document.text))
    return ids, after
