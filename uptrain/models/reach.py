"""Find the weights that a loss on text does not reach, such as the towers of a model that also sees, and freeze them.

Without a gradient they would not change, but processes that share out a batch (DDP) wait for every gradient, and fail.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...checkpoint.backbone import trial_inputs

_TRIED_TOKENS = 8
_NAMES_A_TOKEN = re.compile(r"token_(id|ids|index)$")
_EXPERT = re.compile(r"expert", re.IGNORECASE)


@dataclass(frozen=True)
class FrozenParts:
    """The part of a model that text does not reach.

    Attributes:
        places: the largest modules, or single parameters, that it consists of.
        parameters: their number of weights.
    """

    places: tuple[str, ...] = ()
    parameters: int = 0

    def describe(self) -> str:
        """Say what is frozen, in one line."""
        if not self.places:
            return "none"
        more = f" and {len(self.places) - 4} more" if len(self.places) > 4 else ""
        return f"{self.parameters:,} weights of {', '.join(self.places[:4])}{more}, which text does not reach"


def freeze_unreached(model: Any) -> FrozenParts:
    """Freeze the parameters that get no gradient from text, whatever the text.

    They are found by a forward pass over a few tokens and a walk through its autograd graph. No gradient is computed.
    An expert that no token was sent to is not frozen: other text reaches it. The model may be on the meta device.

    Returns:
        What is frozen. Nothing where the class cannot be run here.
    """
    reached = _reached(model)
    if reached is None:
        return FrozenParts()
    unreached = {name: weight for name, weight in model.named_parameters() if id(weight) not in reached}
    frozen = {name: weight for name, weight in unreached.items() if not _may_be_reached(model, name, reached)}
    for weight in frozen.values():
        weight.requires_grad_(False)
    return FrozenParts(tuple(_places(model, frozen)), sum(weight.numel() for weight in frozen.values()))


def _reached(model: Any) -> set[int] | None:
    """Find the parameters below the logits, by identity; None if the class cannot be run on a few tokens."""
    device = next(model.parameters()).device
    ids_1T = torch.tensor([_plain_ids(model.config)], device=device)
    with _all_trainable(model), torch.enable_grad():
        try:
            # without a cache, masks look for packed documents in the values, and a tensor on meta has none
            logits = model(**trial_inputs(model, ids_1T), use_cache=device.type == "meta").logits
        except Exception:  # a class that needs its own device or more inputs raises anything
            return None
    return _below(logits)


def _plain_ids(config: Any) -> list[int]:
    """Choose tokens that stand for no picture or sound."""
    text = config.get_text_config()
    special: set[Any] = set()
    for part in (config, text):
        for name, value in vars(part).items():
            if _NAMES_A_TOKEN.search(name):
                special.update(value if isinstance(value, list) else [value])
    vocabulary = getattr(text, "vocab_size", 0) or 0
    plain = [number for number in range(min(vocabulary, 1000)) if number not in special]
    return (plain or [0])[:_TRIED_TOKENS]


@contextmanager
def _all_trainable(model: nn.Module) -> Iterator[None]:
    """Let every weight get a gradient, and switch dropout off, while the model is tried."""
    training = [module for module in model.modules() if module.training]
    frozen = [weight for weight in model.parameters() if not weight.requires_grad and weight.is_floating_point()]
    model.eval()
    for weight in frozen:
        weight.requires_grad_(True)
    try:
        with torch.random.fork_rng():
            yield
    finally:
        for weight in frozen:
            weight.requires_grad_(False)
        for module in training:
            module.training = True


def _below(output: Tensor) -> set[int]:
    """Walk the autograd graph of ``output`` to its leaves."""
    found: set[int] = set()
    seen = {output.grad_fn}
    waiting = [output.grad_fn]
    while waiting:
        node = waiting.pop()
        weight = getattr(node, "variable", None)
        if weight is not None:
            found.add(id(weight))
        for below, _ in node.next_functions if node is not None else ():
            if below is not None and below not in seen:
                seen.add(below)
                waiting.append(below)
    return found


def _may_be_reached(model: nn.Module, name: str, reached: set[int]) -> bool:
    """Return True for an expert in a list of experts of which another was reached."""
    parts = name.split(".")
    for length in range(1, len(parts)):
        owner = model.get_submodule(".".join(parts[:length]))
        siblings = owner if isinstance(owner, nn.ModuleList) else ()
        named = _EXPERT.search(".".join(parts[:length])) or any(_EXPERT.search(type(one).__name__) for one in siblings)
        if named and any(id(weight) in reached for one in siblings for weight in one.parameters()):
            return True
    return False


def _places(model: nn.Module, frozen: Iterable[str]) -> Iterator[str]:
    """Yield the largest modules that are frozen as a whole, and single parameters elsewhere."""
    names = set(frozen)
    every = [name for name, _ in model.named_parameters()]
    done: set[str] = set()
    for name in sorted(names):
        if name in done:
            continue
        parts, place, inside = name.split("."), name, {name}
        for length in range(len(parts) - 1, 0, -1):
            prefix = ".".join(parts[:length])
            below = {other for other in every if other.startswith(f"{prefix}.")}
            if not below <= names:
                break
            place, inside = prefix, below
        done |= inside
        yield place
