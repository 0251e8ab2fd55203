"""Split a language model below its head, so that logits exist for a chunk of tokens at a time.

The logits of a vocabulary of 256,000 tokens are by far the largest tensors of a step. With the split, only one chunk of
them is in memory, for the student and for the teacher.

Letters of shapes: B sequences, T tokens, C hidden width, N target tokens, V vocabulary. The inputs of a head have no
letter for their last dimension: its width is C, or V for a model that is run whole.
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


class SplitModel:
    """Runs a model up to its head, and the head on some tokens.

    The head is the model's own code, including soft-capping and scaling: the model's ``forward`` is called with a
    backbone that returns hidden states computed before. The constructor tries on three tokens whether this gives the
    model's logits. If not, the model is run whole, and :attr:`whole` says so.

    Args:
        model: as loaded, before anything wraps it. Its forward pass stays usable.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._forward = model.forward  # bound now, because accelerate replaces it
        self.head: Any = model.get_output_embeddings()
        self._backbone = Backbone.of(model) if isinstance(self.head, nn.Module) else None
        self._name = next((name for name, module in model.named_modules() if module is self.head), "")
        if self._backbone is not None and not self._can_be_split():
            self._backbone = None

    @property
    def vocabulary(self) -> int:
        """Width of the logits."""
        head = self._model.get_input_embeddings() if self.head is None else self.head
        return int(head.weight.shape[0])

    @property
    def whole(self) -> bool:
        """Tell whether the model has to be run whole, with all of its logits in memory."""
        return self._backbone is None

    def head_inputs(self, **inputs: Any) -> Tensor:
        """Run the model below its head: hidden states (B, T, C), or logits (B, T, V) of a model that is run whole."""
        if self._backbone is None:
            logits_BTV: Tensor = self._forward(**inputs).logits
            return logits_BTV
        states_BTC: Tensor = self._backbone(**inputs).last_hidden_state
        return states_BTC

    def logits(self, head_inputs_N: Tensor) -> Tensor:
        """Run the head: logits (N, V) of these tokens."""
        if self._backbone is None:
            return head_inputs_N
        with self._backbone.answering(head_inputs_N[None]) as inputs, self._head_without_hooks():
            logits_1NV: Tensor = self._forward(**inputs, use_cache=False).logits
        return logits_1NV[0]

    def head_parameters(self) -> list[nn.Parameter]:
        """List the head's parameters, anew at each call: sharding swaps them for others."""
        return [] if self.whole else list(self.head.parameters())

    def _can_be_split(self) -> bool:
        training = self._model.training
        self._model.eval()
        try:
            return self._gives_the_logits() and self._owns_its_gradient()
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError):
            # the model's code wants more from its backbone than hidden states, or calls its head in another way
            return False
        finally:
            self._model.train(training)

    @torch.no_grad()
    def _gives_the_logits(self) -> bool:
        device = next(self._model.parameters()).device
        ids_1T = torch.zeros(1, 3, dtype=torch.long, device=device)
        inputs = trial_inputs(self._model, ids_1T)
        whole_TV = self._forward(**inputs, use_cache=False).logits[0].float()
        states_TC = self.head_inputs(**inputs, use_cache=False)[0]
        parts_TV = torch.cat([self.logits(states_TC[place : place + 1]) for place in range(3)]).float()
        difference = (parts_TV - whole_TV).abs().max()
        return bool(difference <= _ROUNDING * whole_TV.abs().max())

    @torch.enable_grad()
    def _owns_its_gradient(self) -> bool:
        """Check that no parameter but the head's own stands between hidden states and logits.

        The loss hands on gradients of the head's parameters alone, so any other would silently stay untrained.
        """
        owned = {id(parameter) for parameter in self.head.parameters()}
        others = [one for one in self._model.parameters() if one.requires_grad and id(one) not in owned]
        weight = self.head.weight
        states_1C = torch.zeros(1, weight.shape[-1], dtype=weight.dtype, device=weight.device, requires_grad=True)
        found = torch.autograd.grad(self.logits(states_1C).sum(), [states_1C, *others], allow_unused=True)
        return all(grad is None for grad in found[1:])

    @contextmanager
    def _head_without_hooks(self) -> Iterator[None]:
        """Bypass the head's hooks: those of a sharded model must run once per pass, and chunks run many times."""
        parent_name, _, name = self._name.rpartition(".")
        parent = self._model.get_submodule(parent_name)
        setattr(parent, name, _WithoutHooks(self.head))
        try:
            yield
        finally:
            setattr(parent, name, self.head)


class _WithoutHooks(nn.Module):
    """Calls another module's own ``forward``, without its hooks and without owning its weights."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        # not by plain assignment, which would register the module and list its weights a second time
        object.__setattr__(self, "_module", module)

    def forward(self, *arguments: Any, **named: Any) -> Any:
        module: Any = self.__dict__["_module"]
        return type(module).forward(module, *arguments, **named)  # the class's: the instance's may be wrapped

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)  # some models read their head's weight or config


def route_calls(module: Any, keyword: str, handler: Callable[..., Any]) -> None:
    """Send calls of ``module`` that have ``keyword`` to ``handler``, and all others where they went before.

    The handler then runs inside the module's own call, so whatever wraps that call (DDP, FSDP, autocast, hooks) works.
    """
    before = module.forward

    def forward(self: Any, *arguments: Any, **named: Any) -> Any:
        return handler(*arguments, **named) if keyword in named else before(*arguments, **named)

    module.forward = MethodType(forward, module)
