"""Methods that pool each tensor alone agree with the formulas."""

from __future__ import annotations

import pytest
import torch
from headfold.convert.methods.attention import Attention
from headfold.convert.methods.context import MethodContext
from headfold.convert.methods.layer import convert_attention
from headfold.convert.methods.pooling import pool_mean
from headfold.convert.methods.table import METHODS

H, K, G, D, C = 8, 4, 2, 3, 5


def _block(biases: bool = True) -> Attention:
    torch.manual_seed(0)
    return Attention(
        q_HDC=torch.randn(H, D, C),
        k_KDC=torch.randn(K, D, C),
        v_KDC=torch.randn(K, D, C),
        o_CHD=torch.randn(C, H, D),
        q_bias_HD=torch.randn(H, D) if biases else None,
        k_bias_KD=torch.randn(K, D) if biases else None,
        v_bias_KD=torch.randn(K, D) if biases else None,
    )


@pytest.mark.parametrize("biases", [True, False])
def test_mean_is_the_mean_of_neighbours(biases: bool) -> None:
    block = _block(biases)
    made = convert_attention(METHODS["mean"], block, G, MethodContext(0))
    for group in range(G):
        first, second = 2 * group, 2 * group + 1
        assert torch.allclose(made.k_KDC[group], (block.k_KDC[first] + block.k_KDC[second]) / 2)
        assert torch.allclose(made.v_KDC[group], (block.v_KDC[first] + block.v_KDC[second]) / 2)
        if biases:
            assert torch.allclose(made.k_bias_KD[group], (block.k_bias_KD[first] + block.k_bias_KD[second]) / 2)
    assert made.q_HDC is block.q_HDC
    assert made.o_CHD is block.o_CHD
    assert (made.k_bias_KD is None) != biases


@pytest.mark.parametrize("members", [2, 3, 5, 7, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_mean_of_equal_heads_is_that_head(members: int, dtype: torch.dtype) -> None:
    heads = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(members)).to(dtype)
    assert torch.equal(pool_mean(heads.repeat_interleave(members, 0), 2, MethodContext(0)).to(dtype), heads)


def test_first_takes_the_first_of_each_group() -> None:
    block = _block()
    made = convert_attention(METHODS["first"], block, G, MethodContext(0))
    assert torch.equal(made.k_KDC, block.k_KDC[[0, 2]])
    assert torch.equal(made.v_bias_KD, block.v_bias_KD[[0, 2]])


def test_random_is_fresh_repeatable_and_never_twice_the_same() -> None:
    block = Attention(*(torch.randn(shape) for shape in ((8, 64, 64), (4, 64, 64), (4, 64, 64), (64, 8, 64))))

    def draw(layer: int, seed: int) -> Attention:
        return convert_attention(METHODS["random"], block, G, MethodContext(layer, seed, initializer_range=0.05))

    made = draw(0, 0)
    assert made.k_KDC.std().item() == pytest.approx(0.05, rel=0.05)
    assert torch.equal(made.k_KDC, draw(0, 0).k_KDC)
    others = [made.v_KDC, draw(1, 0).k_KDC, draw(0, 1).k_KDC, draw(1, 0).v_KDC]
    assert all((made.k_KDC - other).abs().max() > 0.01 for other in others)
    assert not convert_attention(METHODS["random"], _block(), G, MethodContext(0)).k_bias_KD.any()


def test_every_method_gives_g_heads_and_has_a_summary() -> None:
    assert {"mean", "first", "random", "aligned", "aligned+rescale", "folded"} == set(METHODS)
    block = _block(biases=False)
    for method in METHODS.values():
        assert method.summary
        made = convert_attention(method, block, G, MethodContext(0))
        assert made.k_KDC.shape == made.v_KDC.shape == (G, D, C)
        changed = not torch.equal(made.q_HDC, block.q_HDC)
        assert changed == method.rewrites_queries
