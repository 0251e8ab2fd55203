"""Turn the budget of a run, a share of the pretraining tokens or a number, into optimizer steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...errors import UsageError
from ..settings import UptrainSettings


@dataclass(frozen=True)
class Budget:
    """The length of a run.

    Attributes:
        steps: optimizer steps.
        tokens_per_step: tokens of one step, over all processes.
    """

    steps: int
    tokens_per_step: int

    @property
    def tokens(self) -> int:
        """Tokens of the run. It consists of whole steps, so this may be up to one step more than the user gave."""
        return self.steps * self.tokens_per_step


def plan_budget(settings: UptrainSettings) -> Budget:
    """Compute the steps of a run. The fraction is the alpha of Ainslie et al. 2023, §2.2.

    Raises:
        UsageError: no budget, more than one, or a fraction without the number of pretraining tokens.
    """
    require_one_budget(settings)
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
    # require_one_budget has checked it
    assert tokens is not None
    # rounded up, so that a run never trains on less than the user gave
    return Budget(max(1, math.ceil(tokens / per_step)), per_step)


def refuse_uneven(batch: int, processes: int) -> None:
    """Check that every process can take the same number of sequences of a step.

    Raises:
        UsageError: it cannot.
    """
    if batch % processes:
        raise UsageError(
            f"A batch of {batch} sequences cannot be shared evenly by {processes} processes.",
            "Give a --batch that the number of processes divides.",
        )


def require_one_budget(settings: UptrainSettings) -> None:
    """Check that the budget is given in exactly one way.

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
