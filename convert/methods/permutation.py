"""Decide whether the heads of a block may change places, and which tensors go along with the query heads.

Heads change places exactly when everything that has a part for each of them moves with them: q and o, and beside
them gates, sinks, norms and relative biases of every head. Such tensors are known by name, and a type that has
another one is refused. Letters of shapes as in heads.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor
from transformers import PreTrainedModel

from ...checkpoint.header import TensorInfo
from ...checkpoint.source import Checkpoint
from ...libraries.transformers_internals import gates_behind_queries
from ..family.exactness import OUTPUTS
from ..family.layout import Stored
from .attention import query_order

if TYPE_CHECKING:
    from ..family.attention_layer import AttentionLayer

_OUTPUT = rf"({'|'.join(OUTPUTS)})"
_BY_HEAD: tuple[tuple[str, int], ...] = (
    (r"(q_proj|q)(\.linear)?\.(weight|bias)", 0),
    (rf"{_OUTPUT}(\.linear)?\.weight", 1),
    (r"(gate|g|sink|o_proj\.gate)_proj\.weight|gate_bias|s_gate|sqk|sinks", 0),
    (r"r_proj\.weight|relative_position_bias\.(linear\.weight|norm\.scale)", 0),
    (r"q_proj\.norm\.scale|attn_sub_norm\.weight", 0),
)
"""Parameters of an attention block with a part for each query head, and the axis along which the parts lie."""
_NORM = re.compile(r"q(uery)?_(layer)?norm\.(weight|bias)")
"""The same of the first axis where the keys' norm has weights of every head as well; else it may norm the input."""
_NUMBERED = re.compile(r"q_layernorm\.norms\.\d+\.(weight|bias)")
_SHARED = re.compile(
    rf"[qk](uery|ey)?_(layer)?norm\.(weight|bias)|{_OUTPUT}\.bias|indexer\..+|(rel_logits_proj|relative_position_bias)\.proj"
)
"""Parameters that all heads share; the norms are so where they are one head wide."""


def places(
    model: PreTrainedModel,
    block: AttentionLayer,
    tensors: Mapping[str, TensorInfo],
    on_disk: Callable[[str], str | None],
    query_heads: int,
) -> tuple[tuple[Stored, ...], str | None]:
    """What moves with the query heads, and why heads cannot change places.

    Args:
        on_disk: name in the model class → name in the files, None where it is absent there.

    Returns:
        The tensors beside ``block.stored`` that have a part for each query head, and a reason or None.
    """
    module = model.get_submodule(block.module)
    reason = _reason(model, block, tensors, query_heads)
    merged, found = set(block.merged), list[Stored]()
    numbered: dict[str, list[str]] = {}
    for name, parameter in module.named_parameters():
        disk = on_disk(f"{block.module}.{name}")
        if disk in merged or (disk is None and name.endswith("bias")):
            continue  # a bias that config.json promises and the files lack is found by the check of the result
        if disk is None:
            reason = reason or f"how the files hold {name} is not known"
        elif _NUMBERED.fullmatch(name):
            numbered.setdefault(name.rpartition(".")[2], []).append(disk)
        elif _SHARED.fullmatch(name) and (len(parameter) == block.head_dim or "norm." not in name):
            continue
        elif (axis := _axis(name, tuple(parameter.shape), query_heads, "k_norm" in block.roles())) is not None:
            found.append(Stored((disk,), name, axis))
        else:
            reason = reason or f"how {name} belongs to the heads is not known"
    found += [Stored(tuple(names), f"q_layernorm.{kind}", numbered=True) for kind, names in numbered.items()]
    if any(len(one.names) != query_heads for one in found if one.numbered):
        reason = reason or "its query heads have norms of another number"
    return tuple(found), reason


def _axis(name: str, shape: tuple[int, ...], query_heads: int, keys_alike: bool) -> int | None:
    """Along which axis the parts of the query heads lie."""
    axis = next((axis for pattern, axis in _BY_HEAD if re.fullmatch(pattern, name)), None)
    if keys_alike and _NORM.fullmatch(name):
        axis = 0
    return axis if axis is not None and shape[axis] % query_heads == 0 else None


def _reason(
    model: PreTrainedModel, block: AttentionLayer, tensors: Mapping[str, TensorInfo], query_heads: int
) -> str | None:
    """Why heads cannot change places, or why nothing is known of how alike they are."""
    config = model.config.get_text_config()
    module = model.get_submodule(block.module)
    if block.q is None or block.o is None:
        return "its query and output projections are not recognised"
    if getattr(config, "alibi", None) or getattr(config, "alibi_slopes", None):
        return "its ALiBi positions depend on the place of a head"
    if hasattr(module, "relative_attention_bias"):
        return "its relative positions have a bias for every head, which all layers share"
    if getattr(config, "num_kv_shared_layers", None):
        return "some layers use the keys and values of others (num_kv_shared_layers)"
    rows = query_heads * block.head_dim * (2 if gates_behind_queries(module) else 1)
    if block.q != block.k and tensors[block.q].shape[0] != rows:
        return f"{block.q} holds more than the queries"
    if tensors[block.o].shape[1] != query_heads * block.value_dim:
        return f"{block.o} does not read the heads directly"
    if block.rotary is None:
        return "the layout of its rotary position embedding is not certain"
    return None


def moved(
    source: Checkpoint, block: AttentionLayer, order: Sequence[int], query_heads: int, *, besides: Collection[str] = ()
) -> dict[str, Tensor]:
    """The tensors that go along when KV head ``order[j]`` moves to place ``j``, by disk name.

    Args:
        besides: those that are not wanted.
    """
    queries = query_order(order, query_heads)
    made: dict[str, Tensor] = {}
    for one in block.followers:
        if not set(one.names) & set(besides):
            heads = one.split([source.read(name) for name in one.names], query_heads, query_heads)
            made |= one.join({one.layout: heads[one.layout][queries]}, query_heads, query_heads)
    return made


def reordered(heads: Mapping[str, Tensor], order: Sequence[int], query_heads: int) -> dict[str, Tensor]:
    """Role → heads of the merged tensors, in the new order; of fused ones the queries, too."""
    if list(order) == sorted(order):
        return dict(heads)
    queries = query_order(order, query_heads)
    return {role: tensor[queries if role.startswith("q") else list(order)] for role, tensor in heads.items()}
