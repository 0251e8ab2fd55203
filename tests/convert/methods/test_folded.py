"""``folded`` is exact where heads are equal up to an allowed basis change, and elsewhere what the formulas say."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from headfold.convert.family.rotary import Rotary
from headfold.convert.methods.aligned import aligned
from headfold.convert.methods.attention import Attention
from headfold.convert.methods.basis_change import share_heads
from headfold.convert.methods.context import MethodContext
from headfold.convert.methods.folded import fold_group, folded, predicted_loss
from headfold.convert.methods.layer import convert_attention
from headfold.convert.methods.table import METHODS
from headfold.errors import UnsupportedError, UsageError
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
from lost_energy import lost_shares  # the measure of benchmarks/predicted.py

ROTARIES = [Rotary("half", 8), Rotary("interleaved", 8), Rotary("half", 4), Rotary("interleaved", 4), Rotary("none", 0)]
X_TC = torch.randn(9, 24, generator=torch.Generator().manual_seed(11))


@pytest.mark.parametrize("rotary", ROTARIES, ids=str)
@pytest.mark.parametrize("biases", [False, True], ids=["plain", "biases"])
@pytest.mark.parametrize("kv_heads", [8, 4], ids=["mha", "gqa"])
@pytest.mark.parametrize("data", [False, True], ids=["identity", "text"])
def test_equal_up_to_basis_is_exact(
    rotary, biases, kv_heads, data, make_attention, make_equal, make_moment, output_of
) -> None:
    attention = make_equal(make_attention(8, kv_heads, rotary=rotary, biases=biases), groups=2)
    context = MethodContext(layer=0, second_moment=make_moment() if data else None)
    expected = output_of(attention, X_TC)
    converted = folded(attention, 2, context)
    assert converted.k_KDC.shape == (2, 8, 24)
    assert converted.v_KDC.dtype == torch.float32
    torch.testing.assert_close(output_of(converted, X_TC), expected, atol=1e-5, rtol=1e-5)
    by_mean = convert_attention(METHODS["mean"], attention, 2, context)
    assert (output_of(by_mean, X_TC) - expected).abs().max() > 0.05, "the control must fail"


def test_wrong_plane_layout_is_not_exact(make_attention, make_equal, output_of) -> None:
    attention = make_equal(make_attention(), groups=2)
    mistaken = folded(replace(attention, rotary=Rotary("interleaved", 8)), 2, MethodContext(0))
    output = output_of(replace(mistaken, rotary=attention.rotary), X_TC)
    assert (output - output_of(attention, X_TC)).abs().max() > 0.05


@pytest.mark.parametrize("value_dim", [4, 12])
def test_values_may_be_wider_or_narrower_than_keys(value_dim, make_attention, make_equal, output_of) -> None:
    """V has the head dim of the value projection, which may differ from that of K."""
    attention = make_attention(8, 4)
    values = make_equal(make_attention(8, 4, head_dim=value_dim, rotary=Rotary("none", 0), seed=3), groups=2)
    attention = replace(make_equal(attention, groups=2), v_KDC=values.v_KDC, o_CHD=values.o_CHD)
    context = MethodContext(0)
    torch.testing.assert_close(
        output_of(folded(attention, 2, context), X_TC), output_of(attention, X_TC), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("method", ["folded", "mean"])
def test_as_many_groups_as_heads_changes_nothing(method, make_attention) -> None:
    attention = make_attention(8, 4, biases=True)
    converted = convert_attention(METHODS[method], attention, 4, MethodContext(0))
    for name in ("q_HDC", "k_KDC", "v_KDC", "o_CHD", "q_bias_HD", "k_bias_KD", "v_bias_KD"):
        assert torch.equal(getattr(converted, name), getattr(attention, name)), name


def _with_mean(moment: torch.Tensor, share: float) -> np.ndarray:
    """E[x xᵀ] in which the mean counts by ``share``; damped by one part in a million, as the code does."""
    plain, mean = moment[:24, :24].numpy(), moment[24, :24].numpy()
    return plain + np.eye(24) * 1e-6 * np.diag(plain).mean() - (1 - share) * np.outer(mean, mean)


def _gain(attention: Attention, query: int, moment: torch.Tensor) -> float:
    """Mean square of the query head's output, without the mean token."""
    value = attention.v_KDC[query // (attention.query_heads // attention.kv_heads)].double().numpy()
    out = attention.o_CHD[:, query].double().numpy() @ value
    return float(np.trace(out @ _with_mean(moment, 0) @ out.T))


def _spread(forms: np.ndarray, moment: torch.Tensor) -> np.ndarray:
    """Per query head, the mean square of scores of unrelated tokens at positions that turn every plane evenly."""
    plain = _with_mean(moment, 0)
    return np.einsum("hfcd,hfab,ca,db->h", forms, forms.conj(), plain, plain).real / 2


def _reference_scores(attention: Attention, groups: int, full: torch.Tensor) -> np.ndarray:
    """Per query head, the bilinear form of each plane, χᴴ κ as a complex C×C matrix, after an optimal shared row.

    Written from the formulas with singular values of the stacked √w_h κ_h C^½, the code uses grams.
    """
    moment, root = _with_mean(full, 1), np.linalg.cholesky(_with_mean(full, 0.5))
    q, k = attention.q_HDC.double().numpy(), attention.k_KDC.double().numpy()
    half, members, per_kv = q.shape[1] // 2, len(k) // groups, len(q) // len(k)
    forms = np.zeros((len(q), half, q.shape[2], q.shape[2]), dtype=complex)
    for group in range(groups):
        for plane in range(half):
            heads = range(group * members, (group + 1) * members)
            weights, stacked = [], []
            for head in heads:
                queries = range(head * per_kv, (head + 1) * per_kv)
                chis = [q[query, plane] + 1j * q[query, plane + half] for query in queries]
                gains = [_gain(attention, query, full) for query in queries]
                weights.append(sum(g * (chi @ moment @ chi.conj()).real for g, chi in zip(gains, chis, strict=True)))
                stacked.append(np.sqrt(weights[-1]) * (k[head, plane] + 1j * k[head, plane + half]) @ root)
            left, size, right = np.linalg.svd(np.array(stacked), full_matrices=False)
            for place, head in enumerate(heads):
                row = left[place, 0] * size[0] * right[0] @ np.linalg.inv(root) / np.sqrt(weights[place])
                for query in range(head * per_kv, (head + 1) * per_kv):
                    forms[query, plane] = np.outer((q[query, plane] + 1j * q[query, plane + half]).conj(), row)
    sharper = (_spread(_scores(attention), full) / _spread(forms, full)) ** 0.25
    return forms * sharper[:, None, None, None]


def _scores(attention: Attention) -> np.ndarray:
    q, k = attention.q_HDC.double().numpy(), attention.k_KDC.double().numpy()
    half, per_kv = q.shape[1] // 2, len(q) // len(k)
    chi, kappa = q[:, :half] + 1j * q[:, half:], (k[:, :half] + 1j * k[:, half:]).repeat(per_kv, 0)
    return np.einsum("hfc,hfd->hfcd", chi.conj(), kappa)


def _reference_outputs(attention: Attention, groups: int, moment: np.ndarray) -> np.ndarray:
    """Wo_q Wv_h of each query head after the best shared V: truncated SVD of the stacked [Wo_q…; …] Wv_h C^½."""
    root = np.linalg.cholesky(moment)
    v, o = attention.v_KDC.double().numpy(), attention.o_CHD.double().numpy()
    members, per_kv, width = len(v) // groups, o.shape[1] // len(v), v.shape[1]
    maps = np.zeros((o.shape[1], o.shape[0], v.shape[2]))
    for group in range(groups):
        queries = range(group * members * per_kv, (group + 1) * members * per_kv)
        stacked = np.concatenate([o[:, query] @ v[query // per_kv] @ root for query in queries])
        left, size, right = np.linalg.svd(stacked, full_matrices=False)
        best = (left[:, :width] * size[:width]) @ right[:width] @ np.linalg.inv(root)
        for place, query in enumerate(queries):
            maps[query] = best[place * o.shape[0] : (place + 1) * o.shape[0]]
    return maps


@pytest.mark.parametrize(("kv_heads", "groups"), [(8, 2), (8, 1), (4, 2), (4, 1)])
def test_agrees_with_slow_reference(kv_heads, groups, make_attention, make_moment) -> None:
    attention = make_attention(8, kv_heads)
    moment = make_moment()
    converted = folded(attention, groups, MethodContext(0, second_moment=moment))
    np.testing.assert_allclose(_scores(converted), _reference_scores(attention, groups, moment), atol=2e-5)
    v_HDC = converted.v_KDC.double().repeat_interleave(8 // groups, 0)
    maps = torch.einsum("chd,hde->hce", converted.o_CHD.double(), v_HDC).numpy()
    np.testing.assert_allclose(maps, _reference_outputs(attention, groups, _with_mean(moment, 1)), atol=2e-5)


def _lost_energy(attention: Attention, converted: Attention, moment: torch.Tensor) -> tuple[float, float]:
    """Measure on the converted weights the energy of score errors in the outputs, and of output errors."""
    difference = _scores(attention) - _scores(converted)
    gains = np.array([_gain(attention, query, moment) for query in range(attention.query_heads)])
    queries, keys = _with_mean(moment, 1), _with_mean(moment, 0.5)
    keys = np.einsum("hfcd,hfab,ca,db,h->", difference, difference.conj(), queries, keys, gains).real
    old, new = (
        torch.einsum("chd,hde->hce", part.o_CHD.double(), part.v_KDC.double().repeat_interleave(8 // part.kv_heads, 0))
        for part in (attention, converted)
    )
    return keys, torch.einsum("hce,ef,hcf->", old - new, moment[:24, :24], old - new).item()


def test_predicted_loss_is_what_conversion_loses(make_attention, make_moment) -> None:
    attention, moment = make_attention(8, 4), make_moment()
    context = MethodContext(0, second_moment=moment)
    predicted = predicted_loss(attention, 2, context)
    nothing = replace(attention, k_KDC=attention.k_KDC * 0, v_KDC=attention.v_KDC * 0)
    all_keys, all_values = _lost_energy(attention, nothing, moment)
    blunt = share_heads(attention, 2, moment, lambda *parts: replace(fold_group(*parts), sharpened=False))
    keys, values = _lost_energy(attention, blunt, moment)
    assert predicted.keys == pytest.approx(keys / all_keys, rel=1e-3)
    assert predicted.values == pytest.approx(values / all_values, rel=1e-3)
    assert lost_shares(attention, blunt, moment) == pytest.approx((predicted.keys, predicted.values), rel=1e-3)
    assert len(predicted.keys_G) == 2
    assert predicted_loss(attention, 4, context).values == pytest.approx(0, abs=1e-9)
    mean_keys, mean_values = _lost_energy(attention, convert_attention(METHODS["mean"], attention, 2, context), moment)
    assert mean_keys > keys
    assert mean_values > values


@pytest.mark.parametrize("method", ["mean", "first", "aligned", "folded"])
def test_lost_shares_agree_with_a_slow_count_for_every_method(method, make_attention, make_moment) -> None:
    attention, moment = make_attention(8, 4), make_moment()
    converted = convert_attention(METHODS[method], attention, 2, MethodContext(0, second_moment=moment))
    nothing = replace(attention, k_KDC=attention.k_KDC * 0, v_KDC=attention.v_KDC * 0)
    total, lost = (_lost_energy(attention, part, moment) for part in (nothing, converted))
    expected = lost[0] / total[0], lost[1] / total[1]
    assert lost_shares(attention, converted, moment) == pytest.approx(expected, rel=1e-3)


def test_lost_shares_of_rows_that_are_not_rotated(make_attention, make_moment) -> None:
    """Half of one head's rows pass: halving its keys leaves half the scores, and a quarter of their energy is lost."""
    attention = make_attention(2, 2, rotary=Rotary("half", 4))
    k_KDC = attention.k_KDC.clone()
    halved = replace(attention, k_KDC=k_KDC / 2, v_KDC=attention.v_KDC / 2)
    assert lost_shares(attention, halved, make_moment()) == pytest.approx((0.25, 0.25))


def test_result_has_the_members_size(make_attention) -> None:
    attention = make_attention(8, 8, rotary=Rotary("half", 4))
    converted = folded(attention, 2, MethodContext(0))
    members = attention.v_KDC.unflatten(0, (2, 4)).norm(dim=(2, 3)).mean(1)
    torch.testing.assert_close(converted.v_KDC.norm(dim=(1, 2)), members)
    passing = attention.k_KDC[:, 4:].unflatten(0, (2, 4)).norm(dim=(2, 3)).mean(1)
    torch.testing.assert_close(converted.k_KDC[:, 4:].norm(dim=(1, 2)), passing)


def test_scores_spread_half_way_to_what_they_were(make_attention, make_moment) -> None:
    attention, moment = make_attention(8, 4), make_moment()
    blunt = share_heads(attention, 1, moment, lambda *parts: replace(fold_group(*parts), sharpened=False))
    spreads = [_spread(_scores(part), moment) for part in (attention, blunt, folded(attention, 1, _text(moment)))]
    np.testing.assert_allclose(spreads[2], np.sqrt(spreads[0] * spreads[1]), rtol=1e-4)
    assert (spreads[1] < 0.9 * spreads[0]).any()


def _text(moment: torch.Tensor) -> MethodContext:
    return MethodContext(0, second_moment=moment)


def _planes_turned(k_DC: Tensor, turn_F: Tensor) -> Tensor:
    kappa_FC = torch.complex(k_DC[:4], k_DC[4:]) * turn_F.unsqueeze(-1)
    return torch.cat([kappa_FC.real, kappa_FC.imag])


@pytest.mark.parametrize("norm", ["equal in a plane", "unequal", "unknown"])
@pytest.mark.parametrize("method", [folded, aligned])
def test_normed_keys_use_only_exact_turns(norm, method, make_attention, output_of) -> None:
    """Heads that differ only by turns that the norm allows (phases, signs, or sizes alone) merge exactly."""
    generator = torch.Generator().manual_seed(4)
    weights_F = torch.rand(4, generator=generator) + 0.5
    norm_D = torch.cat([weights_F, weights_F + (0.3 if norm == "unequal" else 0.0)])
    attention = make_attention(4, 4)
    k_KDC = attention.k_KDC.clone()
    for head in range(1, 4):
        angle_F = torch.rand(4, generator=generator) * 6.28
        turns = {"equal in a plane": torch.polar(torch.ones(4), angle_F), "unequal": angle_F.cos().sign()}
        k_KDC[head] = head * _planes_turned(k_KDC[0], turns.get(norm, torch.ones(4)))
    attention = replace(attention, k_KDC=k_KDC, v_KDC=attention.v_KDC[:1].repeat(4, 1, 1), keys_normed=True)
    if norm != "unknown":
        attention = replace(attention, q_norm_D=norm_D, k_norm_D=norm_D * 2)
    expected = output_of(attention, X_TC)
    converted = method(attention, 1, MethodContext(0))
    torch.testing.assert_close(output_of(converted, X_TC), expected, atol=1e-5, rtol=1e-5)
    by_mean = output_of(convert_attention(METHODS["mean"], attention, 1, MethodContext(0)), X_TC)
    assert norm == "unknown" or (by_mean - expected).abs().max() > 0.05, "the control must fail"


def test_unread_heads_and_dead_rows_stay_finite(make_attention, output_of) -> None:
    attention = make_attention(4, 4)
    attention.q_HDC[1] = 0
    attention.k_KDC[:, 2] = 0
    attention.k_KDC[:, 6] = 0
    attention.o_CHD[:, 3] = 0
    converted = folded(attention, 1, MethodContext(0))
    assert output_of(converted, X_TC).isfinite().all()


def test_unknown_layout_and_foreign_statistics_are_refused(make_attention, make_moment) -> None:
    with pytest.raises(UnsupportedError, match="rotary positions is not known"):
        folded(make_attention(rotary=Rotary("unknown", 8)), 2, MethodContext(0))
    with pytest.raises(UsageError, match="statistics are 30 wide"):
        folded(make_attention(), 2, MethodContext(0, second_moment=make_moment(30)))


def _llama(kv_heads: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=kv_heads, head_dim=12, attention_bias=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def test_logits_of_a_real_llama(make_equal) -> None:
    """The half layout and head order of transformers, with biases and a head dim that is not hidden / heads."""
    torch.manual_seed(0)
    source, result = _llama(4), _llama(2)
    torch.nn.init.normal_(source.model.layers[0].self_attn.q_proj.bias)
    part = source.model.layers[0].self_attn
    attention = make_equal(
        Attention(
            *(proj.weight.detach().unflatten(0, (4, 12)) * 8 for proj in (part.q_proj, part.k_proj, part.v_proj)),
            o_CHD=part.o_proj.weight.detach().unflatten(1, (4, 12)) * 8,
            q_bias_HD=part.q_proj.bias.detach().unflatten(0, (4, 12)),
            k_bias_KD=torch.randn(4, 12),
            v_bias_KD=torch.randn(4, 12),
            rotary=Rotary("half", 12),
        ),
        groups=2,
    )
    for method, model, groups in ((None, source, 4), (folded, result, 2)):
        block = attention if method is None else method(attention, groups, MethodContext(0))
        model.load_state_dict({k: v for k, v in source.state_dict().items() if "self_attn" not in k}, strict=False)
        with torch.no_grad():
            for name, weight, bias in (
                ("q_proj", block.q_HDC, block.q_bias_HD),
                ("k_proj", block.k_KDC, block.k_bias_KD),
                ("v_proj", block.v_KDC, block.v_bias_KD),
            ):
                projection = getattr(model.model.layers[0].self_attn, name)
                projection.weight.copy_(weight.flatten(0, 1))
                projection.bias.copy_(bias.flatten())
            model.model.layers[0].self_attn.o_proj.weight.copy_(block.o_CHD.flatten(1))
            model.model.layers[0].self_attn.o_proj.bias.zero_()
    ids = torch.randint(0, 64, (2, 16))
    with torch.no_grad():
        torch.testing.assert_close(result(ids).logits, source(ids).logits, atol=1e-5, rtol=1e-5)
