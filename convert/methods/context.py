"""Inputs of a method besides the weights, and the types of its function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from .attention import Attention

_SEEDED_ROLES = ("k", "v", "k_bias", "v_bias", "k_conv", "v_conv", "k_taps", "v_taps")
"""Roles that get random numbers of their own. The order is part of every result of ``random``: append, never insert."""


@dataclass(frozen=True)
class MethodContext:
    """Inputs of a method besides the weights.

    Attributes:
        layer: index of the layer, so that a random method differs from layer to layer.
        seed: seed of the random numbers.
        initializer_range: standard deviation of a fresh weight, from the config.
        second_moment: E[x xᵀ] at the attention's input, (C+1)×(C+1) float64 with the constant 1 as last index. In
            cross-attention (2, C+1, C+1): the input of keys and values, then the input of queries. None means the
            identity (no text).
    """

    layer: int
    seed: int = 0
    initializer_range: float = 0.02
    second_moment: Tensor | None = None

    def for_role(self, role: str) -> MethodContext:
        """Give the tensor of this role a seed of its own, so that no two tensors of a layer are alike."""
        if role not in _SEEDED_ROLES:
            return self
        # One number for (seed, layer, role): the factors exceed the numbers of layers and of roles.
        return replace(self, seed=(self.seed * 1_000_003 + self.layer) * 8 + _SEEDED_ROLES.index(role))


Pool = Callable[[Tensor, int, MethodContext], Tensor]
"""(K, R, …) tensor of all KV heads, groups G → (G, R, …) in float32 or float64."""

LayerMethod = Callable[[Attention, int, MethodContext], Attention]
"""Attention with K KV heads, groups G → the same attention with G KV heads, queries and outputs rewritten."""
