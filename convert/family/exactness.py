"""Decide whether a layer's queries and outputs may be rewritten together with its keys and values."""

from __future__ import annotations

import re
from collections.abc import Mapping

from transformers import PreTrainedModel

from ...checkpoint.header import TensorInfo
from .attention_layer import AttentionLayer

QUERIES = ("q_proj", "q_proj.linear", "q")
"""Names that classes give to the projection that makes the queries."""
OUTPUTS = ("o_proj", "out_proj", "dense", "c_proj", "wo", "o")
"""Names that classes give to the projection that takes the heads' outputs."""
_KNOWN = re.compile(
    rf"([qkv]_proj|[qkv]|qkv_proj|Wqkv|query_key_value|c_attn|{'|'.join(OUTPUTS)})\.(weight|bias)|[qk]_norm\.weight"
)
"""Parameters of an attention layer that a change of basis inside its heads accounts for."""
_PLACES = re.compile(r"relative_attention_bias\.weight")
"""A number for a query head and a distance, added to the score (T5): no basis matters to it, either."""
_HEADS_NORM = re.compile(r"[qk]_(layer)?norm(\.norms\.\d+)?\.(weight|bias)")
"""The same where norms have weights of every head: then only the values change their basis."""
_SCALARS = re.compile(r"sinks|(g|sink)_proj\.weight")
"""One number for a query head and a token: a sink beside its scores, a gate on its output. No basis matters to it."""


def reason_against_rewriting(
    model: PreTrainedModel, layer: AttentionLayer, tensors: Mapping[str, TensorInfo], query_heads: int
) -> str | None:
    """Return why a basis change would be inexact, or None if it is exact."""
    config = model.config.get_text_config()
    module = model.get_submodule(layer.module)
    own = dict(module.named_parameters())
    head_norms = "k_norm" in layer.roles()
    scalars = {name for name, weight in own.items() if _SCALARS.fullmatch(name) and len(weight) == query_heads}
    accounted = {name for name in own if _KNOWN.fullmatch(name) or (head_norms and _HEADS_NORM.fullmatch(name))}
    unknown = {name for name in own.keys() - accounted - scalars if not _PLACES.fullmatch(name)}
    # Keys that serve as values also share a tensor, but a fused tensor has rows of its own for each.
    fused = layer.q == layer.k
    if layer.q is None or layer.o is None or ("q_proj.bias" in own and layer.q_bias is None):
        return "its query and output projections are not recognised"
    if unknown:
        return f"{min(unknown)} acts inside the attention layer"
    if layer.v == layer.k and not fused:
        return "its values are its keys"
    if getattr(module, "v_norm", None) is not None:
        return "it normalises its values"
    if not fused and tensors[layer.q].shape[0] != query_heads * layer.head_dim:
        return f"{layer.q} holds more than the queries"
    # Another width means that something lies between the heads and this projection.
    if tensors[layer.o].shape[1] != query_heads * layer.value_dim:
        return f"{layer.o} does not read the heads directly"
    if layer.rotary is None:
        return "the layout of its rotary position embedding is not certain"
    if getattr(config, "clip_qkv", None) is not None or getattr(module, "clip_qkv", None) is not None:
        return "it clips queries, keys and values (clip_qkv)"
    if getattr(config, "num_kv_shared_layers", None):
        return "some layers use the keys and values of others (num_kv_shared_layers)"
    if layer.keys_normed and layer.k_norm is None and not head_norms:
        return "it normalises keys in a way that is not known"
    return None
