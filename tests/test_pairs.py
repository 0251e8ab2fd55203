"""Pairs of token ids, encoded by the rules of a tokenizer."""

from __future__ import annotations

import pytest
from headfold.checkpoint.load import load_tokenizer
from headfold.errors import UsageError
from headfold.pairs import PairEncoder
from transformers import MBart50Tokenizer, MBartTokenizer


def test_long_sides_are_cut_before_their_end_tokens_with_one_warning(tiny_t5, capfd):
    encode = PairEncoder(load_tokenizer(tiny_t5), 4)
    pair = encode("alpha beta gamma delta epsilon", "beta")
    assert (len(pair.source), pair.source[-1], len(pair.target)) == (4, 1, 2)
    encode("alpha beta gamma delta epsilon", "beta")
    assert capfd.readouterr().err.count("are cut there") == 1


def test_a_cut_side_keeps_all_that_the_tokenizer_adds():
    """mBART's sources end with EOS and a language."""
    tokenizer = MBartTokenizer(src_lang="en_XX", tgt_lang="ro_RO")
    whole, cut = (PairEncoder(tokenizer, longest)("a b c d e f", "a b c d e f") for longest in (100, 5))
    english, romanian = tokenizer.convert_tokens_to_ids(["en_XX", "ro_RO"])
    assert len(whole.source) > 5
    assert (cut.source[-2:], cut.target[-2:]) == ([2, english], [2, romanian])
    assert (len(cut.source), len(cut.target)) == (5, 5)
    assert cut.source[:3] == whole.source[:3]
    with pytest.raises(UsageError, match="no room for text"):
        PairEncoder(tokenizer, 2)


@pytest.mark.parametrize("kind", [MBartTokenizer, MBart50Tokenizer])
def test_targets_of_no_language_are_refused(kind):
    with pytest.raises(UsageError, match="which one the targets are in"):
        PairEncoder(kind(src_lang="en_XX"), 16)


def test_languages_are_read_from_the_tokenizer_config(tmp_path):
    MBart50Tokenizer(src_lang="en_XX", tgt_lang="ro_RO").save_pretrained(tmp_path)
    tokenizer = MBart50Tokenizer.from_pretrained(tmp_path)
    pair = PairEncoder(tokenizer, 16)("a", "a")
    assert tokenizer.convert_ids_to_tokens([pair.source[0], pair.target[0]]) == ["en_XX", "ro_RO"]
