"""The tensors of one block: read from disk as heads, merged by a method, and back in the form that the disk has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...checkpoint.source import Checkpoint
from ...errors import UnsupportedError
from ..family.attention_layer import AttentionLayer
from ..family.family import Family, full_width_norm
from .attention import Attention, Rotary, permuted
from .grouping import similarity_order
from .norms import FRESH, merge_full_width
from .permutation import moved, reordered
from .table import MethodContext, Pool, pool_mean, pool_random

if TYPE_CHECKING:
    from ..plan import Plan

_SEEDED = ("k", "v", "k_bias", "v_bias", "k_conv", "v_conv", "k_taps", "v_taps")
"""Roles in the order of their seeds, so that no two tensors of a block get the same random numbers."""


def new_tensors(plan: Plan, block: AttentionLayer, context: MethodContext) -> dict[str, Tensor]:
    """The tensors of one block that change, by disk name, in the shapes of the result."""
    source, family, pool = plan.source, plan.family, plan.method.pool
    if not plan.rewrites_queries:
        return _joined(block, _pooled(plan, block, range(block.kv_heads), context), family.query_heads, plan.groups)
    attention = read_attention(source, family, block)
    order: Sequence[int] = range(block.kv_heads)
    followers: dict[str, Tensor] = {}
    if plan.grouping == "similarity":
        order = similarity_order(attention, plan.groups, context)
        made_anew = () if pool else block.rewritten
        followers = moved(source, block, order, family.query_heads, besides=made_anew)
    if pool is not None:
        return followers | _joined(block, _pooled(plan, block, order, context), family.query_heads, plan.groups)
    merged = plan.method.apply(permuted(attention, order), plan.groups, context)
    return followers | disk_tensors(family, block, merged, _merged_norms(plan, block, order, context))


def _pooled(plan: Plan, block: AttentionLayer, order: Sequence[int], context: MethodContext) -> dict[str, Tensor]:
    """Role → heads, those of keys and values merged by a method that treats every tensor alone.

    Args:
        order: which KV head comes to each place before neighbours are merged.
    """
    heads = reordered(_read_heads(plan.source, plan.family, block), order, plan.family.query_heads)
    pool = plan.method.pool
    assert pool is not None  # a method without one rewrites queries
    merged = dict(heads)
    for role in heads:
        if role in FRESH and pool is pool_random:
            merged[role] = torch.full_like(heads[role][: plan.groups], FRESH[role])
        elif not role.startswith("q"):
            merged[role] = pool(heads[role], plan.groups, _seeded(context, role))
    if full_width_norm(block, plan.source) and pool is not pool_random:
        merged |= _merge_full_width(heads, plan.groups, pool, context)
    return merged


def _merged_norms(plan: Plan, block: AttentionLayer, order: Sequence[int], context: MethodContext) -> dict[str, Tensor]:
    """Norms with weights of every head, beside a method that rewrites the block: their mean, as `mean` takes it.

    A norm over all heads decides on its keys as well, so these come from there too.
    """
    if "k_norm" not in block.roles():
        return {}
    heads = reordered(_read_heads(plan.source, plan.family, block), order, plan.family.query_heads)
    if full_width_norm(block, plan.source):
        return _merge_full_width(heads, plan.groups, pool_mean, context)
    return {role: pool_mean(heads[role], plan.groups, context) for role in heads if role in FRESH}


def _seeded(context: MethodContext, role: str) -> MethodContext:
    return context.for_tensor(_SEEDED.index(role)) if role in _SEEDED else context


def _merge_full_width(
    heads: Mapping[str, Tensor], groups: int, pool: Pool, context: MethodContext
) -> dict[str, Tensor]:
    bias = heads.get("k_bias")
    k_GDC, bias_GD, norm_GD = merge_full_width(
        heads["k"], bias, heads["k_norm"], lambda rows: pool(rows, groups, context), context.second_moment
    )
    return {"k": k_GDC, "k_norm": norm_GD} | ({} if bias_GD is None else {"k_bias": bias_GD})


def _read_heads(source: Checkpoint, family: Family, block: AttentionLayer) -> dict[str, Tensor]:
    """Role → (heads, R, …) of every tensor that follows the KV heads, in the dtype on disk."""
    found: dict[str, Tensor] = {}
    for stored in block.stored:
        tensors = [source.read(name) for name in stored.names]
        found |= stored.split(tensors, family.query_heads, block.kv_heads)
    return found


def read_attention(source: Checkpoint, family: Family, block: AttentionLayer) -> Attention:
    """One block of a checkpoint as heads, in float32 (float64 stays).

    What acts beside the projections (gates, sinks) is left out, and keys that are the values as well come twice: only a
    ``rewritable`` block can be written back from it.
    """
    heads = _read_heads(source, family, block)
    heads.setdefault("v", heads["k"])
    for role, name in (("q", block.q), ("q_bias", block.q_bias)):
        if name is not None and role not in heads:
            heads[role] = source.read(name).unflatten(0, (family.query_heads, -1))[:, : block.head_dim]
    if not {"q", "k", "v"} <= heads.keys() or block.o is None:
        raise UnsupportedError(f"{block.module} has no query or output projection that is known: {block.rewritable}.")
    wide = {role: _widened(tensor) for role, tensor in heads.items()}
    shared_norms = "k_norm" not in heads
    return Attention(
        q_HDC=wide["q"],
        k_KDC=wide["k"],
        v_KDC=wide["v"],
        o_CHD=_widened(source.read(block.o)).unflatten(1, (family.query_heads, -1)),
        q_bias_HD=wide.get("q_bias"),
        k_bias_KD=wide.get("k_bias"),
        v_bias_KD=wide.get("v_bias"),
        rotary=block.rotary or Rotary("none", 0),
        keys_normed=block.keys_normed,
        q_norm_D=_widened(source.read(block.q_norm)) if block.q_norm and shared_norms else None,
        k_norm_D=_widened(source.read(block.k_norm)) if block.k_norm and shared_norms else None,
    )


def disk_tensors(
    family: Family, block: AttentionLayer, attention: Attention, norms: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Every tensor of the block that holds a part of ``attention``, by disk name; the inverse of reading.

    Args:
        norms: what ``attention`` does not hold of the merged tensors, or holds otherwise, by role.
    """
    roles = {
        "q": attention.q_HDC,
        "k": attention.k_KDC,
        "v": attention.v_KDC,
        "q_bias": attention.q_bias_HD,
        "k_bias": attention.k_bias_KD,
        "v_bias": attention.v_bias_KD,
    }
    heads = {role: tensor for role, tensor in roles.items() if tensor is not None} | dict(norms or {})
    made = _joined(block, heads, family.query_heads, attention.kv_heads)
    for role, name in (("q", block.q), ("q_bias", block.q_bias)):
        if name is not None and name not in made:
            made[name] = heads[role].flatten(0, 1)
    if block.o is not None:
        made[block.o] = attention.o_CHD.flatten(1)
    return made


def _joined(block: AttentionLayer, heads: Mapping[str, Tensor], query_heads: int, groups: int) -> dict[str, Tensor]:
    made: dict[str, Tensor] = {}
    for stored in block.stored:
        made |= stored.join(heads, query_heads, groups)
    return made


def _widened(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
