from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from eval_models import WORDS, random_documents, tiny_llama, word_tokenizer
from headfold.errors import CheckpointError, DataError, HeadfoldError, UsageError
from headfold.eval import runner
from headfold.eval.compare import compare
from headfold.eval.report.format import number
from headfold.eval.report.merge import read_and_merge
from headfold.eval.report.model_card import write_cards
from headfold.eval.report.verdict import refuse_loss
from headfold.eval.report.write import published
from headfold.eval.results import CapacityBatch, RecoveryPoint, ReportedEstimate, read_results
from headfold.eval.runner import Runner
from headfold.eval.scoring import paired
from headfold.eval.scoring.limits import choose_device, choose_dtype
from headfold.eval.scoring.paired import score_with_source
from headfold.eval.scoring.perplexity import score
from headfold.eval.scoring.score_loop import ScoreLoop
from headfold.eval.settings import EvalSettings
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

QUICK = {"contexts": [8], "decode_batches": [1], "new_tokens": 4, "repeats": 2, "needles": 0}


@pytest.fixture
def source(save) -> str:
    return save("source", tiny_llama(), word_tokenizer(template=True))


@pytest.fixture
def run(tmp_path, text_file):
    def compare_here(source: str, *others: str, **settings):
        call = {name: settings.pop(name) for name in ("overwrite", "command") if name in settings}
        values = {"data": text_file, "window": 32, "device": "cpu", **QUICK, **settings}
        if values["repeats"] == 0:  # what concerns timing is refused then
            for name in {"contexts", "decode_batches", "new_tokens"} - settings.keys():
                del values[name]
        wanted = EvalSettings(**values)
        return compare(source, list(others), out=tmp_path / "report", settings=wanted, **call)

    return compare_here


def test_an_identical_copy_differs_in_nothing(run, save, source):
    copy = save("copy", tiny_llama(), word_tokenizer(template=True))
    results = run(source, copy)
    pair = results.models[1].against_source
    assert pair.perplexity_ratio == ReportedEstimate(value=1.0, low=1.0, high=1.0)
    assert pair.kl_nats == ReportedEstimate(value=0.0, low=0.0, high=0.0)
    assert pair.same_top_token == ReportedEstimate(value=1.0, low=1.0, high=1.0)
    assert pair.cache_ratio == 1
    assert results.models[0].nll_nats == results.models[1].nll_nats


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_identical_models_agree_to_the_last_digit(batch_size):
    documents = random_documents([70, 3, 41])
    _, (found,) = score_with_source(tiny_llama(), [tiny_llama()], documents, ScoreLoop(16, batch_size=batch_size))
    assert found.source.total() == found.other.total()
    assert found.source.total() == score(tiny_llama(), documents, window=16, batch_size=batch_size).total()


def test_pair_numbers_follow_the_plain_formulas():
    source, other, documents = tiny_llama(), tiny_llama(seed=1), random_documents([20, 9])
    _, (found,) = score_with_source(source, [other], documents, ScoreLoop(64))
    for index, document in enumerate(documents):
        with torch.no_grad():
            ids = torch.tensor([document.ids])
            log_p, log_q = (model(ids).logits[0, :-1].double().log_softmax(-1) for model in (source, other))
        kl = (log_p.exp() * (log_p - log_q)).sum(-1)
        torch.testing.assert_close(torch.tensor(found.kl_N[index]), kl.float(), rtol=1e-4, atol=1e-5)
        assert found.same_top_N[index].tolist() == (log_p.argmax(-1) == log_q.argmax(-1)).tolist()
        reverse = (log_q.exp() * (log_q - log_p)).sum(-1)
        assert not torch.allclose(kl, reverse, rtol=1e-2)  # the control: the direction matters


def test_results_hold_what_was_measured(run, save, source, text_file):
    tokenizer = word_tokenizer(template=True)
    grouped = save("grouped", tiny_llama(kv_heads=1, seed=1), tokenizer)
    results = run(source, grouped, command="headfold eval source grouped")
    first, second = results.models
    pair = second.against_source
    assert results.schema_version == 3
    assert results.command == "headfold eval source grouped"
    assert [first.role, second.role] == ["source", "other"]
    assert [first.kv_heads, second.kv_heads] == [[4], [1]]
    assert pair.cache_ratio == 4
    words = [json.loads(line)["text"].split() for line in Path(text_file).read_text().splitlines()]
    made = results.protocol
    assert made.tokens == sum(map(len, words))  # BOS gives the first word a context, so each word is scored
    assert made.documents == 12
    assert made.uniform_perplexity == 32
    assert made.bos is True
    ratio = second.perplexity.value / first.perplexity.value
    assert pair.perplexity_ratio.value == pytest.approx(ratio, rel=1e-9)
    assert pair.perplexity_ratio.low < ratio < pair.perplexity_ratio.high
    assert sum(first.nll_nats) == pytest.approx(made.tokens * math.log(first.perplexity.value))
    assert sum(part.tokens for part in pair.by_context) == made.tokens
    weighted = sum(part.tokens * part.nats for part in pair.by_context)
    assert weighted == pytest.approx(sum(second.nll_nats))
    assert read_results(Path(grouped).parent / "report") == published(results)


def test_recovered_share_and_roles_from_the_records(run, save):
    """ln(ppl_c/ppl_u) / ln(ppl_c/ppl_s), from checkpoints that say what they are."""
    tokenizer = word_tokenizer(template=True)
    models = {"source": tiny_llama(), "converted": tiny_llama(kv_heads=2), "uptrained": tiny_llama(kv_heads=2)}
    with torch.no_grad():  # the smaller the head, the nearer to guessing, which random weights do not reach
        for scale, model in zip((0.1, 1.0, 0.5), models.values(), strict=True):
            model.lm_head.weight.mul_(scale)
    source, converted, uptrained = (Path(save(name, model, tokenizer)) for name, model in models.items())
    (converted / "headfold.json").write_text(json.dumps({"schema": 1, "history": [{"step": "convert"}]}))
    lines = [
        {"kind": "train", "step": 1},
        *({"kind": "eval", "tokens": n, "perplexity": 50.0 - n} for n in (20, 0, 10)),
    ]
    (uptrained / "headfold_metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "ev'
    )
    pretraining = {"kind": "eval", "tokens": 0, "perplexity": 9000.0}  # of the source itself: no recovery
    (source / "headfold_metrics.jsonl").write_text(json.dumps(pretraining) + "\n")
    results = run(str(source), str(converted), str(uptrained))
    s, c, u = (model.perplexity.value for model in results.models)
    assert [model.role for model in results.models] == ["source", "converted", "uptrained"]
    assert results.models[0].recovery == []
    assert results.models[2].recovery == [RecoveryPoint(tokens=n, perplexity=50.0 - n) for n in (0, 10, 20)]
    recovered = results.models[2].against_source.recovered
    assert results.models[1].against_source.recovered is None
    assert s < u < c
    assert recovered.value == pytest.approx(math.log(c / u) / math.log(c / s), rel=1e-9)
    assert recovered.low < recovered.value < recovered.high
    assert recovered.converted == "converted"


def merges_tokenizer(merges: list[tuple[str, str]]) -> PreTrainedTokenizerFast:
    letters = sorted({letter for word in WORDS for letter in word})
    pieces = ["<unk>", *letters, *("".join(pair) for pair in [("t", "h"), ("c", "a")])]
    backend = Tokenizer(models.BPE({piece: n for n, piece in enumerate(pieces)}, merges, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def test_tokenizers_that_differ_by_one_merge_are_refused(run, save, tmp_path):
    one = save("one", tiny_llama(), merges_tokenizer([("t", "h"), ("c", "a")]))
    other = save("other", tiny_llama(), merges_tokenizer([("t", "h")]))
    with pytest.raises(UsageError, match="tokenizers") as refused:
        run(one, other)
    assert "bits per byte" in refused.value.hint
    assert not (tmp_path / "report").exists()
    assert run(other).models[0].bits_per_byte.value > 0  # what the hint offers works


def test_a_padded_vocabulary_is_allowed_and_scores_equally(run, save, source):
    padded = tiny_llama()
    padded.resize_token_embeddings(40, mean_resizing=False)
    with torch.no_grad():
        padded.lm_head.weight[32:] = 5.0  # loud rows that would take probability from the real ones
    results = run(source, save("padded", padded, word_tokenizer(template=True)))
    pair = results.models[1].against_source
    assert results.protocol.vocab == 32
    assert pair.perplexity_ratio.value == pytest.approx(1, rel=1e-6)
    assert pair.kl_nats.value == pytest.approx(0, abs=1e-6)


def test_a_tokenizer_with_more_ids_than_the_model_is_an_error(run, save, text_file):
    Path(text_file).write_text(json.dumps({"text": "the cat x19"}) + "\n")
    broken = save("broken", tiny_llama(), word_tokenizer(extra=20))
    with pytest.raises(DataError, match="41"):
        run(broken)


def test_the_window_is_cut_to_the_length_the_model_was_made_for(run, source, capsys):
    assert run(source, window=None, overwrite=True).protocol.window == 64
    assert run(source, window=128, overwrite=True).protocol.window == 64
    assert "warning" in capsys.readouterr().err
    assert run(source, window=48, overwrite=True).protocol.window == 48


def test_learned_positions_refuse_a_longer_window(run, save):
    config = GPT2Config(vocab_size=32, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2)
    model = save("gpt2", GPT2LMHeadModel(config), word_tokenizer())
    with pytest.raises(UsageError, match="64"):
        run(model, window=128)
    assert run(model, window=None).protocol.window == 64


def test_a_tokenizer_without_special_tokens_is_compared(run, save):
    tokenizer = word_tokenizer(specials=False)
    results = run(save("plain", tiny_llama(), tokenizer), save("copy", tiny_llama(), tokenizer))
    assert results.protocol.bos is False
    assert results.models[1].against_source.perplexity_ratio.value == 1


def test_eager_and_sdpa_give_the_same_scores():
    model, documents = tiny_llama(kv_heads=2), random_documents([50, 23])
    model.set_attn_implementation("eager")
    eager = score(model, documents, window=32, batch_size=4).total()
    model.set_attn_implementation("sdpa")
    assert score(model, documents, window=32, batch_size=4).total().nll_nats == pytest.approx(eager.nll_nats, rel=1e-6)


def test_one_document_has_no_interval(run, source, text_file):
    Path(text_file).write_text(json.dumps({"text": "the cat sat on a mat " * 9}) + "\n")
    results = run(source)
    assert results.models[0].perplexity.low is None
    page = (Path(source).parent / "report" / "report.html").read_text()
    assert "No intervals: 1 document, effective number 1.0" in page


def test_a_missing_weight_is_an_error(run, source):
    file = Path(source) / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="up_proj"):
        run(source)


def test_truncated_weights_are_an_error(run, source, tmp_path):
    file = Path(source) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-500])
    with pytest.raises(CheckpointError):
        run(source)
    assert not (tmp_path / "report").exists()


def test_logits_that_are_not_finite_are_an_error(run, save):
    model = tiny_llama()
    with torch.no_grad():
        model.lm_head.weight[3] = math.nan
    with pytest.raises(CheckpointError, match="finite"):
        run(save("broken", model, word_tokenizer()))


def test_impossible_requests_are_refused(run, source, tmp_path, text_file):
    with pytest.raises(UsageError):
        run(str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match="twice"):
        run(source, source)
    for wrong in ({"device": "abacus"}, {"memory": "a lot"}, {"memory": "0GB"}):
        with pytest.raises(UsageError):
            run(source, **wrong)
    for impossible in ({"window": 1}, {"stride": 0}, {"batch": 0}, {"dtype": "int3"}, {"tokens": 0}, {"needless": 1}):
        with pytest.raises(ValidationError):
            run(source, **impossible)
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "mine.txt").write_text("x")
    with pytest.raises(UsageError, match="not empty"):
        run(source)
    assert (tmp_path / "report" / "mine.txt").exists()


def test_dtype_auto_follows_the_source_but_not_on_a_cpu():
    config = tiny_llama().bfloat16().config
    config.dtype = torch.bfloat16
    assert choose_dtype("auto", config, torch.device("cuda")) == torch.bfloat16
    assert choose_dtype("auto", config, torch.device("cpu")) == torch.float32
    assert choose_dtype("bfloat16", config, torch.device("cpu")) == torch.bfloat16
    assert choose_device("cpu") == torch.device("cpu")


def test_models_that_do_not_fit_together_are_measured_one_by_one(run, save, source, monkeypatch):
    """The source then runs beside each of them, and the numbers stay the same."""
    tokenizer = word_tokenizer(template=True)
    others = [save(name, tiny_llama(seed=seed), tokenizer) for seed, name in ((1, "one"), (2, "two"))]
    together = run(source, *others, repeats=1)
    monkeypatch.setattr(Runner, "_free_bytes", lambda self: 0)
    loaded, load = [], Runner._load
    monkeypatch.setattr(Runner, "_load", lambda self, model: loaded.append(model.name) or load(self, model))
    apart = run(source, *others, repeats=1, overwrite=True)
    assert loaded == ["source", "one", "two"]
    for one, other in zip(together.models, apart.models, strict=True):
        assert one.nll_nats == other.nll_nats
    for place in (1, 2):
        before, after = (found.models[place].against_source for found in (together, apart))
        assert before.kl_nats == after.kl_nats
        assert len(after.speedup) == 1


def test_a_stopped_comparison_continues(run, save, source, tmp_path, monkeypatch):
    other = save("other", tiny_llama(seed=1), word_tokenizer(template=True))
    expected = run(source, other, repeats=0)
    batches, compare_batch = [], paired._compare_batch
    monkeypatch.setattr(paired, "_compare_batch", lambda *args: batches.append(1) or compare_batch(*args))

    def die(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(runner, "measure_decoding", die)
        with pytest.raises(KeyboardInterrupt):
            run(source, other, repeats=0, overwrite=True)
    assert batches
    assert (tmp_path / "report.partial").is_dir()
    batches.clear()
    found = run(source, other, repeats=0, overwrite=True)
    assert batches == []  # nothing was scored twice
    assert found.models == expected.models
    assert not (tmp_path / "report.partial").exists()


def test_capacity_is_computed_in_the_dtype_of_the_weights(run, save):
    """Stored in half precision, measured in float32: what fits is twice what the measured cache would say."""
    half = save("half", tiny_llama().bfloat16(), word_tokenizer())
    (model,) = run(half, memory="1MB").models
    per_token = model.cache_bytes_per_token / 2
    free = 0.9 * 1e6 - model.weight_bytes
    assert model.capacity.tokens == int(free // per_token)
    assert model.capacity.batches == [
        CapacityBatch(context=context, batch=int(free // (context * per_token))) for context in (16, 64)
    ]


@pytest.mark.parametrize("odd", ["lm_head", "norm"])
def test_one_float32_tensor_leaves_the_sizes_for_memory_as_they_are(odd, run, save):
    """Weights count as they are stored, and the cache in the dtype of keys and values (B020)."""
    folder = Path(save("half", tiny_llama().bfloat16(), word_tokenizer()))
    tensors = load_file(folder / "model.safetensors")
    found = [name for name in tensors if odd in name]
    assert found
    tensors |= {name: tensors[name].float() for name in found}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (model,) = run(str(folder), memory="1MB", repeats=0).models
    assert model.weight_bytes == sum(tensor.nbytes for tensor in tensors.values())
    free = 0.9 * 1e6 - model.weight_bytes
    assert model.capacity.tokens == int(free // (model.cache_bytes_per_token / 2))


def test_cards_are_written_only_where_headfold_made_the_folder(run, save, source, capsys):
    tokenizer = word_tokenizer(template=True)
    made, strange = (save(name, tiny_llama(seed=1), tokenizer) for name in ("made", "strange"))
    (Path(made) / "headfold.json").write_text(json.dumps({"schema": 1, "history": [{"step": "convert"}]}))
    results = run(source, made, strange)
    assert write_cards(results) == [Path(made)]
    card = (Path(made) / "README.md").read_text()
    assert "## Evaluation" in card
    assert number(results.models[1].perplexity.value) in card
    assert not (Path(strange) / "README.md").exists()
    assert "strange was not made by headfold" in capsys.readouterr().err.replace("\n", " ")


def test_worst_tokens_are_those_that_lost_most(run, save, source):
    pair = run(source, save("other", tiny_llama(seed=1), word_tokenizer(template=True))).models[1].against_source
    lost = [token.lost_nats for token in pair.worst_tokens]
    assert len(lost) == 10
    assert lost == sorted(lost, reverse=True)
    for token in pair.worst_tokens:
        ratio = token.source_probability / token.probability
        assert math.log(ratio) == pytest.approx(token.lost_nats, rel=1e-5)
        assert token.token in WORDS
        assert token.before.split()[-1] in [*WORDS, "<s>"]


def test_a_model_with_infinite_perplexity_still_gets_a_report(run, save, source, tmp_path):
    broken = tiny_llama(seed=1)
    with torch.no_grad():
        broken.lm_head.weight.mul_(1e4)  # thousands of nats per token: a perplexity that no float holds
    pair = run(source, save("broken", broken, word_tokenizer(template=True))).models[1].against_source
    assert pair.perplexity_ratio.value is None
    assert pair.kl_nats.value > 1000
    assert "broken" in (tmp_path / "report" / "report.html").read_text()
    with pytest.raises(HeadfoldError, match="by inf%"):
        refuse_loss(read_and_merge([tmp_path / "report"]), 10.0, "bound")
