"""One layer's attention block as heads: the shape in which every conversion method sees it.

Letters of shapes: H query heads, K KV heads of the source, G groups (KV heads of the result), D head dim,
C hidden size (the width of the attention's input), m = K/G source KV heads in a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True)
class Rotary:
    """How the rotary position embedding pairs the rows of a head.

    Attributes:
        layout: ``half`` pairs row f with row f + dim/2, ``interleaved`` pairs 2f with 2f + 1, ``none`` rotates nothing.
        dim: how many leading rows of a head are rotated; the others pass through.
    """

    layout: str
    dim: int


@dataclass(frozen=True)
class Attention:
    """The q, k, v and o projections of one layer, in ``torch.nn.Linear`` layout split into heads.

    Query head i uses KV head i // (H/K). ``o_CHD`` holds the columns of the output projection by query head.
    Biases are None where the projection has none; the bias of the output projection is never changed, so it is absent.

    Attributes:
        keys_normed: a norm with weights shared by all heads acts on q and k after the projection, so K keeps its scale.
        q_norm_D: weights of that norm for the queries, where it has any; a basis change must leave them in place.
        k_norm_D: the same for the keys.
    """

    q_HDC: Tensor
    k_KDC: Tensor
    v_KDC: Tensor
    o_CHD: Tensor
    q_bias_HD: Tensor | None = None
    k_bias_KD: Tensor | None = None
    v_bias_KD: Tensor | None = None
    rotary: Rotary = Rotary("none", 0)
    keys_normed: bool = False
    q_norm_D: Tensor | None = None
    k_norm_D: Tensor | None = None

    @property
    def query_heads(self) -> int:
        return self.q_HDC.shape[0]

    @property
    def kv_heads(self) -> int:
        return self.k_KDC.shape[0]


def query_order(order: Sequence[int], query_heads: int) -> list[int]:
    """Where the query heads come from when KV head ``order[j]`` moves to place ``j``."""
    per_kv = query_heads // len(order)
    return [head * per_kv + offset for head in order for offset in range(per_kv)]


def permuted(attention: Attention, order: Sequence[int]) -> Attention:
    """Reorder the KV heads, each with its query heads; the block's output stays what it was.

    Args:
        order: ``order[j]`` is the source KV head that moves to place ``j``; a permutation of range(K).
    """
    order, queries = list(order), query_order(order, attention.query_heads)

    def pick(tensor: Tensor | None, heads: list[int]) -> Tensor | None:
        return None if tensor is None else tensor[heads]

    return replace(
        attention,
        q_HDC=attention.q_HDC[queries],
        k_KDC=attention.k_KDC[order],
        v_KDC=attention.v_KDC[order],
        o_CHD=attention.o_CHD[:, queries],
        q_bias_HD=pick(attention.q_bias_HD, queries),
        k_bias_KD=pick(attention.k_bias_KD, order),
        v_bias_KD=pick(attention.v_bias_KD, order),
    )
