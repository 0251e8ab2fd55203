"""Compare encoder-decoders: target loss on the same spans, both caches, decoding, and measures left out."""

from __future__ import annotations

import json
import math

import pytest
import torch
from headfold.checkpoint.load import load_language_model, load_tokenizer
from headfold.corpus import Document, open_corpus
from headfold.errors import UnsupportedError, UsageError
from headfold.eval.compare import compare
from headfold.eval.measures.kv_cache import (
    cache_formula,
    measure_cache,
    measure_cross_cache,
    measure_decoding,
)
from headfold.eval.report.write import print_report, rebuild_report
from headfold.eval.results import DecodeSettings, TargetProtocol, read_results
from headfold.eval.scoring.perplexity import score
from headfold.eval.scoring.targets import TargetDocument, TargetSettings, target_text
from headfold.eval.settings import EvalSettings
from headfold.pairs import Pair, padded

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]
QUICK = {"window": 32, "device": "cpu", "contexts": [8], "decode_batches": [2], "new_tokens": 3, "repeats": 1}


@pytest.fixture(scope="module")
def words_file(tmp_path_factory) -> str:
    """80 documents of one to two blocks, of words that the tiny tokenizer has."""
    file = tmp_path_factory.mktemp("text") / "words.jsonl"
    texts = [[WORDS[(start * step) % 8] for step in range(1, 12 + start % 40)] for start in range(80)]
    file.write_text("".join(json.dumps({"text": " ".join(words)}) + "\n" for words in texts))
    return str(file)


def documents_of(folder, words_file, tokens=300):
    corpus = open_corpus(str(words_file))
    return target_text(load_tokenizer(folder), corpus, TargetSettings(32), max_tokens=tokens)


def test_nats_equal_the_loss_of_transformers_for_each_pair(tiny_t5, words_file):
    model = load_language_model(tiny_t5)
    text = documents_of(tiny_t5, words_file)
    scores = score(model, text.documents, batch_size=3)
    for document, nll_N in zip(text.documents, scores.nll_N, strict=True):
        found = list(nll_N)
        for pair in document.pairs:
            ids_BS, _, labels_BT = padded([pair], 0)
            with torch.no_grad():
                own = float(model(input_ids=ids_BS, labels=labels_BT).loss)
            mine, found = found[: len(pair.target)], found[len(pair.target) :]
            assert sum(mine) / len(mine) == pytest.approx(own, rel=1e-5)
        assert not found
    assert scores.total().tokens == text.scored >= 300


def test_batches_and_their_padding_change_nothing_but_a_wrong_target_does(tiny_t5):
    model = load_language_model(tiny_t5)
    pairs = [Pair(list(range(3, 3 + length)), list(range(4, 4 + length // 2 + 1))) for length in (3, 8, 5)]
    documents = [TargetDocument("a", pairs[:2]), TargetDocument("b", pairs[2:])]
    totals = [score(model, documents, batch_size=size).total().nll_nats for size in (1, 2, 3)]
    assert totals == pytest.approx([totals[0]] * 3, rel=1e-6)
    wrong = [TargetDocument("a", [Pair(one.source, one.target[::-1]) for one in pairs])]
    assert abs(score(model, wrong).total().nll_nats - totals[0]) > 1e-3


def test_spans_are_equal_for_every_run_and_differ_by_document(tiny_t5, words_file):
    one, other = (documents_of(tiny_t5, words_file) for _ in range(2))
    assert one.ids_sha256 == other.ids_sha256
    wider = target_text(
        load_tokenizer(tiny_t5), open_corpus(words_file), TargetSettings(32, mean_span=1.0), max_tokens=300
    )
    assert wider.ids_sha256 != one.ids_sha256
    sources = [tuple(pair.source) for document in one.documents for pair in document.pairs]
    # equal text under another name has other spans
    same = [Document(name, "alpha beta gamma delta epsilon zeta eta theta " * 8) for name in ("a", "b")]
    spans = target_text(load_tokenizer(tiny_t5), same, TargetSettings(32), max_tokens=None).documents
    assert [pair.source for pair in spans[0].pairs] != [pair.source for pair in spans[1].pairs]
    assert len(sources) > 3


@pytest.fixture(scope="module")
def compared(tiny_t5, words_file, tmp_path_factory):
    """A T5 beside one with other weights, with settings that encoder-decoders have no use for."""
    folder = tmp_path_factory.mktemp("compared")
    model = load_language_model(tiny_t5)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "EncDecAttention.k" in name or "EncDecAttention.v" in name:
                weight += 0.3 * torch.randn_like(weight)
    model.save_pretrained(folder / "other")
    load_tokenizer(tiny_t5).save_pretrained(folder / "other")
    settings = EvalSettings(data=str(words_file), tokens=300, memory="1GB", tasks=["hellaswag"], needles=4, **QUICK)
    compare(str(tiny_t5), [str(folder / "other")], out=folder / "report", settings=settings)
    return folder


def test_the_report_is_per_target_token_and_says_what_is_left_out(compared, capfd):
    results = read_results(compared / "report")
    source, other = results.models
    assert results.protocol.targets == TargetProtocol(
        kind="spans", longest=32, noise_density=0.15, mean_span=3.0, seed=0
    )
    pair = other.against_source
    assert pair.kl_nats.value > 1e-5
    assert 0 < pair.same_top_token.value <= 1
    assert pair.perplexity_ratio.low < pair.perplexity_ratio.high
    assert (source.needle, source.tasks, source.capacity, pair.by_context) == ([], [], None, [])
    assert source.bits_per_byte.value is None
    assert source.decode[0].context == 8
    page = (compared / "report" / "report.md").read_text()
    nats = math.log(source.perplexity.value)
    assert f"| Target loss (nats per target token) | {nats:.3f} " in page
    assert "perplexity per target token" in page
    assert "Cross-attention cache per read token" in page
    assert "retrieval from long context" in page
    assert "stride" not in page
    print_report(results)
    assert "Target loss" in capfd.readouterr().out


def test_the_report_of_an_encoder_decoder_can_be_rebuilt(compared, tmp_path):
    results = read_results(compared / "report")
    rebuild_report(results, tmp_path / "again")
    assert (tmp_path / "again" / "report.html").read_bytes() == (compared / "report" / "report.html").read_bytes()


def test_an_encoder_decoder_is_compared_with_encoder_decoders_only(
    tiny_t5, tiny_checkpoint, words_file, pairs_file, tmp_path
):
    settings = EvalSettings(data=str(words_file), tokens=50, **QUICK)
    with pytest.raises(UsageError, match="encoder-decoder and the other is not"):
        compare(str(tiny_t5), [str(tiny_checkpoint)], out=tmp_path / "report", settings=settings)
    with_columns = EvalSettings(data=str(pairs_file), source_column="input", target_column="answer.back", **QUICK)
    with pytest.raises(UsageError, match="no encoder"):
        compare(str(tiny_checkpoint), [], out=tmp_path / "report", settings=with_columns)
    with pytest.raises(UsageError, match="would change nothing"):
        compare(str(tiny_t5), [], out=tmp_path / "report", settings=with_columns.model_copy(update={"mean_span": 2.0}))
    assert not list(tmp_path.iterdir())


def test_a_column_of_plain_text_is_refused(tiny_t5, tmp_path):
    plain = tmp_path / "plain.txt"
    plain.write_text("alpha beta gamma delta " * 10)
    with pytest.raises(UsageError, match="no columns"):
        compare(
            str(tiny_t5), [], out=tmp_path / "report", settings=EvalSettings(data=str(plain), source_column="input")
        )


def test_other_tokenizers_are_refused(tiny_t5, word_tokenizer, words_file, tmp_path):
    """The spans would differ."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    load_language_model(tiny_t5).save_pretrained(tmp_path / "other")
    content = json.loads(word_tokenizer.backend_tokenizer.to_str())
    vocabulary = content["model"]["vocab"]
    vocabulary["alpha"], vocabulary["beta"] = vocabulary["beta"], vocabulary["alpha"]
    swapped = Tokenizer.from_str(json.dumps(content))
    PreTrainedTokenizerFast(tokenizer_object=swapped, eos_token="</s>", pad_token="<pad>").save_pretrained(
        tmp_path / "other"
    )
    settings = EvalSettings(data=str(words_file), tokens=50, **QUICK)
    with pytest.raises(UsageError, match="tokenizers of t5 and other differ"):
        compare(str(tiny_t5), [str(tmp_path / "other")], out=tmp_path / "report", settings=settings)


def test_pairs_from_columns_are_scored(tiny_t5, pairs_file, tmp_path):
    settings = EvalSettings(
        data=str(pairs_file),
        source_column="input",
        target_column="answer.back",
        tokens=None,
        window=32,
        device="cpu",
        repeats=0,
    )
    results = compare(str(tiny_t5), [], out=tmp_path / "report", settings=settings)
    words = sum(document.tokens for document in results.documents)
    assert len(results.documents) == 60
    assert words == sum(3 + start % 7 + 1 for start in range(60))  # each word and EOS
    assert "column answer.back, written from column input" in (tmp_path / "report" / "report.md").read_text()


def test_a_tokenizer_without_sentinels_needs_pairs(tiny_t5, words_file, tmp_path):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer(models.WordLevel({"</s>": 0, "<unk>": 1}, unk_token="<unk>"))
    load_language_model(tiny_t5).save_pretrained(tmp_path / "plain")
    PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="</s>", unk_token="<unk>").save_pretrained(
        tmp_path / "plain"
    )
    settings = EvalSettings(data=str(words_file), **QUICK)
    with pytest.raises(UnsupportedError, match="no sentinels"):
        compare(str(tmp_path / "plain"), [], out=tmp_path / "report", settings=settings)


def test_both_caches_are_measured_and_agree_with_the_config(tiny_t5):
    """Two layers of keys and values, 4 heads of width 8 in float32."""
    model = load_language_model(tiny_t5)
    expected = 2 * 2 * 4 * 8 * 4
    assert measure_cache(model).bytes_per_token == measure_cross_cache(model).bytes_per_token == expected
    assert cache_formula(model.config, 4) == expected
    assert measure_cache(model).kv_heads == [4, 4]


def test_decoding_is_timed_with_the_cache(tiny_t5, monkeypatch):
    """The encoder reads once, and each step feeds one token."""
    model = load_language_model(tiny_t5)
    fed, read = [], []
    model.decoder.register_forward_pre_hook(
        lambda _, args, kwargs: fed.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    model.encoder.register_forward_pre_hook(
        lambda _, args, kwargs: read.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    times = measure_decoding([model], DecodeSettings((6,), (2,), 4, 1))[0][0]
    assert fed == [1] * 10  # two runs of one and four
    assert read == [6, 6]
    assert len(times.decode_seconds) == 1


def test_timed_steps_equal_generate(tiny_t5):
    from headfold.eval.measures.kv_cache import _forward, _prompt

    model = load_language_model(tiny_t5)
    ids_BT = torch.tensor([[4, 5, 6, 7, 3]])
    with torch.no_grad():
        expected = model.generate(ids_BT, max_new_tokens=5, min_new_tokens=5, do_sample=False, num_beams=1)
        inputs, written = _prompt(model, ids_BT)
        cache, found = None, [written]
        for _ in range(5):
            logits, cache = _forward(model, found[-1], cache, inputs)
            found.append(logits.argmax(-1, keepdim=True))
    assert torch.cat(found, dim=1)[:, :4].tolist() == expected[:, :4].tolist()


@pytest.mark.parametrize(("dtype", "warned"), [("float16", True), ("bfloat16", False)])
def test_float16_is_warned_of(dtype, warned, tiny_t5, capfd):
    from headfold.eval.models import open_models
    from headfold.eval.protocol import fit_protocol

    fit_protocol(EvalSettings(dtype=dtype), open_models(str(tiny_t5), [], False), torch.device("cpu"))
    assert ("overflow float16" in capfd.readouterr().err.replace("\n", " ")) is warned


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"tasks": ["piqa"], "stride": 8, "bos": False}, "encoder-decoders: --stride, --bos, --tasks."),
        ({"needles": 3, "memory": "1GB"}, "encoder-decoders: --memory, --needles."),
        ({"needles": 0}, None),
    ],
)
def test_options_without_effect_on_encoder_decoders_are_named(given, named, tiny_t5, capfd):
    from headfold.eval.models import open_models
    from headfold.eval.protocol import fit_protocol

    fit_protocol(EvalSettings(**given), open_models(str(tiny_t5), [], False), torch.device("cpu"))
    said = " ".join(capfd.readouterr().err.split())
    assert (named in said) if named else ("Not used" not in said)


@pytest.mark.parametrize("model_type", ["bart", "m2m_100"])
def test_converted_models_score_their_own_loss_and_both_caches_shrink(model_type, tmp_path):
    from headfold import convert_checkpoint
    from tiny import tiny_pair

    tiny_pair(model_type).save_pretrained(tmp_path / "source")
    model = load_language_model(convert_checkpoint(tmp_path / "source", tmp_path / "few", groups=2)).eval()
    pairs = [Pair(list(range(5, 5 + length)), list(range(40, 41 + length // 2))) for length in (9, 4, 7)]
    nats = score(model, [TargetDocument("a", pairs)], batch_size=2).total().nll_nats
    own = 0.0
    for pair in pairs:
        ids_BS, _, labels_BT = padded([pair], 0)
        with torch.no_grad():
            own += float(model(input_ids=ids_BS, labels=labels_BT).loss) * len(pair.target)
    assert nats == pytest.approx(own, rel=1e-5)
    sizes = [measure_cache(model), measure_cross_cache(model)]
    assert [size.kv_heads for size in sizes] == [[2, 2], [2, 2]]
    assert {size.bytes_per_token for size in sizes} == {cache_formula(model.config, 4)} == {512.0}
