"""An attention layer of a checkpoint: the names of its tensors on disk, and what may be changed in it."""

from __future__ import annotations

from dataclasses import dataclass

from .layout import StoredHeads
from .rotary import Rotary


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer, by the names of its tensors on disk.

    Attributes:
        layer: position among the attention layers, from 0.
        module: the attention in the model class, for example ``model.layers.0.self_attn``.
        k, v, q: the tensors that hold these projections; the same one where they are fused. ``v`` is ``k`` where the
            class uses its keys as values.
        head_dim, value_dim: rows of one key head and of one value head.
        rotary: None when the layout is not certain.
        keys_normed: a norm acts on each key head after the projection; ``q_norm`` and ``k_norm`` name its weights.
        rewrite_obstacle: None when q and o may be rewritten together with k and v, else the reason against it.
        kv_heads: KV heads of this layer (some types have two kinds of layers).
        side: whose keys and values it reads: ``self``, or in an encoder-decoder also ``cross`` and ``encoder``.
        reads: the submodule whose input is the layer's input, for example ``q_proj``.
        stored: every tensor that depends on the number of KV heads, and how heads lie in it.
        followers: tensors with a part for every query head, which move along when heads change places.
        order_obstacle: None when heads may change places, else the reason against it.
        ignored: the class drops this layer on loading (multi-token prediction), so it has no module and sees no text.
    """

    layer: int
    module: str
    k: str
    v: str
    k_bias: str | None
    v_bias: str | None
    q: str | None
    q_bias: str | None
    o: str | None
    head_dim: int
    value_dim: int
    rotary: Rotary | None
    keys_normed: bool
    q_norm: str | None
    k_norm: str | None
    rewrite_obstacle: str | None
    kv_heads: int
    side: str
    reads: str
    stored: tuple[StoredHeads, ...]
    followers: tuple[StoredHeads, ...] = ()
    order_obstacle: str | None = None
    ignored: bool = False

    @property
    def merged(self) -> tuple[str, ...]:
        """The tensors that change with the number of KV heads."""
        return tuple(name for stored in self.stored for name in stored.names)

    @property
    def rewritten(self) -> tuple[str, ...]:
        """The tensors that keep their shape but change when the method works on the whole layer."""
        names = (self.q, self.q_bias, self.o)
        return tuple(name for name in names if name is not None and name not in self.merged)

    def roles(self) -> set[str]:
        """Roles of the merged tensors: ``k``, ``v``, ``k_bias``, ``k_norm``, …"""
        return {role for stored in self.stored for role, _ in stored.spans(self.kv_heads, self.kv_heads)}
