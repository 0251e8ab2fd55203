"""Uptraining of encoder-decoders: the loss of transformers, span corruption and pairs, resume to the bit."""

from __future__ import annotations

import random

import pytest
import torch
from headfold.checkpoint.backbone import decoder_inputs
from headfold.checkpoint.load import load_language_model, load_tokenizer
from headfold.corpus import Columns, open_corpus
from headfold.errors import UsageError
from headfold.pairs import Pair, PairEncoder, padded
from headfold.spans import SpanCorruption
from headfold.uptrain.data.batches import PairBatch
from headfold.uptrain.data.mixture import Mixture, MixturePosition, WeightedCorpus
from headfold.uptrain.data.objective import Pairs, Spans
from headfold.uptrain.loss.chunked import LossInputs, attach_chunked_loss
from headfold.uptrain.loss.head import SplitModel
from headfold.uptrain.loss.token_losses import TrainingLoss
from headfold.uptrain.run import uptrain_checkpoint
from headfold.uptrain.training.optim import make_optimizer
from headfold.uptrain.training.step import Stepper
from runs import OneProcess, metrics, same, weights
from tiny import randomise, tiny_config
from transformers import AutoModelForSeq2SeqLM, MBart50Tokenizer, MBartTokenizer
from transformers.models.t5.modeling_t5 import T5LayerFF

TYPES = ["t5", "mt5", "bart", "mbart", "marian", "pegasus", "m2m_100"]


def tiny_pair_model(model_type: str, seed: int = 0):
    over = {"decoder_start_token_id": 0, "pad_token_id": 1, "dropout_rate": 0.0, "dropout": 0.0}
    config = tiny_config(model_type, **over, **({"decoder_vocab_size": 300} if model_type == "marian" else {}))
    model = AutoModelForSeq2SeqLM.from_config(config).eval()
    randomise(model, seed)
    return model


def some_pairs() -> list[Pair]:
    """Unequal lengths on both sides."""
    draw = random.Random(0)
    return [
        Pair(*([draw.randrange(5, 290) for _ in range(length)] for length in lengths))
        for lengths in ((9, 4), (5, 7), (12, 3), (6, 6))
    ]


def batch_of(model, pairs) -> PairBatch:
    ids_BS, mask_BS, labels_BT = padded(pairs, 1)
    targets = sum(len(pair.target) for pair in pairs)
    return PairBatch(ids_BS, mask_BS, decoder_inputs(model, labels_BT), labels_BT, targets)


@pytest.mark.parametrize("model_type", TYPES)
def test_the_loss_and_its_gradient_are_those_of_transformers(model_type):
    """Micro-batches of two, cut to their own lengths, against the class's own loss on the padded whole."""
    model = tiny_pair_model(model_type)
    batch = batch_of(model, some_pairs())
    own = model(input_ids=batch.ids_BS, attention_mask=batch.mask_BS, labels=batch.labels_BT).loss
    own.backward()
    expected = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    model.zero_grad()
    assert not attach_chunked_loss(model).whole
    total = 0.0
    for micro in batch.split(2):
        inputs = LossInputs(TrainingLoss(), micro.scored_BT, micro.targets_N)
        loss = model(loss_inputs=inputs, use_cache=False, **micro.inputs).loss / batch.targets
        loss.backward()
        total += float(loss.detach())
    assert total == pytest.approx(float(own.detach()), rel=1e-6)
    found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    assert found.keys() == expected.keys()
    for name, one in found.items():
        assert torch.allclose(one, expected[name], atol=2e-6 * max(1.0, float(expected[name].abs().max()))), name


def test_a_wrong_mask_or_shifted_labels_change_the_loss():
    """The controls for the equality above."""
    model = tiny_pair_model("t5")
    attach_chunked_loss(model)
    batch = batch_of(model, some_pairs())

    def loss(changed: PairBatch) -> float:
        inputs = LossInputs(TrainingLoss(), changed.scored_BT, changed.targets_N)
        return float(model(loss_inputs=inputs, use_cache=False, **changed.inputs).loss.detach()) / batch.targets

    parts = {name: getattr(batch, name) for name in ("ids_BS", "mask_BS", "decoder_ids_BT", "labels_BT")}
    right = loss(batch)
    unmasked = PairBatch(**{**parts, "mask_BS": torch.ones_like(batch.mask_BS)}, targets=batch.targets)
    shifted = PairBatch(**{**parts, "decoder_ids_BT": batch.labels_BT.clamp(min=0)}, targets=batch.targets)
    assert abs(loss(unmasked) - right) > 1e-3
    assert abs(loss(shifted) - right) > 1e-3


def test_the_scaled_head_of_a_tied_t5_is_in_the_chunks():
    tied, untied = tiny_pair_model("t5"), tiny_pair_model("t5")
    untied.config.scale_decoder_outputs = False
    states = torch.randn(4, tied.config.d_model)
    assert torch.allclose(
        SplitModel(tied).logits(states) * tied.config.d_model**0.5, SplitModel(untied).logits(states), atol=1e-4
    )


def test_gq065_pairs_one_by_one_are_one_big_batch(settings):
    """Normalised by the real target tokens of the whole step, however it is cut."""
    found = []
    for micro_batch in (1, 4):
        wanted = settings(batch=4, micro_batch=micro_batch, max_grad_norm=1e9)
        model = tiny_pair_model("bart")
        optimizer = make_optimizer(model, wanted)
        optimizer.zero_grad = lambda: None
        attach_chunked_loss(model)
        result = Stepper(OneProcess(), model, optimizer, wanted, lambda step: 0.0)(0, batch_of(model, some_pairs()))
        found.append((result.loss, [one.grad for one in model.parameters() if one.grad is not None]))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    assert all(torch.allclose(one, other, atol=2e-6) for one, other in zip(found[0][1], found[1][1], strict=True))


def test_sources_fill_the_block_and_go_on_where_they_were(tiny_t5, text_file):
    tokenizer, model = load_tokenizer(tiny_t5), load_language_model(tiny_t5)
    objective = Spans(SpanCorruption.of(tokenizer), tokenizer, model, sequence_length=32, seed=7)
    parts = [WeightedCorpus(open_corpus(str(text_file)), 1.0)]
    whole = [next(stream) for stream in [Mixture(parts, objective)] for _ in range(40)]
    assert {len(pair.source) for pair in whole} == {32}
    assert len({tuple(pair.source) for pair in whole}) == 40
    begun = Mixture(parts, objective)
    first = [next(begun) for _ in range(13)]
    saved = [MixturePosition.from_json(one.to_json()) for one in begun.positions()]
    after = Mixture(parts, objective, saved)
    assert first + [next(after) for _ in range(27)] == whole
    again = Spans(SpanCorruption.of(tokenizer), tokenizer, model, sequence_length=32, seed=8)
    assert [next(stream) for stream in [Mixture(parts, again)] for _ in range(40)] != whole


def test_spans_do_not_hang_on_where_the_text_lies(tiny_t5, text_file, tmp_path):
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


def test_only_a_padded_micro_batch_has_a_mask():
    batch = batch_of(tiny_pair_model("t5"), [Pair([5, 6, 7], [8]), Pair([5, 6, 7], [8, 9]), Pair([5], [6])])
    first, last = batch.split(2)
    assert "attention_mask" not in first.inputs
    assert "attention_mask" not in last.inputs
    assert ["attention_mask" in micro.inputs for micro in batch.split(3)] == [True]


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_gq079_processes_share_the_pairs_of_a_step(processes, tiny_t5, pairs_file):
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


def test_long_sides_are_cut_and_keep_their_end_and_that_is_said_once(tiny_t5, capfd):
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


def test_a_language_is_read_off_the_tokenizer_config(tmp_path):
    MBart50Tokenizer(src_lang="en_XX", tgt_lang="ro_RO").save_pretrained(tmp_path)
    tokenizer = MBart50Tokenizer.from_pretrained(tmp_path)
    pair = PairEncoder(tokenizer, 16)("a", "a")
    assert tokenizer.convert_ids_to_tokens([pair.source[0], pair.target[0]]) == ["en_XX", "ro_RO"]


@pytest.fixture(scope="module")
def spanned(tiny_t5, text_file, tmp_path_factory):
    """Settings of a run on corrupted spans, and what it made uninterrupted."""
    from headfold.uptrain.settings import UptrainSettings

    wanted = UptrainSettings(
        data=str(text_file), steps=8, sequence_length=32, batch=4, micro_batch=2, learning_rate=1e-2, precision="fp32",
        device="cpu", log_every=1, save_every=3, seed=3, tracker=("none",), eval_data=str(text_file), eval_tokens=200,
        teacher=None,
    )  # fmt: skip
    return wanted, uptrain_checkpoint(tiny_t5, tmp_path_factory.mktemp("run") / "out", wanted)


def test_a_t5_learns_by_span_corruption_and_resumes_to_the_bit(spanned, tiny_t5, tmp_path, cut_power):
    wanted, finished = spanned
    losses = [line["loss"] for line in metrics(finished, "train")]
    assert losses[-1] < losses[0] - 0.3
    held = [line["perplexity"] for line in metrics(finished, "eval")]
    assert held[-1] < held[0]
    cut_power(5, tiny_t5, tmp_path / "out", wanted)
    resumed = uptrain_checkpoint(tiny_t5, tmp_path / "out", wanted)
    assert same(weights(resumed), weights(finished))
    assert [line["loss"] for line in metrics(resumed, "train")] == losses
    for name in ("config.json", "tokenizer.json"):
        assert (finished / name).read_bytes() == (tiny_t5 / name).read_bytes()
    assert weights(finished).keys() == weights(tiny_t5).keys()
    assert AutoModelForSeq2SeqLM.from_pretrained(finished).dtype == torch.float32


def test_a_teacher_that_is_the_student_has_nothing_to_teach_and_another_has(spanned, tiny_t5, tmp_path):
    wanted, finished = spanned
    same_one = wanted.model_copy(update={"teacher": str(tiny_t5), "steps": 1, "eval_data": None})
    out = uptrain_checkpoint(tiny_t5, tmp_path / "same", same_one)
    assert metrics(out, "train")[0]["divergence"] == pytest.approx(0, abs=1e-6)
    other = uptrain_checkpoint(tiny_t5, tmp_path / "other", same_one.model_copy(update={"teacher": str(finished)}))
    assert metrics(other, "train")[0]["divergence"] > 0.01


def test_a_t5_learns_pairs_of_columns(spanned, tiny_t5, pairs_file, tmp_path):
    columns = {"source_column": "input", "target_column": "answer.back", "data": str(pairs_file)}
    wanted = spanned[0].model_copy(update={**columns, "eval_data": str(pairs_file)})
    out = uptrain_checkpoint(tiny_t5, tmp_path / "out", wanted)
    losses = [line["loss"] for line in metrics(out, "train")]
    assert losses[-1] < losses[0] - 0.3
    assert metrics(out, "eval")[-1]["perplexity"] < metrics(out, "eval")[0]["perplexity"]


@pytest.mark.parametrize(("train", "changed"), [("attention", True), ("kv", False)])
def test_train_names_the_attention_of_t5(train, changed, tiny_t5):
    from headfold.uptrain.models.student import freeze_other_weights

    model = load_language_model(tiny_t5)
    freeze_other_weights(model, train)
    trained = {name for name, one in model.named_parameters() if one.requires_grad}
    assert "decoder.block.0.layer.1.EncDecAttention.k.weight" in trained
    assert "encoder.block.0.layer.0.SelfAttention.v.weight" in trained
    assert ("decoder.block.0.layer.1.EncDecAttention.q.weight" in trained) is changed
    assert not any("DenseReluDense" in name or "shared" in name for name in trained)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"isolate_documents": True}, "models without an encoder"),
        ({"sequence_length": 2}, "too small"),
        ({"target_column": "answer"}, "no text in"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(changes, why, spanned, tiny_t5, tmp_path):
    from headfold.errors import HeadfoldError

    with pytest.raises(HeadfoldError, match=why):
        uptrain_checkpoint(tiny_t5, tmp_path / "out", spanned[0].model_copy(update={**changes, "eval_data": None}))
    assert not list(tmp_path.iterdir())


def test_a_decoder_has_no_targets_to_write(tiny_checkpoint, settings, pairs_file, tmp_path):
    wanted = settings(data=str(pairs_file), source_column="input", target_column="answer.back")
    with pytest.raises(UsageError, match="has no encoder"):
        uptrain_checkpoint(tiny_checkpoint, tmp_path / "out", wanted)
    with pytest.raises(UsageError, match="no encoder"):
        uptrain_checkpoint(tiny_checkpoint, tmp_path / "out", settings(noise_density=0.3))


def test_a_decoder_may_read_another_column(tiny_checkpoint, settings, pairs_file, tmp_path):
    wanted = settings(data=str(pairs_file), source_column="input", steps=1)
    assert uptrain_checkpoint(tiny_checkpoint, tmp_path / "out", wanted).exists()


def test_plain_text_may_stand_beside_a_column_of_other_text(tiny_checkpoint, settings, pairs_file, tmp_path):
    plain = tmp_path / "plain.txt"
    plain.write_text("alpha beta gamma delta " * 40)
    columns = {"source_column": "input", "steps": 1}
    wanted = settings(data=(str(pairs_file), str(plain)), eval_data=str(plain), **columns)
    assert uptrain_checkpoint(tiny_checkpoint, tmp_path / "out", wanted).exists()
    with pytest.raises(UsageError, match="no columns"):
        uptrain_checkpoint(tiny_checkpoint, tmp_path / "idle", settings(data=str(plain), **columns))


def test_plain_text_has_no_columns(tmp_path):
    (tmp_path / "plain.txt").write_text("alpha beta")
    for name in ("stdlib", str(tmp_path / "plain.txt")):
        with pytest.raises(UsageError, match="no columns"):
            open_corpus(name, columns=Columns("input", "target"))


def test_operations_are_counted_by_what_each_side_reads_and_writes(tiny_t5):
    """By hand: the encoder and the keys and values of cross-attention once a source token, the rest once a target."""
    from headfold.uptrain.estimate.cost import ModelSize, estimate_cost, flops_per_token, targets_per_token
    from headfold.uptrain.settings import UptrainSettings

    model = load_language_model(tiny_t5)
    wanted = UptrainSettings(sequence_length=512, steps=1)
    assert targets_per_token(wanted, True) == 114 / 512
    assert targets_per_token(wanted, False) == targets_per_token(UptrainSettings(target_column="answer"), True) == 1
    attention, feed_forward, norm = 4 * 32 * 32, 2 * 32 * 64, 32
    buckets, vocabulary = 32 * 4, 31  # of relative positions, which are looked up, on each side
    read = 2 * (attention + feed_forward + 2 * norm) + norm + 2 * 2 * 32 * 32
    written = 2 * (2 * attention - 2 * 32 * 32 + feed_forward + 3 * norm) + norm + vocabulary * 32
    shape = ModelSize.of(model, encoder_decoder=True)
    assert (shape.parameters, shape.looked_up) == (read + written + 2 * buckets, 2 * buckets)
    assert (shape.written, shape.decoder_layers) == (written, 2)
    assert flops_per_token(shape, targets=0.25) == 6 * round(read + written / 4)
    assert flops_per_token(shape, shape) == 8 * (read + written)
    assert estimate_cost(wanted, 512, shape).flops == pytest.approx(6 * (512 * read + 114 * written), rel=1e-3)


@pytest.mark.parametrize("model_type", ["t5", "bart", "m2m_100"])
def test_dropout_goes_where_the_settings_say(model_type):
    from headfold.uptrain.models.dropout import set_dropout

    over = {"dropout_rate": 0.5, "dropout": 0.5, "attention_dropout": 0.5, "activation_dropout": 0.5}
    config = tiny_config(model_type, decoder_start_token_id=0, pad_token_id=1, **over, encoder_layerdrop=0.0,
                         decoder_layerdrop=0.0)  # fmt: skip
    model = AutoModelForSeq2SeqLM.from_config(config).train()
    inputs = batch_of(model, some_pairs()).inputs
    runs = [model(**inputs).logits for _ in range(2)]
    assert not torch.allclose(*runs)
    set_dropout(model, 0.0)
    assert torch.equal(model(**inputs).logits, model(**inputs).logits)
    assert torch.equal(model(**inputs).logits, model.eval()(**inputs).logits)


def test_a_converted_bart_loses_its_dropout_too(tmp_path):
    from headfold import convert_checkpoint
    from headfold.uptrain.models.dropout import set_dropout

    model = tiny_pair_model("bart")
    for name in ("dropout", "attention_dropout", "activation_dropout"):
        setattr(model.config, name, 0.5)
    model.save_pretrained(tmp_path / "bart")
    model = load_language_model(convert_checkpoint(tmp_path / "bart", tmp_path / "few", groups=2)).train()
    inputs = batch_of(model, some_pairs()).inputs
    assert not torch.allclose(model(**inputs).logits, model(**inputs).logits)
    set_dropout(model, 0.0)
    assert torch.equal(model(**inputs).logits, model.eval()(**inputs).logits)


def test_adafactor_learns_resumes_to_the_bit_and_keeps_little(spanned, tiny_t5, tmp_path, cut_power):
    wanted = spanned[0].model_copy(update={"optimizer": "adafactor", "eval_data": None, "weight_decay": 0.0})
    whole = uptrain_checkpoint(tiny_t5, tmp_path / "whole", wanted)
    losses = [line["loss"] for line in metrics(whole, "train")]
    assert losses[-1] < losses[0] - 0.05
    cut_power(5, tiny_t5, tmp_path / "out", wanted)
    save = next((tmp_path / "out.training").glob("step-*"))
    state = (save / "optimizer.bin").stat().st_size
    assert state < 0.5 * sum(weight.numel() * 4 for weight in weights(tiny_t5).values())
    assert same(weights(uptrain_checkpoint(tiny_t5, tmp_path / "out", wanted)), weights(whole))
    assert not same(weights(whole), weights(spanned[1]))


def test_activations_computed_again_teach_the_same(spanned, tiny_t5, tmp_path, monkeypatch):
    """Each block runs once more in the backward pass, seen by its feed-forward layer."""
    real, runs = T5LayerFF.forward, []

    def count(self, *given, **named):
        runs.append(1)
        return real(self, *given, **named)

    monkeypatch.setattr(T5LayerFF, "forward", count)
    wanted = spanned[0].model_copy(update={"steps": 3, "eval_data": None})
    losses, counts = [], []
    for again in (False, True):
        runs.clear()
        how = wanted.model_copy(update={"gradient_checkpointing": again})
        losses.append(
            [line["loss"] for line in metrics(uptrain_checkpoint(tiny_t5, tmp_path / f"{again}", how), "train")]
        )
        counts.append(len(runs))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert counts[1] - counts[0] == 3 * 2 * 4  # steps, micro-batches of each, blocks of both sides
