from __future__ import annotations

import copy
import json
from dataclasses import asdict

import pytest
from headfold.corpus import Corpus, Document, Encoder, open_corpus
from headfold.errors import DataError, UsageError
from headfold.uptrain.data import packed
from headfold.uptrain.data.mixture import Mixture, MixturePosition, WeightedCorpus, open_mixture
from headfold.uptrain.data.objective import NextToken
from headfold.uptrain.data.packed import Position, SequenceStream, shuffled
from headfold.uptrain.estimate.budget import plan_budget
from headfold.uptrain.settings import UptrainSettings
from hypothesis import given
from hypothesis import strategies as st


class Numbers:
    """A tokenizer whose text is the ids themselves."""

    def __init__(self, eos=None, bos=None, add_bos=False):
        self.eos_token_id, self.bos_token_id, self._add_bos = eos, bos, add_bos

    def __call__(self, text, **_):
        ids = [int(word) for word in text.split()]
        return {"input_ids": [self.bos_token_id, *ids] if self._add_bos else ids}


def corpus_of(documents: list[list[int]]) -> Corpus:
    def read():
        for number, ids in enumerate(documents):
            yield Document(str(number), " ".join(map(str, ids)))

    return Corpus("numbers", "1", read)


def numbered(documents: int, length: int) -> Corpus:
    return corpus_of([[100 * (number + 1) + place for place in range(length)] for number in range(documents)])


def take(stream: SequenceStream, blocks: int) -> list[int]:
    return [token for _ in range(blocks) for token in next(stream).ids]


def test_packing_carries_the_remainder_and_loses_no_separator():
    """5 documents of 6 tokens and eos, block 16: 2 blocks, and 3 tokens that open the next pass."""
    stream = SequenceStream(numbered(5, 6), Encoder(Numbers(eos=0)), sequence_length=16, seed=0)
    tokens = take(stream, 2)
    next(stream)
    assert stream.position.epoch == 1
    assert len(stream.position.carry) == 3
    first_pass = [*tokens, *stream.position.carry]
    assert sorted(token for token in first_pass if token) == sorted(100 * n + p for n in range(1, 6) for p in range(6))
    assert first_pass.count(0) == 5


def test_too_little_text_for_one_sequence_is_an_error():
    with pytest.raises(DataError, match=r"35 tokens, fewer than one sequence of 1024"):
        next(SequenceStream(numbered(5, 7), Encoder(Numbers()), sequence_length=1024, seed=0))


def test_documents_stay_whole_and_in_one_piece_within_an_epoch():
    tokens = take(SequenceStream(numbered(8, 5), Encoder(Numbers(eos=0)), sequence_length=6, seed=1), 8)
    documents = [tokens[start : start + 6] for start in range(0, 48, 6)]
    assert sorted(document[0] // 100 for document in documents) == list(range(1, 9))
    assert all(document[5] == 0 and document[4] - document[0] == 4 for document in documents)


def test_epochs_are_shuffled_differently_and_by_the_seed():
    def order(seed: int) -> list[int]:
        return [
            token // 100
            for token in take(SequenceStream(numbered(20, 4), Encoder(Numbers()), sequence_length=4, seed=seed), 40)[
                ::4
            ]
        ]

    first, second = order(0)[:20], order(0)[20:]
    assert sorted(first) == sorted(second) == list(range(1, 21))
    assert first != second
    assert order(0) == order(0) != order(1)


@given(stop=st.integers(0, 40), sequence_length=st.integers(2, 23), chunk=st.sampled_from([1, 3, 1000]))
def test_a_saved_position_continues_without_gap_or_repeat(stop, sequence_length, chunk):
    corpus = numbered(10, 7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headfold.uptrain.data.packed._CHUNK_TOKENS", chunk * sequence_length)
        _continues_exactly(corpus, stop, sequence_length)


def _continues_exactly(corpus, stop, sequence_length):
    whole = SequenceStream(corpus, Encoder(Numbers(eos=0)), sequence_length=sequence_length, seed=5)
    expected = take(whole, 60)
    begun = SequenceStream(corpus, Encoder(Numbers(eos=0)), sequence_length=sequence_length, seed=5)
    before = take(begun, stop)
    saved = Position(**json.loads(json.dumps(asdict(begun.position))))
    after = take(
        SequenceStream(corpus, Encoder(Numbers(eos=0)), sequence_length=sequence_length, seed=5, position=saved),
        60 - stop,
    )
    assert before + after == expected


def test_a_saved_position_does_not_move_with_the_stream():
    stream = SequenceStream(numbered(10, 7), Encoder(Numbers()), sequence_length=8, seed=0)
    take(stream, 9)
    kept = stream.position
    saved = copy.deepcopy(kept)
    take(stream, 30)
    assert kept == saved != stream.position


def test_sequences_of_one_long_document_are_spread_over_a_chunk():
    """One document of 64 blocks among 64 of one block: in order it would fill 64 blocks in a row."""
    documents = [[7] * 256, *([number + 100] * 4 for number in range(64))]
    stream = SequenceStream(corpus_of(documents), Encoder(Numbers()), sequence_length=4, seed=0)
    long = [next(stream).ids[0] == 7 for _ in range(128)]
    assert sum(long) == 64
    assert 20 < sum(long[:64]) < 44  # in order it would be 0 or 64 to within one document


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_processes_share_a_step_without_overlap(processes):
    """The stream is one for all processes, so neither shards nor their number can be fewer than the processes."""
    parts = [WeightedCorpus(numbered(9, 7), 1.0)]
    encode = Encoder(Numbers(eos=0))
    plain, isolating = (NextToken(encode, sequence_length=8, seed=2, isolate=isolate) for isolate in (False, True))
    streams = [Mixture(parts, plain) for _ in range(processes)]
    reference = SequenceStream(numbered(9, 7), Encoder(Numbers(eos=0)), sequence_length=8, seed=2)
    for _ in range(5):
        shares = [stream.next_batch(4, rank=rank, processes=processes) for rank, stream in enumerate(streams)]
        found = sorted(tuple(row) for share in shares for row in share.ids_BT.tolist())
        step = [next(reference) for _ in range(4)]
        assert found == sorted(tuple(block.ids) for block in step)
        assert {share.targets for share in shares} == {4 * 7}
        inner = sum(place > 0 for block in step for place in block.openings)
        assert {isolating.batch(step, rank, processes).targets for rank in range(processes)} == {4 * 7 - inner}


@given(length=st.integers(1, 9), sequence_length=st.integers(2, 12))
def test_openings_mark_where_documents_begin(length, sequence_length):
    stream = SequenceStream(numbered(12, length), Encoder(Numbers(eos=0)), sequence_length=sequence_length, seed=0)
    taken = [next(stream) for _ in range(12 * (length + 1) // sequence_length)]
    for one in taken:
        assert one.openings == [place for place, token in enumerate(one.ids) if token and token % 100 == 0]


def test_a_mixture_holds_its_weights_in_every_stretch():
    threes, ones = numbered(30, 7), corpus_of([[7] * 7 for _ in range(30)])
    mixture = Mixture(
        [WeightedCorpus(threes, 3.0), WeightedCorpus(ones, 1.0)],
        NextToken(Encoder(Numbers()), sequence_length=7, seed=0),
    )
    sevens = [next(mixture).ids[0] == 7 for _ in range(400)]
    assert all(sum(sevens[start : start + 4]) == 1 for start in range(0, 400, 4))


@given(stop=st.integers(0, 40))
def test_a_mixture_continues_without_gap_or_repeat(stop):
    parts = [WeightedCorpus(numbered(10, 7), 2.5), WeightedCorpus(corpus_of([[7] * 5 for _ in range(4)]), 1.0)]
    whole = take(Mixture(parts, NextToken(Encoder(Numbers(eos=0)), sequence_length=6, seed=5)), 60)
    begun = Mixture(parts, NextToken(Encoder(Numbers(eos=0)), sequence_length=6, seed=5))
    before = take(begun, stop)
    saved = [MixturePosition.from_json(json.loads(json.dumps(asdict(one)))) for one in begun.positions()]
    after = take(
        Mixture(parts, NextToken(Encoder(Numbers(eos=0)), sequence_length=6, seed=5), positions=saved), 60 - stop
    )
    assert before + after == whole


def test_corpora_are_named_with_their_weights(tmp_path):
    one, two = tmp_path / "one.txt", tmp_path / "day=2.txt"
    for file in (one, two):
        file.write_text("some text")
    parts = open_mixture([f"{one}=3", str(two)])
    assert [(part.corpus.spec, part.weight) for part in parts] == [(str(one), 3.0), (str(two), 1.0)]
    for wrong, says in [([f"{one}=0"], "the weight 0"), ([str(one), f"{one}=2"], "named twice"), ([], "no corpus")]:
        with pytest.raises(UsageError, match=says):
            open_mixture(wrong)


def test_shuffling_through_a_small_buffer_keeps_every_document(monkeypatch):
    monkeypatch.setattr("headfold.uptrain.data.packed._SHUFFLE_BUFFER", 7)
    documents = [Document(str(number), "") for number in range(50)]
    order = [int(document.name) for document in shuffled(iter(documents), "seed")]
    assert sorted(order) == list(range(50))
    assert order != list(range(50))


class TestEncoder:
    def test_eos_closes_a_document_once(self):
        assert Encoder(Numbers(eos=9))("1 2") == [1, 2, 9]
        assert Encoder(Numbers(eos=9))("1 9") == [1, 9]

    def test_bos_of_the_tokenizer_is_kept_and_not_doubled(self):
        assert Encoder(Numbers(eos=9, bos=8, add_bos=True))("1 2") == [8, 1, 2, 9]

    def test_without_eos_bos_separates(self):
        assert Encoder(Numbers(bos=8))("1 2") == [8, 1, 2]
        assert Encoder(Numbers(bos=8, add_bos=True))("1 2") == [8, 1, 2]

    def test_without_either_documents_follow_each_other_with_a_warning(self, capfd):
        assert Encoder(Numbers())("1 2") == [1, 2]
        assert "neither eos nor bos" in capfd.readouterr().err

    def test_an_empty_document_adds_nothing(self):
        assert Encoder(Numbers(eos=9))("") == []


def test_the_standard_library_is_split_by_path():
    train = {document.name for document in open_corpus("stdlib#train")}
    heldout = {document.name for document in open_corpus("stdlib#heldout")}
    assert not train & heldout
    assert len(heldout) > 30
    assert 0.05 < len(heldout) / len(train | heldout) < 0.15
    assert not any("test" in name.split("/")[:-1] or "site-packages" in name for name in train | heldout)
    # the split depends on the path alone, so these hold on every Python
    assert {"argparse.py", "ast.py"} <= train | heldout


def test_a_stream_without_a_length_needs_a_budget_and_wraps():
    """Text that is read from a generator: nothing asks for its length, and when it ends it is read again."""

    def read():
        yield from (Document(str(number), f"{number} {number} {number}") for number in range(1, 6))

    stream = SequenceStream(
        Corpus("generator", "1", read, streamed=True), Encoder(Numbers(eos=0)), sequence_length=4, seed=0
    )
    tokens = take(stream, 12)
    assert stream.position.epoch == 2
    assert sorted(tokens[:20]) == sorted(tokens[20:40])
    with pytest.raises(UsageError, match="exactly one budget"):
        plan_budget(UptrainSettings())


def test_documents_of_any_length_reach_two_processes_once():
    documents = [[1000 * (number + 1) + place for place in range(1 + number * 7 % 13)] for number in range(24)]
    total = sum(map(len, documents))
    mixtures = [
        Mixture([WeightedCorpus(corpus_of(documents), 1.0)], NextToken(Encoder(Numbers()), sequence_length=2, seed=0))
        for _ in range(2)
    ]
    seen: list[int] = []
    for _ in range(total // 4):
        for rank, mixture in enumerate(mixtures):
            seen += mixture.next_batch(2, rank=rank, processes=2).ids_BT.flatten().tolist()
    assert len(seen) == len(set(seen))
    assert set(seen) <= {token for document in documents for token in document}
    assert total - len(seen) < 4


def _documents_of_pass(stream: SequenceStream, documents: int) -> list[int]:
    """The documents of one pass in their order, where each fills one sequence."""
    return [next(stream).ids[0] // 100 for _ in range(documents)]


def test_each_pass_over_the_text_has_another_order_of_documents(monkeypatch):
    """One sequence a chunk, so the shuffle within chunks changes nothing."""
    monkeypatch.setattr(packed, "_CHUNK_TOKENS", 1)
    stream = SequenceStream(numbered(12, 4), Encoder(Numbers()), sequence_length=4, seed=3)
    passes = [_documents_of_pass(stream, 12) for _ in range(3)]
    assert all(sorted(one) == list(range(1, 13)) for one in passes)
    assert len({tuple(one) for one in passes}) == 3


def test_each_chunk_has_another_order_of_sequences(monkeypatch):
    """Documents come in one order here, so only the shuffle within chunks is seen."""
    monkeypatch.setattr(packed, "_CHUNK_TOKENS", 32)
    monkeypatch.setattr(packed, "shuffled", lambda documents, seed: documents)
    stream = SequenceStream(numbered(24, 4), Encoder(Numbers()), sequence_length=4, seed=3)
    chunks = [[number - 8 * chunk for number in _documents_of_pass(stream, 8)] for chunk in range(3)]
    assert all(sorted(one) == list(range(1, 9)) for one in chunks)
    assert len({tuple(one) for one in chunks}) == 3
