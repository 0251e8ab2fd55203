from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from eval_models import random_documents, tiny_llama
from headfold.eval.measures.retrieval import (
    ANSWER,
    CUE,
    NEEDLE,
    default_lengths,
    drop_long_texts,
    hide_passages,
    mean_gains,
    score_retrieval,
)
from headfold.eval.results import NeedleSettings
from headfold.eval.scoring.windows import TokenDocument
from torch import nn


class Copier(nn.Module):
    """Predicts the token that followed the last earlier copy of the last four tokens, or guesses without one."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, 2)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embed

    def forward(self, input_ids, use_cache=False, attention_mask=None):
        vocab = self.embed.num_embeddings
        logits_BTV = torch.zeros(*input_ids.shape, vocab)
        for row, ids in enumerate(input_ids.tolist()):
            for place in range(4, len(ids)):
                for earlier in range(place - 1, 2, -1):
                    if ids[earlier - 3 : earlier + 1] == ids[place - 3 : place + 1]:
                        logits_BTV[row, place, ids[earlier + 1]] = 20.0
                        break
        return SimpleNamespace(logits=logits_BTV)


def text(tokens: int, vocab: int = 500) -> list[TokenDocument]:
    return random_documents([tokens // 2, tokens - tokens // 2], vocab=vocab)


def test_a_model_that_copies_finds_everything_and_one_that_cannot_finds_nothing():
    settings = NeedleSettings(passages=2, lengths=(128, 160), depths=(0.0, 0.5, 1.0))
    hidden = hide_passages(text(2000), settings)
    found = score_retrieval(Copier(500), hidden, batch_size=3)
    assert [one.length for one in found] == [128, 160]
    for one in found:
        assert torch.tensor(one.found_share).shape == (2, 3)
        assert torch.allclose(torch.tensor(one.found_share), torch.ones(2, 3))
        assert mean_gains(one) == pytest.approx(6.2146, abs=1e-3)  # ln 500 without the needle, next to nothing with it
    random = score_retrieval(tiny_llama(vocab=500, positions=256), hidden)
    assert max(abs(mean_gains(one)).max() for one in random) < 1


def test_every_sequence_has_its_length_and_the_needle_at_its_depth():
    settings = NeedleSettings(passages=3, lengths=(128,), depths=(0.0, 0.5, 1.0))
    documents = text(2000)
    for one in hide_passages(documents, settings):
        *with_needle, without = one.sequences
        assert {len(ids) for ids in one.sequences} == {128}
        needle = without[-NEEDLE:]
        places = [next(n for n in range(128) if ids[n : n + NEEDLE] == needle) for ids in with_needle]
        assert places == [0, 32, 64]
        assert all(ids[-NEEDLE:] == needle for ids in with_needle)
        assert all(without[n : n + NEEDLE] != needle for n in range(128 - NEEDLE))  # nowhere but at the end
    assert [one.sequences for one in hide_passages(documents, settings)] == [
        one.sequences for one in hide_passages(documents, settings)
    ]
    assert CUE + ANSWER == NEEDLE


@pytest.mark.parametrize(("passages", "documents"), [(4, 4), (6, 6), (13, 6)])
def test_passages_come_from_different_documents_while_there_are_any(passages, documents):
    text = random_documents([900, 40, 300, 20, 2500, 33, 500], vocab=500)  # the fourth is shorter than a passage
    hidden = hide_passages(text, NeedleSettings(passages=passages, lengths=(128,)))
    assert len({one.document for one in hidden}) == documents
    for one in hidden:
        needle = one.sequences[-1][-NEEDLE:]
        ids = text[one.document].ids
        assert any(ids[place : place + NEEDLE] == needle for place in range(1, len(ids)))


def test_documents_shorter_than_a_passage_still_give_passages():
    hidden = hide_passages(random_documents([12] * 60, vocab=500), NeedleSettings(passages=8, lengths=(128,)))
    assert len({one.document for one in hidden}) == 8
    assert {len(ids) for one in hidden for ids in one.sequences} == {128}


def test_bos_stands_first_where_documents_have_it():
    (document,) = random_documents([600], vocab=400)
    with_bos = [TokenDocument("a", [399, *document.ids], 1, bos=True)]
    for one in hide_passages(with_bos, NeedleSettings(passages=1, lengths=(128,))):
        assert all(ids[0] == 399 and len(ids) == 128 for ids in one.sequences)


def test_impossible_lengths_are_left_out_with_a_warning(capsys):
    assert hide_passages(text(200), NeedleSettings(passages=1, lengths=(128,))) == []
    assert "128 tokens" in capsys.readouterr().err
    assert drop_long_texts(NeedleSettings(lengths=(128, 512)), 256).lengths == (128,)
    assert "256 at most" in capsys.readouterr().err
    assert default_lengths(512) == (128, 512)
    assert default_lengths(64) == ()
    assert default_lengths(None) == default_lengths(10**6) == (512, 2048)
