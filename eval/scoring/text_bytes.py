"""Count the UTF-8 bytes of text behind tokens, also where a token ends in the middle of a letter.

Offsets count characters. Byte-level tokenizers and byte fallback cut a letter such as 🙂 into several tokens, which
then all have the span of the whole letter.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

Span = tuple[int, int]
_FALLBACK = re.compile(r"<0x[0-9A-F]{2}>")


def scored_bytes(tokenizer: Any, text: str, ids: Sequence[int], offsets: Sequence[Span] | None, cut: bool) -> int:
    """Count the bytes behind ``ids[1:]``: the first token is context only.

    Args:
        ids: those of the text, or the first of them if ``cut``.
        offsets: (begin, end) in characters of all the text's tokens, ``ids`` first. Slow tokenizers have none, and
            their ids are decoded.
    """
    if offsets is None:
        return _decoded_bytes(tokenizer, ids)
    end = _bytes_before(tokenizer, text, ids, offsets, len(ids)) if cut else _size(text)
    return end - _bytes_before(tokenizer, text, ids, offsets, 1)


def _bytes_before(tokenizer: Any, text: str, ids: Sequence[int], offsets: Sequence[Span], token: int) -> int:
    """Count the bytes of text that stand before a token."""
    # special tokens have an empty span
    before = [place for place in range(token) if offsets[place][0] < offsets[place][1]]
    if not before:
        return 0
    end = offsets[before[-1]][1]
    after = next((span for span in offsets[token:] if span[0] < span[1]), None)
    if after is None or after[0] >= end:
        # the largest end, since spans of some normalisers are not in order
        return _size(text[: max(offsets[place][1] for place in before)])
    # The letters from ``begin`` on are shared by tokens on both sides.
    shared = [place for place in before if offsets[place][1] > after[0]]
    begin = min(offsets[shared[0]][0], after[0])
    inside = sum(_token_bytes(tokenizer, ids[place]) for place in shared)
    return _size(text[:begin]) + min(inside, _size(text[begin:end]))


def _token_bytes(tokenizer: Any, token_id: int) -> int:
    """Count the bytes that one token stands for, by its spelling in the vocabulary."""
    token = str(tokenizer.convert_ids_to_tokens(token_id))
    if _FALLBACK.fullmatch(token):
        return 1
    # the byte-level alphabet has one letter for each byte
    byte_level = "ByteLevel" in str(tokenizer.backend_tokenizer.decoder) if tokenizer.is_fast else False
    return len(token) if byte_level else _size(token.replace("▁", " "))


def _decoded_bytes(tokenizer: Any, ids: Sequence[int]) -> int:
    first: str = tokenizer.decode(ids[:1], skip_special_tokens=True)
    whole: str = tokenizer.decode(ids, skip_special_tokens=True)
    # decoding a part of a letter gives a replacement sign
    begin = _token_bytes(tokenizer, ids[0]) if "\ufffd" in first else _size(first)
    return _size(whole) - begin


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))
