"""Cut documents into overlapping windows so that every token but a document's first is scored exactly once.

docs/perplexity.md describes the protocol and gives the reasons for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...corpus import Document
from ...errors import DataError, UsageError
from .text_bytes import scored_bytes


@dataclass(frozen=True)
class TokenDocument:
    """One document as the tokens that are scored.

    Attributes:
        name: the document's name in its corpus.
        ids: token ids. The first is context only, so ``len(ids) - 1`` tokens are scored.
        utf8_bytes: bytes of the text that the scored tokens stand for.
        bos: ``ids[0]`` is the beginning-of-sequence token, which every window of the document then starts with.
    """

    name: str
    ids: list[int]
    utf8_bytes: int
    bos: bool = False

    @property
    def scored(self) -> int:
        """Count the tokens that are scored."""
        return len(self.ids) - 1

    @property
    def highest(self) -> int:
        """Find the largest token id."""
        return max(self.ids)

    @property
    def fingerprint(self) -> str:
        """Join all token ids."""
        return ",".join(map(str, self.ids)) + ";"

    def windows(self, document: int, window: int, step: int) -> list[Window]:
        """Make this document's part of :func:`make_windows`. ``document`` is its index."""
        return list(_cut(document, len(self.ids), window, step))


class ScoredDocument(Protocol):
    """Interface of a document to score: a text, or the targets of an encoder-decoder. See :class:`TokenDocument`.

    ``ids[place + 1]`` is the token with index ``place`` among the document's scored ones.
    """

    @property
    def name(self) -> str: ...
    @property
    def ids(self) -> list[int]: ...
    @property
    def utf8_bytes(self) -> int: ...
    @property
    def bos(self) -> bool: ...
    @property
    def scored(self) -> int: ...
    @property
    def highest(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...
    def windows(self, document: int, window: int, step: int) -> Sequence[Window]: ...


@dataclass(frozen=True)
class TokenText:
    """The documents of a corpus under one tokenizer.

    Attributes:
        documents: those with at least one token to score, in corpus order.
        skipped: documents left out because they are empty or shorter than two tokens.
        truncated: the last document was cut at ``max_tokens``.
        bos: at least one document starts with the tokenizer's BOS token.
        text_sha256: hash over names and texts of the documents read, skipped ones included.
    """

    documents: Sequence[ScoredDocument] = field(repr=False)
    skipped: int
    truncated: bool
    bos: bool
    text_sha256: str

    @property
    def scored(self) -> int:
        """Count the tokens that are scored."""
        return sum(document.scored for document in self.documents)

    @property
    def ids_sha256(self) -> str:
        """Hash all token ids and document borders. Two models that score the same tokens have equal hashes."""
        digest = hashlib.sha256()
        for document in self.documents:
            # one document at a time, since the ids of a large text take much memory as a string
            digest.update(document.fingerprint.encode())
        return digest.hexdigest()


@dataclass(frozen=True)
class Window:
    """A slice of one document that goes through the model at once.

    Attributes:
        document: index of the document.
        start, stop: the slice of its token ids.
        first_scored: position in the document from which on this window's tokens are scored; greater than ``start``.
    """

    document: int
    start: int
    stop: int
    first_scored: int

    def ids(self, documents: Sequence[ScoredDocument]) -> list[int]:
        """List the window's token ids. In documents that begin with BOS, BOS replaces the first one."""
        document = documents[self.document]
        ids = document.ids[self.start : self.stop]
        # the first id is context only, so replacing it changes no scored token
        return [document.ids[0], *ids[1:]] if document.bos else ids


def tokenize_text(
    tokenizer: Any, documents: Iterable[Document], *, max_tokens: int | None, bos: bool | None = None
) -> TokenText:
    """Tokenize whole documents in order until there are ``max_tokens`` tokens to score. The last one is cut there.

    Args:
        tokenizer: a transformers tokenizer. No token is added to it.
        max_tokens: scored tokens to stop after, or None for all the text.
        bos: None follows the tokenizer's own policy, True forces one BOS token, False none. There are never two.

    Raises:
        DataError: no document holds a token to score.
        UsageError: ``max_tokens`` is below one, or ``bos=True`` and the tokenizer has no BOS token.
    """
    if max_tokens is not None and max_tokens < 1:
        raise UsageError(f"The number of tokens to score is {max_tokens}.", "Give at least 1.")
    if bos and tokenizer.bos_token_id is None:
        raise UsageError("--bos needs a BOS token, but the tokenizer has none.", "Leave --bos out.")
    scored_documents: list[TokenDocument] = []
    skipped, left, truncated = 0, max_tokens, False
    digest = hashlib.sha256()
    for document in documents:
        document.add_to(digest)
        tokens, cut = _tokenize(tokenizer, document, left, bos)
        if tokens is None:
            skipped += 1
            continue
        scored_documents.append(tokens)
        truncated = truncated or cut
        if left is not None:
            left -= tokens.scored
            if left == 0:
                break
    if not scored_documents:
        raise DataError("The text holds no token to score.", "Give a document of at least two tokens.")
    return TokenText(
        scored_documents, skipped, truncated, any(document.bos for document in scored_documents), digest.hexdigest()
    )


def _tokenize(
    tokenizer: Any, document: Document, limit: int | None, bos: bool | None
) -> tuple[TokenDocument | None, bool]:
    """Tokenize one document (None when there is nothing to score), and tell whether it was cut."""
    if not document.text.strip():
        return None, False
    encoding = tokenizer(
        document.text, return_offsets_mapping=tokenizer.is_fast, return_attention_mask=False, verbose=False
    )
    ids: list[int] = list(encoding["input_ids"])
    offsets: list[tuple[int, int]] | None = list(encoding["offset_mapping"]) if tokenizer.is_fast else None
    # some templates add BOS to a text that begins with it; two of them would shift every score
    ids, offsets, starts_with_bos = _with_bos_policy(ids, offsets, tokenizer.bos_token_id, bos)
    cut = limit is not None and len(ids) - 1 > limit
    if limit is not None:
        ids = ids[: limit + 1]
    if len(ids) < 2:
        return None, False
    utf8_bytes = scored_bytes(tokenizer, document.text, ids, offsets, cut)
    return TokenDocument(document.name, ids, utf8_bytes, starts_with_bos), cut


def _with_bos_policy(
    ids: list[int], offsets: list[tuple[int, int]] | None, bos_id: int | None, bos: bool | None
) -> tuple[list[int], list[tuple[int, int]] | None, bool]:
    """Apply the BOS policy: at most one BOS at the start, even if both the template and the text bring one."""
    if bos_id is None:
        return ids, offsets, False
    found = 0
    while found < len(ids) and ids[found] == bos_id:
        found += 1
    wanted = int(found > 0 if bos is None else bos)
    ids = [bos_id] * wanted + ids[found:]
    if offsets is not None:
        offsets = [(0, 0)] * wanted + offsets[found:]
    return ids, offsets, bool(wanted)


def default_stride(window: int) -> int:
    """Take half the window, so that scored tokens but a document's first ones see at least half a window of context."""
    return max(1, window // 2)


def make_windows(documents: Sequence[ScoredDocument], window: int, stride: int | None = None) -> list[Window]:
    """Make windows that score every token but each document's first exactly once and never cross documents.

    Args:
        window: tokens in a window, BOS included; at least 2.
        stride: tokens between the starts of two windows, default half a window. A token needs one token of context, so
            a stride of ``window`` or more means windows that overlap by one token.

    Raises:
        UsageError: ``window`` below 2 or ``stride`` below 1.
    """
    if window < 2:
        raise UsageError(f"A window of {window} tokens leaves nothing to score.", "Give a window of at least 2.")
    if stride is not None and stride < 1:
        raise UsageError(f"The stride is {stride}.", "Give a stride of at least 1.")
    # a stride of a whole window would leave the first token of each window without context
    step = min(stride or default_stride(window), window - 1)
    return [made for index, document in enumerate(documents) for made in document.windows(index, window, step)]


def _cut(index: int, length: int, window: int, step: int) -> Iterator[Window]:
    """Cut one document. The last window is moved back so that it is full."""
    scored, stop = 1, min(window, length)
    while scored < length:
        yield Window(index, max(0, stop - window), stop, scored)
        scored, stop = stop, min(stop + step, length)
