"""Reorder KV heads: each moves together with its query heads and with everything that belongs to those."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from ...checkpoint.source import Checkpoint
from ..family.attention_layer import AttentionLayer
from .attention import Attention


def query_order(order: Sequence[int], query_heads: int) -> list[int]:
    """Source query head at each new place, when KV head ``order[j]`` moves to place ``j``."""
    per_kv = query_heads // len(order)
    return [head * per_kv + offset for head in order for offset in range(per_kv)]


def permuted_attention(attention: Attention, order: Sequence[int]) -> Attention:
    """Reorder the KV heads of a layer, each with its query heads. The layer's output does not change.

    Args:
        order: ``order[j]`` is the source KV head that moves to place ``j``; a permutation of range(K).
    """
    order, queries = list(order), query_order(order, attention.query_heads)

    def pick(bias_XD: Tensor | None, heads: list[int]) -> Tensor | None:
        return None if bias_XD is None else bias_XD[heads]

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


def permuted_heads(heads: Mapping[str, Tensor], order: Sequence[int], query_heads: int) -> dict[str, Tensor]:
    """Reorder the heads of merged tensors, by role. Fused tensors also hold queries, which move along."""
    if list(order) == sorted(order):
        return dict(heads)  # indexing would copy every tensor
    queries = query_order(order, query_heads)
    return {role: tensor[queries if role.startswith("q") else list(order)] for role, tensor in heads.items()}


def permuted_followers(
    source: Checkpoint,
    layer: AttentionLayer,
    order: Sequence[int],
    query_heads: int,
    *,
    without: Collection[str] = (),
) -> dict[str, Tensor]:
    """Reorder the other tensors of a layer that have a part for each query head, by disk name.

    Args:
        order: ``order[j]`` is the source KV head that moves to place ``j``.
        without: names to leave out, because the method writes them itself.
    """
    queries = query_order(order, query_heads)
    made: dict[str, Tensor] = {}
    for follower in layer.followers:
        if not set(follower.names) & set(without):
            heads = follower.split([source.read(name) for name in follower.names], query_heads, query_heads)
            made |= follower.join({follower.layout: heads[follower.layout][queries]}, query_heads, query_heads)
    return made
