"""The table of methods: one row says everything that the rest of headfold needs to know about a method.

The table names functions and does not import them, so that ``headfold convert --help`` can list the methods without
loading torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal


@dataclass(frozen=True)
class AllowedTurns:
    """The basis changes that a method applies to a head before it merges it, in words for the plan and the record.

    Attributes:
        of_planes: applied to each rotary plane of K.
        of_rows: applied to V, and to the rows of K that are not rotated.
    """

    of_planes: str
    of_rows: str


@dataclass(frozen=True, kw_only=True)
class Method:
    """One method. No field has a default: a new row must answer every question.

    Attributes:
        function: ``module:function``, relative to this package where it starts with a dot. A method that rewrites
            queries names a function (attention, groups, context) → attention. Any other names a function
            (heads, groups, context) → heads, which is applied to each per-head tensor of K and V alone.
        summary: one line for ``--help``.
        rewrites_queries: it works on a whole attention layer and changes q and o as well as k and v.
        reads_text: it uses the second moments of calibration text where there are any.
        without_text: a sentence, without its full stop, on what the result is good for where no text was read.
        turns: the basis changes that it applies to the heads; None for a method that applies none.
        norms: how the weights of key norms that belong to single heads are merged: ``pooled`` by the method's own
            function, ``averaged`` as by ``mean``, or ``fresh`` as the model class starts them.
        default_grouping: the grouping where the user names none and the heads may change places.
        refined_by_default: the result is refined where there is text and the user does not say otherwise.
    """

    name: str
    function: str
    summary: str
    rewrites_queries: bool
    reads_text: bool
    without_text: str
    turns: AllowedTurns | None
    norms: Literal["pooled", "averaged", "fresh"]
    default_grouping: Literal["contiguous", "similarity"]
    refined_by_default: bool

    def __post_init__(self) -> None:
        if self.rewrites_queries and self.norms == "pooled":
            raise ValueError(f"The method {self.name} works on whole layers, so it has no function to pool norms with.")

    def load(self) -> Any:
        """Import the function; its types are in :mod:`headfold.convert.methods.context`."""
        module, _, function = self.function.partition(":")
        return getattr(import_module(module, __package__), function)


_PROCRUSTES = AllowedTurns(of_planes="a phase", of_rows="a rotation")
_ALL_EXACT = AllowedTurns(of_planes="a complex number", of_rows="any invertible map")

_ROWS = (
    Method(
        name="mean",
        function=".pooling:pool_mean",
        summary="average the heads of a group",
        rewrites_queries=False,
        reads_text=False,
        without_text="Averaged heads are a start for uptraining, not a usable model",
        turns=None,
        norms="pooled",
        default_grouping="contiguous",
        refined_by_default=False,
    ),
    Method(
        name="first",
        function=".pooling:pool_first",
        summary="take the first head of a group",
        rewrites_queries=False,
        reads_text=False,
        without_text="One head of each group is a start for uptraining, not a usable model",
        turns=None,
        norms="pooled",
        default_grouping="contiguous",
        refined_by_default=False,
    ),
    Method(
        name="random",
        function=".pooling:pool_random",
        summary="start each group from fresh random weights (a baseline)",
        rewrites_queries=False,
        reads_text=False,
        without_text="Random keys and values are a baseline for uptraining, not a usable model",
        turns=None,
        norms="fresh",
        default_grouping="contiguous",
        refined_by_default=False,
    ),
    Method(
        name="aligned",
        function=".aligned:aligned",
        summary="turn the heads of a group towards each other, then average them",
        rewrites_queries=True,
        reads_text=True,
        without_text="Heads that were averaged by their weights alone are a start for uptraining, not a usable model",
        turns=_PROCRUSTES,
        norms="averaged",
        default_grouping="contiguous",
        refined_by_default=False,
    ),
    # Records name it so; on the command line it is --method aligned --rescale.
    Method(
        name="aligned+rescale",
        function=".aligned:aligned_and_rescaled",
        summary="the same, then give the average the mean norm of its members",
        rewrites_queries=True,
        reads_text=True,
        without_text="Heads that were averaged by their weights alone are a start for uptraining, not a usable model",
        turns=_PROCRUSTES,
        norms="averaged",
        default_grouping="contiguous",
        refined_by_default=False,
    ),
    Method(
        name="folded",
        function=".folded:folded",
        summary="compute the shared head that loses least, and fold the basis changes into queries and outputs",
        rewrites_queries=True,
        reads_text=True,
        without_text="Without text, folded can be worse than mean: a start for uptraining, not a usable model",
        turns=_ALL_EXACT,
        norms="averaged",
        default_grouping="similarity",  # measured against contiguous, see docs/results.md
        refined_by_default=True,
    ),
)

METHODS: dict[str, Method] = {row.name: row for row in _ROWS}
