"""Plan a conversion: what the result's attention is, and what happens to every tensor of the source."""

from .plan import Plan, make_plan
from .result_attention import Action, ResultAttention

__all__ = ["Action", "Plan", "ResultAttention", "make_plan"]
