"""Options that would change nothing, given what else was given: they are refused, since whoever gave them expects
something of them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from ..errors import UsageError
from .settings import UptrainSettings


class _Idle(NamedTuple):
    """Settings that do nothing ``when`` something holds; ``since`` says what, ``cure`` what to do instead."""

    settings: tuple[str, ...]
    when: Callable[[UptrainSettings], bool]
    since: str
    cure: str


TAUGHT = ("distillation_weight", "temperature", "divergence", "hidden_weight")
"""Settings that say how to learn from a teacher."""

_IDLE = (
    _Idle(TAUGHT, lambda one: one.teacher is None, "there is no teacher", "name one with --teacher"),
    _Idle(
        ("eval_every", "eval_tokens"), lambda one: one.eval_data is None, "no held-out text is named", "add --eval-data"
    ),
    _Idle(
        ("pretraining_tokens",),
        lambda one: one.fraction is None,
        "the budget is not given as a share of them",
        "give --fraction instead of --tokens or --steps",
    ),
    _Idle(
        ("final_learning_rate",),
        lambda one: one.schedule == "constant",
        "a constant learning rate stays at its peak",
        "take another --schedule",
    ),
    _Idle(
        ("beta1", "beta2"),
        lambda one: one.optimizer == "adafactor",
        "Adafactor keeps no mean gradient and has its own decay",
        "take --optimizer adamw",
    ),
    _Idle(
        ("noise_density", "mean_span"),
        lambda one: one.target_column is not None,
        "with a target column no spans are cut out",
        "leave --target-column out",
    ),
)


def refuse_idle(settings: UptrainSettings, given: Collection[str]) -> None:
    """Raise where a setting that was given would change nothing.

    Args:
        given: names of the settings that were given, as opposed to left at their defaults.

    Raises:
        UsageError: one would.
    """
    for row in _IDLE:
        idle = [name for name in row.settings if name in given]
        if idle and row.when(settings):
            options = " and ".join("--" + name.replace("_", "-") for name in idle)
            raise UsageError(f"{options} would change nothing: {row.since}.", f"Leave {options} out, or {row.cure}.")
