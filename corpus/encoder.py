"""Documents as token ids, each with a separator."""

from __future__ import annotations

from typing import Any

from ..console import warn
from ..errors import DataError


def refuse_unknown_ids(highest: int, embeddings: int, name: str = "the model") -> None:
    """Refuse text with a token that a model has no embedding for. On a GPU it would end the process unreadably.

    Args:
        highest: the largest token id of the text.
        name: of the model, for the message.

    Raises:
        DataError: the id is not below ``embeddings``.
    """
    if highest >= embeddings:
        raise DataError(
            f"The text holds token id {highest}, but {name} has {embeddings} embeddings.",
            "The tokenizer has tokens that the model does not know. Use the tokenizer that it was trained with, or "
            "leave out text with these tokens.",
        )


class Encoder:
    """Turns a document into token ids as its tokenizer does, and separates it from the next one.

    The separator is EOS at the end, or BOS in front if there is no EOS. Without either, documents are joined without a
    separator, with a warning. No token is ever added to the vocabulary.

    Args:
        embeddings: rows of the model's embedding. Text with another token is refused; None: any token is taken.
    """

    def __init__(self, tokenizer: Any, embeddings: int | None = None) -> None:
        self._tokenizer, self._embeddings = tokenizer, embeddings
        self._eos, self._bos = tokenizer.eos_token_id, tokenizer.bos_token_id
        if self._eos is None and self._bos is None:
            warn("The tokenizer has neither eos nor bos; documents are packed without a separator.")

    def __call__(self, text: str) -> list[int]:
        """Encode one document.

        Raises:
            DataError: the model has no embedding for one of its tokens.
        """
        ids = self._separated(text)
        if self._embeddings is not None and ids:
            refuse_unknown_ids(max(ids), self._embeddings)
        return ids

    def _separated(self, text: str) -> list[int]:
        # verbose=False: a document longer than the model's context is fine here, it will be cut into blocks
        ids = list(self._tokenizer(text, verbose=False)["input_ids"])
        if not ids:
            return ids
        if self._eos is not None:
            return ids if ids[-1] == self._eos else [*ids, self._eos]
        if self._bos is not None and ids[0] != self._bos:
            return [self._bos, *ids]
        return ids
