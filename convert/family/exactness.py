"""Decide whether a block's queries and outputs may be rewritten together with its keys and values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from transformers import PreTrainedModel

from ...checkpoint.header import TensorInfo

if TYPE_CHECKING:
    from .attention_layer import AttentionLayer

QUERIES = ("q_proj", "q_proj.linear", "q")
"""Names that classes give to the projection that makes the queries."""
OUTPUTS = ("o_proj", "out_proj", "dense", "c_proj", "wo", "o")
"""Names that classes give to the projection that takes the heads' outputs."""
_KNOWN = re.compile(
    rf"([qkv]_proj|[qkv]|qkv_proj|Wqkv|query_key_value|c_attn|{'|'.join(OUTPUTS)})\.(weight|bias)|[qk]_norm\.weight"
)
"""Parameters of an attention block that a change of basis inside its heads accounts for."""
_PLACES = re.compile(r"relative_attention_bias\.weight")
"""A number for a query head and a distance, added to the score (T5): no basis matters to it, either."""
_HEADS_NORM = re.compile(r"[qk]_(layer)?norm(\.norms\.\d+)?\.(weight|bias)")
"""The same where norms have weights of every head: then only the values change their basis."""
_SCALARS = re.compile(r"sinks|(g|sink)_proj\.weight")
"""One number for a query head and a token: a sink beside its scores, a gate on its output. No basis matters to it."""


def reason_against_rewriting(
    model: PreTrainedModel, block: AttentionLayer, tensors: Mapping[str, TensorInfo], query_heads: int
) -> str | None:
    """Why a change of basis inside the heads would not be exact, or None."""
    config = model.config.get_text_config()
    module = model.get_submodule(block.module)
    own = dict(module.named_parameters())
    head_norms = "k_norm" in block.roles()
    scalars = {name for name, weight in own.items() if _SCALARS.fullmatch(name) and len(weight) == query_heads}
    accounted = {name for name in own if _KNOWN.fullmatch(name) or (head_norms and _HEADS_NORM.fullmatch(name))}
    unknown = {name for name in own.keys() - accounted - scalars if not _PLACES.fullmatch(name)}
    fused = block.q == block.k
    if block.q is None or block.o is None or ("q_proj.bias" in own and block.q_bias is None):
        return "its query and output projections are not recognised"
    if unknown:
        return f"{min(unknown)} acts inside the attention block"
    if block.v == block.k and not fused:
        return "its values are its keys"
    if getattr(module, "v_norm", None) is not None:
        return "it normalises its values"
    if not fused and tensors[block.q].shape[0] != query_heads * block.head_dim:
        return f"{block.q} holds more than the queries"
    if tensors[block.o].shape[1] != query_heads * block.value_dim:
        return f"{block.o} does not read the heads directly"
    if block.rotary is None:
        return "the layout of its rotary position embedding is not certain"
    if getattr(config, "clip_qkv", None) is not None or getattr(module, "clip_qkv", None) is not None:
        return "it clips queries, keys and values (clip_qkv)"
    if getattr(config, "num_kv_shared_layers", None):
        return "some layers use the keys and values of others (num_kv_shared_layers)"
    if block.keys_normed and block.k_norm is None and not head_norms:
        return "it normalises keys in a way that is not known"
    return None
