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


@dataclass(frozen=True)
class CalibrationText:
    """Calibration text: the corpus, and its token ids (B sequences of T tokens)."""

    corpus: Corpus
    ids_BT: Tensor

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
    blocks = token_blocks(corpus, tokenizer, tokens=tokens, sequence_length=length, embeddings=rows)
    return CalibrationText(corpus, blocks)


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
    wanted = max(tokens // sequence_length, 1) * sequence_length
    # No padding: every token counts once in the statistics, and refinement knows no masks.
    encode, ids = Encoder(tokenizer, embeddings), list[int]()
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
