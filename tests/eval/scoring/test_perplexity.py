from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from eval_models import random_documents, tiny_llama
from headfold.errors import DataError, UsageError
from headfold.eval.scoring import logits
from headfold.eval.scoring.batches import collate, group_windows
from headfold.eval.scoring.logits import SlicedLogits
from headfold.eval.scoring.perplexity import Scores, score
from headfold.eval.scoring.windows import TokenDocument, make_windows
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM


def table_model(table_VV: torch.Tensor) -> LlamaForCausalLM:
    """Make a Llama whose logits are ``table[current token]``: one-hot embeddings, and layers that add nothing."""
    vocab = len(table_VV)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=vocab,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        rms_norm_eps=0.0,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(vocab))
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.lm_head.weight.copy_(table_VV.T / math.sqrt(vocab))  # the norm turns e_i into √V e_i
    return model.eval()


def plain_nats(model, documents, window, stride) -> list[float]:
    """Score one window at a time, in float64, position by position."""
    nats = [0.0] * len(documents)
    with torch.no_grad():
        for made in make_windows(documents, window, stride):
            ids = made.ids(documents)
            log_TV = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
            for slot in range(made.first_scored - made.start, made.stop - made.start):
                nats[made.document] -= log_TV[slot - 1, ids[slot]].item()
    return nats


@pytest.mark.parametrize(("window", "stride"), [(512, None), (7, 3), (2, 1)])
def test_a_table_model_has_the_analytic_perplexity(window, stride):
    torch.manual_seed(0)
    table_VV = torch.randn(16, 16) * 2
    documents = random_documents([40, 3, 17], vocab=16)
    log_VV = table_VV.double().log_softmax(-1)
    nats = -sum(log_VV[a, b].item() for doc in documents for a, b in zip(doc.ids, doc.ids[1:], strict=False))
    unshifted = -sum(log_VV[b, b].item() for doc in documents for b in doc.ids[1:])
    total = score(table_model(table_VV), documents, window=window, stride=stride).total()
    assert total.tokens == 39 + 2 + 16
    assert total.nll_nats == pytest.approx(nats, rel=1e-6)
    assert total.perplexity == pytest.approx(math.exp(nats / 57), rel=1e-6)
    assert total.nll_nats / math.log(2) / total.utf8_bytes == pytest.approx(nats / math.log(2) / (5 * 57), rel=1e-6)
    assert abs(nats - unshifted) > 1  # the control: scoring against the wrong token would be seen


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_perplexity_weighs_tokens_equally_for_any_batch_and_order(batch_size):
    model, documents = tiny_llama(), random_documents([3, 300, 41])
    expected = plain_nats(model, documents, 32, 16)
    found = score(model, documents, window=32, stride=16, batch_size=batch_size)
    assert [part.nll_nats for part in found.per_document()] == pytest.approx(expected, rel=1e-6)
    assert found.total().perplexity == pytest.approx(math.exp(sum(expected) / (2 + 299 + 40)), rel=1e-6)
    turned = score(model, documents[::-1], window=32, stride=16, batch_size=batch_size)
    assert turned.total().perplexity == pytest.approx(found.total().perplexity, rel=1e-6)
    mean_of_means = math.exp(np.mean([nats / doc.scored for nats, doc in zip(expected, documents, strict=True)]))
    assert mean_of_means != pytest.approx(found.total().perplexity, rel=1e-3)  # the control


def test_windows_with_bos_score_the_same_tokens():
    model = tiny_llama()
    plain = random_documents([90])
    with_bos = [TokenDocument("a", [1, *plain[0].ids], 1, bos=True)]
    expected = plain_nats(model, with_bos, 32, 16)
    found = score(model, with_bos, window=32, stride=16)
    assert found.total().tokens == 90
    assert found.total().nll_nats == pytest.approx(expected[0], rel=1e-6)


def test_chunked_logits_change_nothing_and_stay_small(monkeypatch):
    model, documents = tiny_llama(vocab=512), random_documents([200, 64], vocab=512)
    whole = score(model, documents, window=64, stride=32)
    rows = []
    unhooked = model.lm_head.register_forward_hook(lambda _, __, output: rows.append(output.numel() // 512))
    monkeypatch.setattr(SlicedLogits.__init__, "__defaults__", (7 * 512 * 4,))
    chunked = score(model, documents, window=64, stride=32)
    unhooked.remove()
    assert max(rows) == 7  # no pass through the head holds more than the positions granted
    assert max(map(len, whole.nll_N)) > 7
    assert chunked.total().nll_nats == pytest.approx(whole.total().nll_nats, rel=1e-6)


def test_bfloat16_is_near_float32_and_scored_in_float32():
    model, documents = tiny_llama(), random_documents([200, 64])
    full = score(model, documents, window=64).total().perplexity
    half = score(model.bfloat16(), documents, window=64)
    assert half.nll_N[0].dtype == np.float32
    assert half.total().perplexity == pytest.approx(full, rel=5e-3)  # random weights; trained ones come nearer


FAMILIES = {
    "gemma2": {"head_dim": 8, "final_logit_softcapping": 3.0},
    "cohere": {"logit_scale": 0.3},
    "granite": {"logits_scaling": 3.0},
    "gpt2": {},
    "gpt_neox": {},
    "mixtral": {"head_dim": 8, "num_local_experts": 2},
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 48},
}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_head_on_slices_is_the_models_own(model_type):
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        model_type,
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=48,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.3,
        **FAMILIES[model_type],
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    documents = random_documents([40, 22], vocab=64)
    with torch.no_grad():
        sliced = SlicedLogits(model, logits_bytes=64 * 4 * 5)
        for windows in group_windows(documents, 30, 15, 3):
            batch = collate(windows, documents)
            found = torch.cat([logits_NV for logits_NV, _ in sliced.slices(batch)])
            expected = model(input_ids=batch.ids_BT, attention_mask=batch.mask_BT).logits[batch.rows_N, batch.columns_N]
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_a_model_that_changes_logits_after_its_head_is_run_whole(monkeypatch):
    """A model that adds something position-dependent after its backbone must be run whole."""
    model, documents = tiny_llama(), random_documents([50])
    own = LlamaForCausalLM.forward

    def shifted(self, *args, **kwargs):
        outputs = own(self, *args, **kwargs)
        outputs.logits = outputs.logits * torch.arange(1, outputs.logits.shape[1] + 1)[:, None]
        return outputs

    monkeypatch.setattr(LlamaForCausalLM, "forward", shifted)
    assert logits._backbone(model) is None
    assert score(model, documents, window=64).total().nll_nats == pytest.approx(
        plain_nats(model, documents, 64, 32)[0], rel=1e-6
    )


def test_scoring_restores_each_modules_mode():
    model, documents = tiny_llama(), random_documents([50, 20])
    expected = score(model, documents, window=16).total().perplexity
    model.train()
    model.model.layers[1].eval()  # frozen by the user
    assert score(model, documents, window=16).total().perplexity == expected
    assert model.training
    assert model.model.layers[0].training
    assert not model.model.layers[1].training
    assert "forward" not in model.model.__dict__
    assert all(parameter.grad is None for parameter in model.parameters())


def test_mode_is_restored_after_an_error():
    model = tiny_llama().train()
    with pytest.raises(DataError, match="99"):
        score(model, [TokenDocument("a", [1, 99, 2], 3)])
    assert model.training


def test_vocab_cuts_the_distribution():
    model, documents = tiny_llama(vocab=40), random_documents([30], vocab=32)
    with torch.no_grad():
        log_TV = model(torch.tensor([documents[0].ids])).logits[0, :, :32].double().log_softmax(-1)
    expected = -sum(log_TV[place, token].item() for place, token in enumerate(documents[0].ids[1:]))
    assert score(model, documents, window=64, vocab=32).total().nll_nats == pytest.approx(expected, rel=1e-6)


def test_nothing_to_score_is_refused():
    with pytest.raises(DataError):
        score(tiny_llama(), [])
    with pytest.raises(UsageError):
        score(tiny_llama(), random_documents([5]), batch_size=0)


@pytest.mark.parametrize("lengths", [[9, 30, 4, 61, 12, 7, 7, 22, 5], [6]])
def test_shares_of_two_processes_add_up_exactly(lengths):
    model, documents = tiny_llama(), random_documents(lengths)
    alone = score(model, documents, window=16, batch_size=5)
    shares = []
    for rank in range(2):
        rounds = []
        one = SimpleNamespace(
            process_index=rank, num_processes=2, device="cpu", reduce=lambda tensor, reduction: tensor
        )
        hook = model.model.register_forward_hook(lambda *_, rounds=rounds: rounds.append(1))
        shares.append((score(model, documents, window=16, batch_size=5, accelerator=one), len(rounds)))
        hook.remove()
    (first, passes), (second, other_passes) = shares
    assert passes == other_passes  # sharded models need as many passes everywhere
    for whole, one_part, other_part in zip(alone.nll_N, first.nll_N, second.nll_N, strict=True):
        assert np.array_equal(whole, one_part + other_part)
        assert not np.any((one_part != 0) & (other_part != 0))


def test_nats_are_summed_in_float64():
    """A sum in float32 loses a quarter beside 2²⁴."""
    nll = np.full(4097, 0.25, dtype=np.float32)
    nll[0] = 2.0**24
    (part,) = Scores([TokenDocument("d", list(range(4098)), 1, False)], [nll]).per_document()
    assert part.nll_nats == 2.0**24 + 4096 * 0.25
    assert part.tokens == 4097
