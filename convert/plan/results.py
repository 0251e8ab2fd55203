"""The kinds of results, one row each."""

from __future__ import annotations

from ..family.model_type import ModelType
from .another_type import AnotherType
from .fewer_heads import FewerHeads
from .result_attention import ResultAttention

RESULTS: tuple[type[ResultAttention], ...] = (AnotherType, FewerHeads)
"""The first kind that suits a type is taken."""


def kind_of_result(model_type: ModelType) -> type[ResultAttention]:
    """Choose the kind of result for checkpoints of this type."""
    return next(kind for kind in RESULTS if kind.suits(model_type))
