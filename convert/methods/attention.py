"""One attention layer as heads: the form in which every method sees it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..family.rotary import NOT_ROTATED, Rotary


@dataclass(frozen=True)
class Attention:
    """The q, k, v and o projections of one layer, in ``torch.nn.Linear`` layout, split into heads.

    Query head i uses KV head i // (H/K). A bias is None where the projection has none. The output projection's own
    bias is absent because no method changes it.

    Attributes:
        o_CHD: columns of the output projection by query head.
        keys_normed: a norm acts on each head of q and k after the projection, so the size of K has no effect.
        q_norm_D: weights of that norm for the queries, shared by all heads. None where the norm is not known: then
            no basis change of K is known to be exact.
        k_norm_D: the same for the keys.
    """

    q_HDC: Tensor
    k_KDC: Tensor
    v_KDC: Tensor
    o_CHD: Tensor
    q_bias_HD: Tensor | None = None
    k_bias_KD: Tensor | None = None
    v_bias_KD: Tensor | None = None
    rotary: Rotary = NOT_ROTATED
    keys_normed: bool = False
    q_norm_D: Tensor | None = None
    k_norm_D: Tensor | None = None

    @property
    def query_heads(self) -> int:
        return self.q_HDC.shape[0]

    @property
    def kv_heads(self) -> int:
        return self.k_KDC.shape[0]
