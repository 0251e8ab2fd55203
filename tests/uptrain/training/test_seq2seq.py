"""Uptraining of encoder-decoders: the loss of transformers, span corruption and pairs, resume to the bit."""

from __future__ import annotations

import pytest
import torch
from headfold.corpus import Columns, open_corpus
from headfold.errors import UsageError
from headfold.pairs import Pair
from headfold.uptrain.data.batches import PairBatch
from headfold.uptrain.loss.chunked import LossInputs, attach_chunked_loss
from headfold.uptrain.loss.head import SplitModel
from headfold.uptrain.loss.token_losses import TrainingLoss
from headfold.uptrain.run import uptrain_checkpoint
from headfold.uptrain.training.optim import make_optimizer
from headfold.uptrain.training.step import Stepper
from runs import OneProcess, batch_of, metrics, same, some_pairs, tiny_pair_model, weights
from transformers import AutoModelForSeq2SeqLM
from transformers.models.t5.modeling_t5 import T5LayerFF

TYPES = ["t5", "mt5", "bart", "mbart", "marian", "pegasus", "m2m_100"]


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


def test_pairs_one_by_one_are_one_big_batch(settings):
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


def test_only_a_padded_micro_batch_has_a_mask():
    batch = batch_of(tiny_pair_model("t5"), [Pair([5, 6, 7], [8]), Pair([5, 6, 7], [8, 9]), Pair([5], [6])])
    first, last = batch.split(2)
    assert "attention_mask" not in first.inputs
    assert "attention_mask" not in last.inputs
    assert ["attention_mask" in micro.inputs for micro in batch.split(3)] == [True]


@pytest.fixture(scope="module")
def spanned(tiny_t5, text_file, tmp_path_factory):
    """Settings of a run on corrupted spans, and the result of that run without a stop."""
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


def test_the_divergence_from_a_teacher_is_zero_only_for_the_same_model(spanned, tiny_t5, tmp_path):
    wanted, finished = spanned
    same_one = wanted.model_copy(update={"teacher": str(tiny_t5), "steps": 1, "eval_data": None})
    out = uptrain_checkpoint(tiny_t5, tmp_path / "same", same_one)
    assert metrics(out, "train")[0]["divergence"] == pytest.approx(0, abs=1e-6)
    other = uptrain_checkpoint(tiny_t5, tmp_path / "other", same_one.model_copy(update={"teacher": str(finished)}))
    assert metrics(other, "train")[0]["divergence"] > 0.01


def test_a_t5_learns_pairs_of_columns(spanned, tiny_t5, pairs_file, tmp_path):
    columns = {"text_column": "input", "target_column": "answer.back", "data": str(pairs_file)}
    wanted = spanned[0].model_copy(update={**columns, "eval_data": str(pairs_file)})
    out = uptrain_checkpoint(tiny_t5, tmp_path / "out", wanted)
    losses = [line["loss"] for line in metrics(out, "train")]
    assert losses[-1] < losses[0] - 0.3
    assert metrics(out, "eval")[-1]["perplexity"] < metrics(out, "eval")[0]["perplexity"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"isolate_documents": True}, "models without an encoder"),
        ({"sequence_length": 2}, "too small"),
        ({"target_column": "answer"}, "no text in"),
    ],
)
def test_unfit_settings_are_refused_before_anything_is_written(changes, why, spanned, tiny_t5, tmp_path):
    from headfold.errors import HeadfoldError

    with pytest.raises(HeadfoldError, match=why):
        uptrain_checkpoint(tiny_t5, tmp_path / "out", spanned[0].model_copy(update={**changes, "eval_data": None}))
    assert not list(tmp_path.iterdir())


def test_a_decoder_may_read_another_column(tiny_checkpoint, settings, pairs_file, tmp_path):
    wanted = settings(data=str(pairs_file), source_column="input", steps=1)
    assert uptrain_checkpoint(tiny_checkpoint, tmp_path / "out", wanted).exists()


def test_plain_text_has_no_columns(tmp_path):
    (tmp_path / "plain.txt").write_text("alpha beta")
    for name in ("stdlib", str(tmp_path / "plain.txt")):
        with pytest.raises(UsageError, match="no columns"):
            open_corpus(name, columns=Columns("input", "target"))


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


def test_gradient_checkpointing_gives_the_same_losses_in_t5(spanned, tiny_t5, tmp_path, monkeypatch):
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
