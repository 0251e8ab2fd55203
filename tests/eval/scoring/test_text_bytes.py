"""Bytes behind scored tokens, where tokens end in the middle of a letter."""

from __future__ import annotations

import math
from typing import Any

import pytest
from headfold.corpus import Document
from headfold.eval.scoring.windows import tokenize_text
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def byte_level(*merges: tuple[str, str]) -> Any:
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    made = Tokenizer(models.BPE(vocabulary, list(merges)))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def byte_fallback() -> Any:
    """As SentencePiece's: letters without a token of their own are written as bytes."""
    pieces = [("<unk>", 0.0), ("▁", -1.0), *((letter, -2.0) for letter in "abcdefgh"), ("▁ab", -1.5)]
    pieces += [(f"<0x{byte:02X}>", -9.0) for byte in range(256)]
    made = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


def letters() -> Any:
    """One token a letter, and one for every letter that is unknown."""
    made = Tokenizer(
        models.WordLevel({"<unk>": 0, **{letter: n for n, letter in enumerate("abcdefgh 漢字🙂é", 1)}}, "<unk>")
    )
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


def scored(tokenizer: Any, text: str, max_tokens: int | None = None) -> int:
    (document,) = tokenize_text(tokenizer, [Document("d", text)], max_tokens=max_tokens).documents
    return document.utf8_bytes


@pytest.mark.parametrize(
    ("tokenizer", "text", "expected"),
    [
        # the first of a letter's bytes is context only
        (byte_level(), "🙂", 3),
        (byte_level(), "漢字です", 11),
        (byte_level(), "abcdefgh", 7),
        (byte_level(("ð", "Ł")), "🙂", 2),
        (byte_level(("a", "Ã")), "aé", 1),
        (byte_fallback(), "🙂", 3),
        (byte_fallback(), "漢a", 3),
        (byte_fallback(), "ab 漢", 5),
        (letters(), "漢字a", 4),
        (letters(), "🙂a", 1),
    ],
)
def test_bytes_of_a_letter_are_shared_among_its_tokens(tokenizer, text, expected):
    """Row B035: a text of one 🙂 had no bytes, so bits per byte were infinite, or too large for short texts."""
    assert scored(tokenizer, text) == expected


@pytest.mark.parametrize(("tokens", "expected"), [(1, 1), (2, 2), (3, 3), (4, 4), (6, 6), (7, 7)])
def test_a_text_that_is_cut_within_a_letter_counts_the_bytes_before_the_cut(tokens, expected):
    assert scored(byte_level(), "🙂é字", tokens) == expected


@given(st.text(min_size=2, max_size=12), st.integers(1, 40))
@settings(max_examples=300, deadline=None)
def test_byte_level_counts_are_exact_for_any_text(text, cut):
    tokenizer = byte_level(("a", "b"), ("ð", "Ł"), ("Ġ", "a"), ("Ã", "©"), ("©", "Ã"))
    text = f"a{text}" if not text.strip() else text
    tokens = tokenizer.tokenize(text)
    if len(tokens) < 2:
        return
    # in the byte-level alphabet a letter is a byte
    assert scored(tokenizer, text) == sum(map(len, tokens[1:]))
    assert scored(tokenizer, text, cut) == sum(map(len, tokens[1 : cut + 1]))


def test_bits_per_byte_do_not_depend_on_the_letters_of_a_model_that_knows_nothing():
    """A uniform model of 256 byte tokens needs 8 bits for each byte, whatever the text."""
    for text in ("🙂", "漢字です", "abcdefgh"):
        (document,) = tokenize_text(byte_level(), [Document("d", text)], max_tokens=None).documents
        assert document.scored * math.log2(256) / document.utf8_bytes == 8
