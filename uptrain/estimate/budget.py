"""From the share of the pretraining budget to optimizer steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...errors import UsageError
from ..settings import UptrainSettings


@dataclass(frozen=True)
class Budget:
    """How long a run is.

    Attributes:
        steps: optimizer steps.
        tokens_per_step: tokens that one step consumes over all processes.
    """

    steps: int
    tokens_per_step: int

    @property
    def tokens(self) -> int:
        """Tokens that the run consumes: whole steps, so at most one step more than asked for."""
        return self.steps * self.tokens_per_step


def plan_budget(settings: UptrainSettings) -> Budget:
    """Resolve the one way in which the budget is given (fraction: Ainslie et al. 2023, §2.2, alpha).

    Raises:
        UsageError: no budget, more than one, or a fraction without the number of pretraining tokens.
    """
    refuse_other_than_one(settings)
    per_step = settings.batch * settings.sequence_length
    if settings.steps is not None:
        return Budget(settings.steps, per_step)
    tokens = settings.tokens
    if settings.fraction is not None:
        if settings.pretraining_tokens is None:
            raise UsageError(
                "--fraction is a share of the pretraining tokens, and their number is not known.",
                "Add --pretraining-tokens N (its model card says how many), or give --tokens.",
            )
        tokens = round(settings.fraction * settings.pretraining_tokens)
    assert tokens is not None
    return Budget(max(1, math.ceil(tokens / per_step)), per_step)


def refuse_uneven(batch: int, processes: int) -> None:
    """Every process takes as many blocks of a step.

    Raises:
        UsageError: they cannot.
    """
    if batch % processes:
        raise UsageError(
            f"A batch of {batch} blocks cannot be shared evenly by {processes} processes.",
            "Give a --batch that the number of processes divides.",
        )


def refuse_other_than_one(settings: UptrainSettings) -> None:
    """Whatever is trained: its budget is given in one way.

    Raises:
        UsageError: it is given in none, or in several.
    """
    given = [name for name in ("fraction", "tokens", "steps") if getattr(settings, name) is not None]
    if len(given) != 1:
        found = "none was given" if not given else f"{' and '.join(given)} were given"
        raise UsageError(
            f"A run needs exactly one budget, and {found}.",
            "Give --fraction 0.05 with --pretraining-tokens N, or --tokens N, or --steps N.",
        )
