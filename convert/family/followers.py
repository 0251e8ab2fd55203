"""Decide whether the heads of a layer may change places, and which tensors move with the query heads.

Changing places is exact when everything that has a part for each head moves along: q and o, and beside them gates,
sinks, norms and relative biases of single heads. Such tensors are known by name. A type with any other is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from transformers import PreTrainedModel

from ...checkpoint.header import TensorInfo
from ...libraries.transformers_internals import gates_behind_queries
from .attention_layer import AttentionLayer
from .exactness import OUTPUTS
from .layout import StoredHeads

_OUTPUT = rf"({'|'.join(OUTPUTS)})"
_BY_HEAD: tuple[tuple[str, int], ...] = (
    (r"(q_proj|q)(\.linear)?\.(weight|bias)", 0),
    (rf"{_OUTPUT}(\.linear)?\.weight", 1),
    (r"(gate|g|sink|o_proj\.gate)_proj\.weight|gate_bias|s_gate|sqk|sinks", 0),
    (r"r_proj\.weight|relative_position_bias\.(linear\.weight|norm\.scale)", 0),
    (r"q_proj\.norm\.scale|attn_sub_norm\.weight", 0),
)
"""Parameters of an attention layer with a part for each query head, and the axis along which the parts lie."""
_NORM = re.compile(r"q(uery)?_(layer)?norm\.(weight|bias)")
"""Norms of queries. They have a part for each head, on axis 0, only where the keys' norm has one, too: elsewhere a
vector of this width may belong to a norm of the layer's input."""
_NUMBERED = re.compile(r"q_layernorm\.norms\.\d+\.(weight|bias)")
_SHARED = re.compile(
    rf"[qk](uery|ey)?_(layer)?norm\.(weight|bias)|{_OUTPUT}\.bias|indexer\..+|(rel_logits_proj|relative_position_bias)\.proj"
)
"""Parameters that all heads share; a norm is shared where it is one head wide."""


def followers_of_queries(
    model: PreTrainedModel,
    layer: AttentionLayer,
    tensors: Mapping[str, TensorInfo],
    on_disk: Callable[[str], str | None],
    query_heads: int,
) -> tuple[tuple[StoredHeads, ...], str | None]:
    """Find what moves with the query heads, or the reason why heads cannot change places.

    Args:
        on_disk: name in the model class → name in the files, None where it is absent there.

    Returns:
        The tensors beside ``layer.stored`` that have a part for each query head, and a reason or None.
    """
    module = model.get_submodule(layer.module)
    reason = _reason(model, layer, tensors, query_heads)
    merged, found = set(layer.merged), list[StoredHeads]()
    numbered: dict[str, list[str]] = {}
    for name, parameter in module.named_parameters():
        disk = on_disk(f"{layer.module}.{name}")
        if disk in merged or (disk is None and name.endswith("bias")):
            continue  # the check of the result finds a bias that config.json promises and the files lack
        if disk is None:
            reason = reason or f"how the files hold {name} is not known"
        elif _NUMBERED.fullmatch(name):
            numbered.setdefault(name.rpartition(".")[2], []).append(disk)
        elif _SHARED.fullmatch(name) and (len(parameter) == layer.head_dim or "norm." not in name):
            continue
        elif (axis := _axis(name, tuple(parameter.shape), query_heads, "k_norm" in layer.roles())) is not None:
            found.append(StoredHeads((disk,), name, axis))
        else:
            reason = reason or f"how {name} belongs to the heads is not known"
    found += [StoredHeads(tuple(names), f"q_layernorm.{kind}", numbered=True) for kind, names in numbered.items()]
    if any(len(one.names) != query_heads for one in found if one.numbered):
        reason = reason or "its query heads have norms of another number"
    return tuple(found), reason


def _axis(name: str, shape: tuple[int, ...], query_heads: int, per_head_norms: bool) -> int | None:
    """Find the axis along which the parts of the query heads lie, or None where no such axis is known."""
    axis = next((axis for pattern, axis in _BY_HEAD if re.fullmatch(pattern, name)), None)
    if per_head_norms and _NORM.fullmatch(name):
        axis = 0
    return axis if axis is not None and shape[axis] % query_heads == 0 else None


def _reason(
    model: PreTrainedModel, layer: AttentionLayer, tensors: Mapping[str, TensorInfo], query_heads: int
) -> str | None:
    """Return why heads cannot be reordered or compared, or None."""
    config = model.config.get_text_config()
    module = model.get_submodule(layer.module)
    if layer.q is None or layer.o is None:
        return "its query and output projections are not recognised"
    if getattr(config, "alibi", None) or getattr(config, "alibi_slopes", None):
        return "its ALiBi positions depend on the place of a head"
    if hasattr(model.get_submodule(layer.module), "relative_attention_bias"):
        return "its relative positions have a bias for every head, which all layers share"
    if getattr(config, "num_kv_shared_layers", None):
        return "some layers use the keys and values of others (num_kv_shared_layers)"
    rows = query_heads * layer.head_dim * (2 if gates_behind_queries(module) else 1)
    if layer.q != layer.k and tensors[layer.q].shape[0] != rows:
        return f"{layer.q} holds more than the queries"
    if tensors[layer.o].shape[1] != query_heads * layer.value_dim:
        return f"{layer.o} does not read the heads directly"
    if layer.rotary is None:
        return "the layout of its rotary position embedding is not certain"
    return None
