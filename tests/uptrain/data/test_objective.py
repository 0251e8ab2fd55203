"""Training objectives of encoder-decoders: streams that can be saved, and batches that processes share."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from headfold.checkpoint.load import load_language_model, load_tokenizer
from headfold.corpus import Columns, open_corpus
from headfold.spans import SpanCorruption
from headfold.uptrain.data.mixture import Mixture, MixturePosition, WeightedCorpus
from headfold.uptrain.data.objective import Pairs, Spans


def test_sources_fill_the_sequence_and_continue_where_they_were(tiny_t5, text_file):
    tokenizer, model = load_tokenizer(tiny_t5), load_language_model(tiny_t5)
    objective = Spans(SpanCorruption.of(tokenizer), tokenizer, model, sequence_length=32, seed=7)
    parts = [WeightedCorpus(open_corpus(str(text_file)), 1.0)]
    whole = [next(stream) for stream in [Mixture(parts, objective)] for _ in range(40)]
    assert {len(pair.source) for pair in whole} == {32}
    assert len({tuple(pair.source) for pair in whole}) == 40
    begun = Mixture(parts, objective)
    first = [next(begun) for _ in range(13)]
    saved = [MixturePosition.from_json(asdict(one)) for one in begun.positions()]
    after = Mixture(parts, objective, saved)
    assert first + [next(after) for _ in range(27)] == whole
    again = Spans(SpanCorruption.of(tokenizer), tokenizer, model, sequence_length=32, seed=8)
    assert [next(stream) for stream in [Mixture(parts, again)] for _ in range(40)] != whole


def test_spans_do_not_depend_on_the_path_of_the_text(tiny_t5, text_file, tmp_path):
    """Nor are they the same in two corpora of a mixture."""
    tokenizer, model = load_tokenizer(tiny_t5), load_language_model(tiny_t5)
    objective = Spans(SpanCorruption.of(tokenizer), tokenizer, model, sequence_length=32, seed=7)
    moved, other = tmp_path / "moved.jsonl", tmp_path / "other.jsonl"
    moved.write_bytes(text_file.read_bytes())
    other.write_bytes(b"".join(reversed(text_file.read_bytes().splitlines(keepends=True))))
    here, there, reversed_ = (
        [next(stream) for stream in [objective.stream(open_corpus(str(file)), None)] for _ in range(20)]
        for file in (text_file, moved, other)
    )
    assert here == there

    def cuts(pairs):
        return [[place for place, token in enumerate(pair.source) if token > 10] for pair in pairs]

    assert cuts(here) != cuts(reversed_)


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_processes_share_the_pairs_of_a_step(processes, tiny_t5, pairs_file):
    tokenizer, model = load_tokenizer(tiny_t5), load_language_model(tiny_t5)
    parts = [WeightedCorpus(open_corpus(str(pairs_file), columns=Columns("input", "answer.back")), 1.0)]
    objective = Pairs(tokenizer, model, sequence_length=16, seed=1)
    shares = [Mixture(parts, objective).next_batch(4, rank=rank, processes=processes) for rank in range(processes)]
    alone = Mixture(parts, objective).next_batch(4, rank=0, processes=1)
    assert {share.targets for share in shares} == {alone.targets} == {int(alone.scored_BT.sum())}
    rows = [row[row >= 0].tolist() for share in shares for row in share.labels_BT]
    assert sorted(rows) == sorted(row[row >= 0].tolist() for row in alone.labels_BT)


def test_pairs_go_on_in_the_next_pass_without_gap_or_repeat(tiny_t5, pairs_file):
    tokenizer, model = load_tokenizer(tiny_t5), load_language_model(tiny_t5)
    parts = [WeightedCorpus(open_corpus(str(pairs_file), columns=Columns("input", "answer.back")), 1.0)]
    objective = Pairs(tokenizer, model, sequence_length=16, seed=1)
    whole = [next(stream) for stream in [Mixture(parts, objective)] for _ in range(150)]
    for stop in (0, 59, 60, 77):
        begun = Mixture(parts, objective)
        first = [next(begun) for _ in range(stop)]
        after = Mixture(parts, objective, begun.positions())
        assert first + [next(after) for _ in range(150 - stop)] == whole
    assert sorted(whole[:60]) == sorted(whole[60:120]) != whole[:60]
    assert whole[:60] != whole[60:120]
