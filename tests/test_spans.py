"""Span corruption: lengths as T5's, nothing lost, the same spans for the same draw."""

from __future__ import annotations

import random

import pytest
from headfold.errors import UnsupportedError, UsageError
from headfold.spans import SpanCorruption
from hypothesis import given, settings
from hypothesis import strategies as st

EOS, FIRST = 1, 32_099
T5 = SpanCorruption(tuple(range(FIRST, FIRST - 100, -1)), EOS)


def refilled(pair) -> list[int]:
    """The text, put together again from source and target."""
    assert pair.source[-1] == pair.target[-1] == EOS
    spans: dict[int, list[int]] = {}
    for token in pair.target[:-1]:
        if token in T5.sentinels:
            spans[token] = []
        else:
            spans[list(spans)[-1]].append(token)
    assert all(spans.values())
    text = []
    for token in pair.source[:-1]:
        text += spans.pop(token) if token in T5.sentinels else [token]
    assert not spans
    return text


def test_lengths_are_those_of_t5():
    """Raffel et al. 2020: 512 tokens of source come from 568 of text, and leave 114 of target (t5's own code)."""
    assert T5.tokens_for(512) == 568
    assert T5.lengths(568) == (512, 114)
    assert SpanCorruption(T5.sentinels, EOS, 0.5, 3.0).lengths(100) == (68, 68)


@settings(deadline=None, max_examples=60)
@given(
    sequence_length=st.integers(6, 400), seed=st.integers(0, 2**32), density=st.floats(0.05, 0.6), span=st.floats(1, 8)
)
def test_every_token_is_in_source_or_target_and_lengths_are_as_counted(sequence_length, seed, density, span):
    corrupt = SpanCorruption(T5.sentinels, EOS, density, span)
    try:
        tokens = corrupt.tokens_for(sequence_length)
    except UsageError:
        return
    ids = list(range(100, 100 + tokens))
    pair = corrupt(ids, random.Random(seed))
    assert refilled(pair) == ids
    assert (len(pair.source), len(pair.target)) == corrupt.lengths(tokens)
    assert len(pair.source) <= sequence_length
    used = [token for token in pair.target if token in T5.sentinels]
    assert used == list(T5.sentinels[: len(used)])  # from <extra_id_0> on, in order


def test_the_same_draw_cuts_the_same_spans_and_another_does_not():
    ids = list(range(100, 300))
    assert T5(ids, random.Random("a")) == T5(ids, random.Random("a"))
    assert T5(ids, random.Random("a")) != T5(ids, random.Random("b"))


def test_spans_have_the_mean_length_and_every_place_is_cut_now_and_then():
    ids, cut = list(range(100, 300)), set()
    for seed in range(200):
        pair = T5(ids, random.Random(seed))
        kept = {token for token in pair.source if 100 <= token < 300}
        cut |= set(ids) - kept
        assert (200 - len(kept), len(pair.source) - 1 - len(kept)) == (30, 10)
    assert cut == set(ids) - {100}  # the first token always stays, as in T5


def test_sentinels_are_found_in_both_spellings_and_their_order_is_by_number(word_tokenizer):
    vocabulary = word_tokenizer.get_vocab()
    found = SpanCorruption.of(word_tokenizer).sentinels
    assert found == tuple(vocabulary[f"<extra_id_{number}>"] for number in range(20))

    class Marked:
        eos_token_id = 1

        def get_vocab(self):
            return {f"\u2581<extra_id_{number}>": 500 - number for number in range(3)}

    assert SpanCorruption.of(Marked()).sentinels == (500, 499, 498)


def test_a_tokenizer_without_sentinels_is_refused_by_name():
    class Plain:
        eos_token_id = 1

        def get_vocab(self):
            return {"a": 0, "<mask>": 2}

    with pytest.raises(UnsupportedError, match="no sentinels") as refused:
        SpanCorruption.of(Plain())
    assert "--target-column" in refused.value.hint


@pytest.mark.parametrize(("sequence_length", "why"), [(2, "too small"), (4096, "227 spans")])
def test_sequences_that_cannot_be_corrupted_are_refused(sequence_length, why):
    with pytest.raises(UsageError, match=why):
        T5.tokens_for(sequence_length)


@pytest.mark.parametrize(("tokens", "why"), [(0, "too few"), (1, "too few"), (4096, "100 sentinels")])
def test_texts_that_cannot_be_corrupted_are_refused(tokens, why):
    with pytest.raises(UsageError, match=why):
        T5(list(range(tokens)), random.Random(0))
