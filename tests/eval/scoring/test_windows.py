from __future__ import annotations

import pytest
from eval_models import word_tokenizer
from headfold.corpus import Document
from headfold.errors import DataError, UsageError
from headfold.eval.scoring.windows import TokenDocument, make_windows, tokenize_text
from hypothesis import given, settings
from hypothesis import strategies as st


@settings(max_examples=300, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 60), min_size=1, max_size=5),
    window=st.integers(2, 40),
    stride=st.one_of(st.none(), st.integers(1, 60)),
    bos=st.booleans(),
)
def test_every_token_but_the_first_is_scored_once(lengths, window, stride, bos):
    documents = [TokenDocument(str(n), list(range(length)), 0, bos) for n, length in enumerate(lengths)]
    scored = []
    for made in make_windows(documents, window, stride):
        ids = made.ids(documents)
        assert 2 <= len(ids) <= window
        assert made.stop <= lengths[made.document]
        for position in range(made.first_scored, made.stop):
            assert position > made.start  # there is a token of context
            assert ids[position - made.start] == position  # ids are positions here, so the slot holds its own token
            scored.append((made.document, position))
    assert sorted(scored) == [(n, position) for n, length in enumerate(lengths) for position in range(1, length)]
    assert len(set(scored)) == len(scored)


def test_half_a_window_of_context_by_default():
    documents = [TokenDocument("a", list(range(100)), 0)]
    contexts = [made.first_scored - made.start for made in make_windows(documents, 20)[1:]]
    assert contexts
    assert min(contexts) == 10


@pytest.mark.parametrize(("window", "stride"), [(1, None), (0, None), (8, 0), (8, -1)])
def test_impossible_windows_are_refused(window, stride):
    with pytest.raises(UsageError):
        make_windows([TokenDocument("a", [1, 2, 3], 0)], window, stride)


def test_bos_follows_the_tokenizers_own_policy():
    text = [Document("a", "the cat sat"), Document("b", "a mat")]
    with_template = tokenize_text(word_tokenizer(template=True), text, max_tokens=None)
    without = tokenize_text(word_tokenizer(), text, max_tokens=None)
    assert with_template.bos
    assert [document.ids[0] for document in with_template.documents] == [1, 1]
    assert not without.bos
    assert [document.ids[1:] for document in with_template.documents] == [
        document.ids for document in without.documents
    ]
    forced = tokenize_text(word_tokenizer(), text, max_tokens=None, bos=True)
    assert forced.ids_sha256 == with_template.ids_sha256
    assert (
        tokenize_text(word_tokenizer(template=True), text, max_tokens=None, bos=False).ids_sha256 == without.ids_sha256
    )


def test_there_are_never_two_bos_tokens():
    (document,) = tokenize_text(
        word_tokenizer(template=True), [Document("a", "<s> <s> the cat")], max_tokens=None
    ).documents
    assert document.ids.count(1) == 1
    assert document.ids[0] == 1 != document.ids[1]
    (forced,) = tokenize_text(
        word_tokenizer(template=True), [Document("a", "the cat")], max_tokens=None, bos=True
    ).documents
    assert forced.ids.count(1) == 1


def test_every_window_starts_with_bos_and_scores_the_same_tokens():
    words = " ".join(["the", "cat", "sat", "on"] * 8)
    (document,) = tokenize_text(word_tokenizer(template=True), [Document("a", words)], max_tokens=None).documents
    windows = make_windows([document], 16, 8)
    assert len(windows) >= 3
    assert all(made.ids([document])[0] == 1 for made in windows)
    assert all(made.ids([document]).count(1) == 1 for made in windows)
    assert sum(made.stop - made.first_scored for made in windows) == document.scored == 32


def test_bos_is_refused_where_the_tokenizer_has_none():
    with pytest.raises(UsageError, match="BOS"):
        tokenize_text(word_tokenizer(specials=False), [Document("a", "the cat")], max_tokens=None, bos=True)


def test_a_tokenizer_without_special_tokens_stays_as_it_is():
    tokenizer = word_tokenizer(specials=False)
    size = len(tokenizer)
    (document,) = tokenize_text(tokenizer, [Document("a", "the cat sat on")], max_tokens=None).documents
    assert len(document.ids) == 4
    assert not document.bos
    assert len(tokenizer) == size


def test_empty_documents_are_counted_and_skipped():
    text = [Document("a", ""), Document("b", "  \n"), Document("c", "cat"), Document("d", "the cat sat")]
    found = tokenize_text(word_tokenizer(), text, max_tokens=None)
    assert [document.name for document in found.documents] == ["d"]
    assert found.skipped == 3
    with pytest.raises(DataError):
        tokenize_text(word_tokenizer(), text[:3], max_tokens=None)


def test_max_tokens_counts_scored_tokens_and_cuts_the_last_document():
    text = [Document(str(n), "the cat sat on a mat") for n in range(4)]
    found = tokenize_text(word_tokenizer(), text, max_tokens=12)
    assert [document.scored for document in found.documents] == [5, 5, 2]
    assert found.truncated
    assert found.scored == 12
    assert not tokenize_text(word_tokenizer(), text, max_tokens=10).truncated


def test_bytes_are_those_of_the_scored_tokens():
    text = [Document("a", "the cat sat")]
    (plain,) = tokenize_text(word_tokenizer(), text, max_tokens=None).documents
    (with_bos,) = tokenize_text(word_tokenizer(template=True), text, max_tokens=None).documents
    (cut,) = tokenize_text(word_tokenizer(), text, max_tokens=1).documents
    assert plain.utf8_bytes == len(" cat sat")  # the first token is context only
    assert with_bos.utf8_bytes == len("the cat sat")
    assert cut.utf8_bytes == len(" cat")
    (wide,) = tokenize_text(word_tokenizer(), [Document("a", "the ä€𝄞")], max_tokens=None).documents
    assert wide.utf8_bytes == 1 + 2 + 3 + 4
