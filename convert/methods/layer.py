"""The tensors of one attention layer: read from disk as heads, merged by a method, and back in the form on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...checkpoint.source import Checkpoint
from ...errors import CheckpointError, UnsupportedError
from ..family.attention_layer import AttentionLayer
from ..family.family import Family, full_width_norm
from ..family.rotary import NOT_ROTATED
from .attention import Attention
from .context import LayerMethod, MethodContext, Pool
from .grouping import similarity_order
from .norms import is_norm, merged_norms
from .permutation import permuted_attention, permuted_followers, permuted_heads
from .pooling import pool_attention, pool_mean
from .table import Method


def new_tensors(
    source: Checkpoint,
    family: Family,
    layer: AttentionLayer,
    groups: int,
    method: Method,
    context: MethodContext,
    *,
    grouping: str = "contiguous",
) -> dict[str, Tensor]:
    """Compute the tensors of one layer that change, by disk name, in the shapes of the result."""
    heads = _read_heads(source, family, layer)
    order: Sequence[int] = range(layer.kv_heads)
    followers: dict[str, Tensor] = {}
    if grouping == "similarity":
        order = similarity_order(_attention(source, family, layer, heads), groups, context)
        # A method that rewrites the layer writes q and o itself, so they must not be moved here as well.
        written = layer.rewritten if method.rewrites_queries else ()
        followers = permuted_followers(source, layer, order, family.query_heads, without=written)
    in_order = permuted_heads(heads, order, family.query_heads)
    full_width = full_width_norm(layer, source)
    if not method.rewrites_queries:
        merged = _pooled_heads(in_order, groups, method, context, full_width=full_width)
        return followers | _joined(layer, merged, family.query_heads, groups)
    attention = permuted_attention(_attention(source, family, layer, heads), order)
    made = convert_attention(method, attention, groups, context)
    # A norm over the full width decides the size of its keys, so it replaces those that the method made.
    norms = merged_norms(in_order, groups, method.norms, pool_mean, context, full_width=full_width)
    return followers | disk_tensors(family, layer, made, norms)


def convert_attention(method: Method, attention: Attention, groups: int, context: MethodContext) -> Attention:
    """Apply a method to a layer: K KV heads → ``groups``, neighbours together."""
    if method.rewrites_queries:
        rewrite: LayerMethod = method.load()
        return rewrite(attention, groups, context)
    return pool_attention(attention, groups, method.load(), context)


def _pooled_heads(
    heads: Mapping[str, Tensor], groups: int, method: Method, context: MethodContext, *, full_width: bool
) -> dict[str, Tensor]:
    """Merge each tensor of keys and values alone, by role. Queries in fused tensors stay."""
    pool: Pool = method.load()
    merged = dict(heads)
    for role in heads:
        if not role.startswith("q") and not is_norm(role):
            merged[role] = pool(heads[role], groups, context.for_role(role))
    return merged | merged_norms(heads, groups, method.norms, pool, context, full_width=full_width)


def _read_heads(source: Checkpoint, family: Family, layer: AttentionLayer) -> dict[str, Tensor]:
    """Read every tensor that depends on the number of KV heads: role → (heads, R, …), in the dtype on disk."""
    found: dict[str, Tensor] = {}
    for stored in layer.stored:
        tensors = [read_finite(source, name) for name in stored.names]
        found |= stored.split(tensors, family.query_heads, layer.kv_heads)
    return found


def read_finite(source: Checkpoint, name: str) -> Tensor:
    """Map a tensor that is about to be merged.

    Raises:
        CheckpointError: it holds NaN or infinity, which would spread over every head of its group.
    """
    tensor = source.read(name)
    if not torch.isfinite(tensor).all():
        wrong = int(tensor.numel() - torch.isfinite(tensor).sum())
        raise CheckpointError(
            f"{name} in {source.tensors[name].file} holds {wrong:,} of {tensor.numel():,} numbers that are NaN or "
            "infinite.",
            "Such a checkpoint is broken: fetch it again, or save it again in a dtype that holds its numbers.",
        )
    return tensor


def read_attention(source: Checkpoint, family: Family, layer: AttentionLayer) -> Attention:
    """Read one layer of a checkpoint as heads, in float32 (float64 stays).

    Gates and sinks beside the projections are left out, and keys that serve as values come twice. So only a
    layer without a ``rewrite_obstacle`` can be written back from the result.

    Raises:
        UnsupportedError: the query or output projection is not known.
    """
    return _attention(source, family, layer, _read_heads(source, family, layer))


def _attention(
    source: Checkpoint, family: Family, layer: AttentionLayer, stored_heads: Mapping[str, Tensor]
) -> Attention:
    """Complete the heads that :func:`_read_heads` gives to a whole layer, see :func:`read_attention`."""
    heads = dict(stored_heads)
    heads.setdefault("v", heads["k"])  # classes that take their values from the keys
    for role, name in (("q", layer.q), ("q_bias", layer.q_bias)):
        if name is not None and role not in heads:
            # A query projection may hold a gate behind each head's queries (Qwen3-Next): take the queries only.
            heads[role] = read_finite(source, name).unflatten(0, (family.query_heads, -1))[:, : layer.head_dim]
    if not {"q", "k", "v"} <= heads.keys() or layer.o is None:
        raise UnsupportedError(
            f"{layer.module} has no query or output projection that is known: {layer.rewrite_obstacle}."
        )
    wide = {role: _widened(tensor) for role, tensor in heads.items()}
    # Norms with weights of every head differ from member to member, so K must not be turned: an absent norm says that.
    shared_norms = "k_norm" not in heads
    return Attention(
        q_HDC=wide["q"],
        k_KDC=wide["k"],
        v_KDC=wide["v"],
        o_CHD=_widened(read_finite(source, layer.o)).unflatten(1, (family.query_heads, -1)),
        q_bias_HD=wide.get("q_bias"),
        k_bias_KD=wide.get("k_bias"),
        v_bias_KD=wide.get("v_bias"),
        rotary=layer.rotary or NOT_ROTATED,
        keys_normed=layer.keys_normed,
        q_norm_D=_widened(read_finite(source, layer.q_norm)) if layer.q_norm and shared_norms else None,
        k_norm_D=_widened(read_finite(source, layer.k_norm)) if layer.k_norm and shared_norms else None,
    )


def disk_tensors(
    family: Family, layer: AttentionLayer, attention: Attention, norms: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Write a layer back: every tensor that holds a part of ``attention``, by disk name.

    Args:
        norms: by role, tensors that ``attention`` lacks, or that replace those in it.
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
    made = _joined(layer, heads, family.query_heads, attention.kv_heads)
    # Fused tensors hold q as well and are complete by now.
    for role, name in (("q", layer.q), ("q_bias", layer.q_bias)):
        if name is not None and name not in made:
            made[name] = heads[role].flatten(0, 1)
    if layer.o is not None:
        made[layer.o] = attention.o_CHD.flatten(1)
    return made


def _joined(layer: AttentionLayer, heads: Mapping[str, Tensor], query_heads: int, groups: int) -> dict[str, Tensor]:
    made: dict[str, Tensor] = {}
    for stored in layer.stored:
        made |= stored.join(heads, query_heads, groups)
    return made


def _widened(tensor: Tensor) -> Tensor:
    """Convert to float32, so that half types are rounded once, when the result is stored."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()
