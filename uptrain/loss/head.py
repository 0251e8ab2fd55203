"""A language model cut below its head, so that logits exist for a chunk of positions at a time.

The logits of a vocabulary of 256,000 tokens are the largest tensors of a step by far; no more than a chunk of them
ever stands in memory here, neither the student's nor the teacher's.

Letters of shapes: B blocks, T tokens, C hidden size, N positions, V vocabulary, X = C, or V for a model run whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ...checkpoint.backbone import Backbone, trial_inputs

_ROUNDING = 2**-6
"""Share of the largest logit by which two bf16 matrix products of different shape may differ."""


class Split:
    """Runs a model up to its head, and the head on some positions.

    The head is the model's own code, soft-capping and scaling included: its ``forward`` is called with a backbone that
    hands out hidden states computed before. That this gives the model's logits is tried on three tokens; where it does
    not, the model is run whole, and :attr:`whole` says so.

    Args:
        model: as loaded, before anything wraps it. Its forward pass stays usable.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._forward = model.forward  # bound now: accelerate puts another one in its place
        self.head: Any = model.get_output_embeddings()
        self._backbone = Backbone.of(model) if isinstance(self.head, nn.Module) else None
        self._name = next((name for name, module in model.named_modules() if module is self.head), "")
        if self._backbone is not None and not self._can_be_cut():
            self._backbone = None

    @property
    def vocabulary(self) -> int:
        """Width of the logits."""
        head = self._model.get_input_embeddings() if self.head is None else self.head
        return int(head.weight.shape[0])

    @property
    def whole(self) -> bool:
        """True where the model has to be run whole, with all of its logits in memory."""
        return self._backbone is None

    def features(self, **inputs: Any) -> Tensor:
        """What :meth:`logits` takes, (B, T, X): hidden states, or logits of a model run whole."""
        if self._backbone is None:
            logits_BTV: Tensor = self._forward(**inputs).logits
            return logits_BTV
        states_BTC: Tensor = self._backbone(**inputs).last_hidden_state
        return states_BTC

    def logits(self, states_NX: Tensor) -> Tensor:
        """Logits (N, V) of these positions."""
        if self._backbone is None:
            return states_NX
        with self._backbone.answering(states_NX[None]) as inputs, self._bare_head():
            logits_1NV: Tensor = self._forward(**inputs, use_cache=False).logits
        return logits_1NV[0]

    def head_parameters(self) -> list[nn.Parameter]:
        """Parameters that the head's gradient reaches; those in use now, which sharding may swap for others."""
        return [] if self.whole else list(self.head.parameters())

    def _can_be_cut(self) -> bool:
        training = self._model.training
        self._model.eval()
        try:
            return self._gives_the_logits() and self._owns_its_gradient()
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError):
            return False  # the model's code asks its backbone for more than hidden states, or its head for less
        finally:
            self._model.train(training)

    @torch.no_grad()
    def _gives_the_logits(self) -> bool:
        device = next(self._model.parameters()).device
        ids_1T = torch.zeros(1, 3, dtype=torch.long, device=device)
        inputs = trial_inputs(self._model, ids_1T)
        whole_TV = self._forward(**inputs, use_cache=False).logits[0].float()
        states_TC = self.features(**inputs, use_cache=False)[0]
        parts_TV = torch.cat([self.logits(states_TC[place : place + 1]) for place in range(3)]).float()
        apart = (parts_TV - whole_TV).abs().max()
        return bool(apart <= _ROUNDING * whole_TV.abs().max())

    @torch.enable_grad()
    def _owns_its_gradient(self) -> bool:
        """Between hidden states and logits there are no parameters but the head's own."""
        owned = {id(parameter) for parameter in self.head.parameters()}
        others = [one for one in self._model.parameters() if one.requires_grad and id(one) not in owned]
        weight = self.head.weight
        states_1C = torch.zeros(1, weight.shape[-1], dtype=weight.dtype, device=weight.device, requires_grad=True)
        found = torch.autograd.grad(self.logits(states_1C).sum(), [states_1C, *others], allow_unused=True)
        return all(grad is None for grad in found[1:])

    @contextmanager
    def _bare_head(self) -> Iterator[None]:
        """The head without its hooks: those of a sharded model must run once a pass, not once a chunk."""
        parent_name, _, name = self._name.rpartition(".")
        parent = self._model.get_submodule(parent_name)
        parent._modules[name] = _Bare(self.head)
        try:
            yield
        finally:
            parent._modules[name] = self.head


class _Bare(nn.Module):
    """Calls another module's own forward, without hooks and without owning its weights."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "_bare", module)

    def forward(self, *arguments: Any, **named: Any) -> Any:
        module: Any = self.__dict__["_bare"]
        return type(module).forward(module, *arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_bare"], name)


def divert(module: Any, key: str, handler: Callable[..., Any]) -> None:
    """Calls of ``module`` with the keyword ``key`` go to ``handler``, all others where they went before.

    Going through the module's own call keeps whatever wraps it (DDP, FSDP, autocast, hooks) at work.
    """
    before = module.forward

    def forward(self: Any, *arguments: Any, **named: Any) -> Any:
        return handler(*arguments, **named) if key in named else before(*arguments, **named)

    module.forward = MethodType(forward, module)
