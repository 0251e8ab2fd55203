"""``aligned`` is exact for heads equal up to turns, and as good as a slow search from many starts elsewhere."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from headfold.convert.family.rotary import Rotary
from headfold.convert.methods.aligned import aligned, phases, rotations
from headfold.convert.methods.attention import Attention
from headfold.convert.methods.context import MethodContext
from headfold.convert.methods.layer import convert_attention
from headfold.convert.methods.table import METHODS

X_TC = torch.randn(9, 24, generator=torch.Generator().manual_seed(11))


def _equal_up_to_turns(attention: Attention) -> Attention:
    """All KV heads the same but for a phase per plane of K and an orthogonal map of V and of K's other rows."""
    generator = torch.Generator().manual_seed(2)
    half = attention.rotary.dim // 2
    k_KDC, v_KDC = attention.k_KDC.clone(), attention.v_KDC.clone()
    for head in range(1, attention.kv_heads):
        angle_F = torch.rand(half, generator=generator) * 6.28
        cos_F1, sin_F1 = angle_F.cos().unsqueeze(-1), angle_F.sin().unsqueeze(-1)
        k_KDC[head, :half] = cos_F1 * k_KDC[0, :half] - sin_F1 * k_KDC[0, half : 2 * half]
        k_KDC[head, half : 2 * half] = sin_F1 * k_KDC[0, :half] + cos_F1 * k_KDC[0, half : 2 * half]
        rest = k_KDC.shape[1] - 2 * half
        k_KDC[head, 2 * half :] = (
            torch.linalg.qr(torch.randn(rest, rest, generator=generator))[0] @ k_KDC[0, 2 * half :]
        )
        v_KDC[head] = torch.linalg.qr(torch.randn(8, 8, generator=generator))[0] @ v_KDC[0]
    return replace(attention, k_KDC=k_KDC, v_KDC=v_KDC)


@pytest.mark.parametrize("rotary_dim", [8, 4])
@pytest.mark.parametrize("kv_heads", [8, 4])
@pytest.mark.parametrize("data", [False, True])
def test_equal_up_to_turns_is_exact(rotary_dim, kv_heads, data, make_attention, make_moment, output_of) -> None:
    attention = _equal_up_to_turns(make_attention(8, kv_heads, rotary=Rotary("half", rotary_dim)))
    context = MethodContext(0, second_moment=make_moment() if data else None)
    expected = output_of(attention, X_TC)
    torch.testing.assert_close(output_of(aligned(attention, 1, context), X_TC), expected, atol=1e-5, rtol=1e-5)
    by_mean = convert_attention(METHODS["mean"], attention, 1, context)
    assert (output_of(by_mean, X_TC) - expected).abs().max() > 0.05, "the control must fail"


def test_as_many_groups_as_heads_changes_nothing(make_attention) -> None:
    attention = make_attention(8, 4)
    assert torch.equal(aligned(attention, 4, MethodContext(0)).k_KDC, attention.k_KDC)


def _gram(members: int, width: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    heads = [
        random.normal(size=(width, 20)) + 2 * random.normal(size=(width, 20)) * (width > 1) for _ in range(members)
    ]
    return np.array([[one @ other.T for other in heads] for one in heads])


def test_phases_beat_every_random_start() -> None:
    random = np.random.default_rng(0)
    rows = random.normal(size=(4, 20)) + 1j * random.normal(size=(4, 20))
    gram = rows @ rows.conj().T
    found = phases(torch.tensor(gram).unsqueeze(0))[0].numpy()
    np.testing.assert_allclose(abs(found), 1)

    def agreement(turns: np.ndarray) -> float:
        return (turns.conj() @ gram @ turns).real

    best = 0.0
    for _ in range(200):
        turns = np.exp(2j * np.pi * random.random(4))
        for _ in range(200):
            for head in range(4):  # one head at a time towards the sum of the others
                toward = sum(gram[head, other] * turns[other] for other in range(4) if other != head)
                turns[head] = toward / abs(toward)
        best = max(best, agreement(turns))
    assert agreement(found) == pytest.approx(best, rel=1e-3)
    assert agreement(found) > agreement(np.ones(4)) * 1.1


def test_rotations_reach_a_local_optimum() -> None:
    gram = _gram(3, 5, seed=1)
    turns = rotations(torch.tensor(gram).permute(0, 2, 1, 3)).numpy()
    np.testing.assert_allclose(turns @ turns.transpose(0, 2, 1), np.eye(5)[None].repeat(3, 0), atol=1e-9)

    def agreement(candidate: np.ndarray) -> float:
        return sum(np.trace(candidate[i].T @ gram[i, j] @ candidate[j]) for i in range(3) for j in range(3))

    # Coordinate ascent by an independent Procrustes step gains nothing more.
    polished = turns.copy()
    for head in [0, 1, 2] * 20:
        toward = sum(gram[head, other] @ polished[other] for other in range(3) if other != head)
        left, _, right = np.linalg.svd(toward)
        polished[head] = left @ right
    assert agreement(polished) == pytest.approx(agreement(turns), rel=1e-6)
    assert agreement(turns) > agreement(np.eye(5)[None].repeat(3, 0)) * 1.1


def test_average_is_of_the_turned_members(make_attention, make_moment) -> None:
    """Each member, read back from its turn, averages to the shared head: the definition, plane by plane."""
    attention, moment = make_attention(4, 4), make_moment()
    converted = aligned(attention, 2, MethodContext(0, second_moment=moment))
    q_old, q_new = (torch.complex(part.q_HDC[:, :4], part.q_HDC[:, 4:]) for part in (attention, converted))
    k_old, k_new = (torch.complex(part.k_KDC[:, :4], part.k_KDC[:, 4:]) for part in (attention, converted))
    turn_HF = (q_old.conj() * q_new).sum(-1)
    turn_HF = turn_HF / turn_HF.abs()  # conj(b), since q ← conj(b) q
    for group in range(2):
        members = slice(2 * group, 2 * group + 2)
        torch.testing.assert_close(k_new[group], (turn_HF[members].unsqueeze(-1) * k_old[members]).mean(0))
    torch.testing.assert_close(q_new.abs(), q_old.abs())


@pytest.mark.parametrize("rotary_dim", [8, 4])
def test_rescaled_heads_have_their_members_mean_norm(rotary_dim, make_attention, make_moment, output_of) -> None:
    attention = make_attention(8, 4, rotary=Rotary("half", rotary_dim))
    context = MethodContext(0, second_moment=make_moment())
    plain, rescaled = (
        convert_attention(METHODS[name], attention, 2, context) for name in ("aligned", "aligned+rescale")
    )
    for name in ("k_KDC", "v_KDC"):
        members = getattr(attention, name).unflatten(0, (2, 2)).norm(dim=(2, 3)).mean(1)
        averaged, found = getattr(plain, name), getattr(rescaled, name)
        torch.testing.assert_close(found.norm(dim=(1, 2)), members)
        assert (averaged.norm(dim=(1, 2)) < 0.95 * members).all(), "the control: an average is shorter"
        ratio = (found / averaged).flatten(1)
        torch.testing.assert_close(ratio, ratio[:, :1].expand_as(ratio))
    assert torch.equal(rescaled.q_HDC, plain.q_HDC)
    assert torch.equal(rescaled.o_CHD, plain.o_CHD)


def test_rescaling_does_not_change_heads_that_agree(make_attention, output_of) -> None:
    attention = _equal_up_to_turns(make_attention(8, 4))
    rescaled = convert_attention(METHODS["aligned+rescale"], attention, 1, MethodContext(0))
    torch.testing.assert_close(output_of(rescaled, X_TC), output_of(attention, X_TC), atol=1e-5, rtol=1e-5)
