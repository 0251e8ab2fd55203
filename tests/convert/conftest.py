"""One attention block written from its definition, and random ones whose heads are equal up to an allowed change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from headfold.convert.family.rotary import Rotary
from headfold.convert.methods.attention import Attention
from torch import Tensor

HALF = Rotary("half", 8)


def _turned(x_TD: Tensor, rotary: Rotary) -> Tensor:
    """Rotary positions row pair by row pair, as slow as the formula."""
    out = x_TD.clone()
    if rotary.layout == "none":
        return out
    half = rotary.dim // 2
    for plane in range(half):
        first, second = (plane, plane + half) if rotary.layout == "half" else (2 * plane, 2 * plane + 1)
        for position in range(x_TD.shape[0]):
            angle = torch.tensor(position * 100.0 ** (-plane / half), dtype=x_TD.dtype)
            a, b = x_TD[position, first], x_TD[position, second]
            out[position, first] = a * angle.cos() - b * angle.sin()
            out[position, second] = a * angle.sin() + b * angle.cos()
    return out


def block_output(attention: Attention, x_TC: Tensor) -> Tensor:
    """Compute the block's addition to the residual stream: causal softmax attention, head by head."""
    length, head_dim = len(x_TC), attention.q_HDC.shape[1]
    out_TC = torch.zeros(length, attention.o_CHD.shape[0], dtype=x_TC.dtype)

    def project(weight_XDC: Tensor, bias_XD: Tensor | None, head: int, norm_D: Tensor | None, normed: bool) -> Tensor:
        rows_TD = x_TC @ weight_XDC[head].T + (0 if bias_XD is None else bias_XD[head])
        if normed:
            rows_TD = rows_TD / (rows_TD.square().mean(-1, keepdim=True) + 1e-6).sqrt()
            rows_TD = rows_TD * (1 if norm_D is None else norm_D)
        return rows_TD

    for head in range(attention.query_heads):
        kv = head // (attention.query_heads // attention.kv_heads)
        normed = attention.keys_normed
        q_TD = project(attention.q_HDC, attention.q_bias_HD, head, attention.q_norm_D, normed)
        k_TD = project(attention.k_KDC, attention.k_bias_KD, kv, attention.k_norm_D, normed)
        v_TD = project(attention.v_KDC, attention.v_bias_KD, kv, None, False)
        scores_TT = _turned(q_TD, attention.rotary) @ _turned(k_TD, attention.rotary).T / head_dim**0.5
        scores_TT = scores_TT.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
        out_TC += scores_TT.softmax(-1) @ v_TD @ attention.o_CHD[:, head].T
    return out_TC


def random_attention(
    query_heads: int = 8,
    kv_heads: int = 4,
    head_dim: int = 8,
    hidden: int = 24,
    rotary: Rotary = HALF,
    biases: bool = False,
    seed: int = 0,
) -> Attention:
    """A block with unrelated heads; float32."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / hidden**0.5 * 1.5

    return Attention(
        q_HDC=draw(query_heads, head_dim, hidden),
        k_KDC=draw(kv_heads, head_dim, hidden),
        v_KDC=draw(kv_heads, head_dim, hidden),
        o_CHD=draw(hidden, query_heads, head_dim),
        q_bias_HD=draw(query_heads, head_dim) if biases else None,
        k_bias_KD=draw(kv_heads, head_dim) if biases else None,
        v_bias_KD=draw(kv_heads, head_dim) if biases else None,
        rotary=rotary,
    )


def _changed_basis(rows_DC: Tensor, rotary: Rotary, generator: torch.Generator) -> Tensor:
    """A random complex gain per rotary plane and a random invertible map of the rows that are not rotated."""
    out = rows_DC.clone()
    rotated = rotary.dim if rotary.layout != "none" else 0
    half = rotated // 2
    for plane in range(half):
        first, second = (plane, plane + half) if rotary.layout == "half" else (2 * plane, 2 * plane + 1)
        real, imaginary = torch.randn(2, generator=generator).tolist()
        out[first] = real * rows_DC[first] - imaginary * rows_DC[second]
        out[second] = imaginary * rows_DC[first] + real * rows_DC[second]
    passing = len(rows_DC) - rotated
    if passing:
        out[rotated:] = _invertible(passing, generator) @ rows_DC[rotated:]
    return out


def _invertible(width: int, generator: torch.Generator) -> Tensor:
    random = torch.randn(width, width, generator=generator)
    left, _, right = torch.linalg.svd(random)
    return left @ torch.diag(torch.linspace(0.5, 2.0, width)) @ right


def equal_up_to_basis(attention: Attention, groups: int, seed: int = 1) -> Attention:
    """Make the KV heads of each group basis changes of one another; q and o stay unrelated."""
    generator = torch.Generator().manual_seed(seed)
    members = attention.kv_heads // groups

    def with_bias(weight_KDC: Tensor, bias_KD: Tensor | None) -> Tensor:
        return weight_KDC if bias_KD is None else torch.cat([weight_KDC, bias_KD.unsqueeze(-1)], -1)

    k, v = with_bias(attention.k_KDC, attention.k_bias_KD), with_bias(attention.v_KDC, attention.v_bias_KD)
    hidden = attention.k_KDC.shape[-1]
    k, v = k.clone(), v.clone()
    for head in range(attention.kv_heads):
        first = head - head % members
        if head != first:
            k[head] = _changed_basis(k[first], attention.rotary, generator)
            v[head] = _invertible(v.shape[1], generator) @ v[first]
    return replace(
        attention,
        k_KDC=k[..., :hidden],
        v_KDC=v[..., :hidden],
        k_bias_KD=None if attention.k_bias_KD is None else k[..., -1],
        v_bias_KD=None if attention.v_bias_KD is None else v[..., -1],
    )


def text_moment(hidden: int = 24, seed: int = 5) -> Tensor:
    """E[x xᵀ] of correlated inputs with a mean, the constant last, (C+1)×(C+1) float64."""
    generator = torch.Generator().manual_seed(seed)
    x_NC = torch.randn(400, hidden, generator=generator).double()
    x_NC = x_NC @ torch.randn(hidden, hidden, generator=generator).double() / hidden**0.5 + 0.3
    x_NE = torch.cat([x_NC, torch.ones(400, 1, dtype=torch.float64)], 1)
    return x_NE.T @ x_NE / 400


@pytest.fixture
def make_attention() -> Callable[..., Attention]:
    return random_attention


@pytest.fixture
def make_equal() -> Callable[..., Attention]:
    return equal_up_to_basis


@pytest.fixture
def make_moment() -> Callable[..., Tensor]:
    return text_moment


@pytest.fixture
def output_of() -> Callable[[Attention, Tensor], Tensor]:
    return block_output
