"""Run a causal language model one decoder layer at a time, as refinement needs it.

Letters of shapes: N blocks, B blocks at once, T tokens of a block, C hidden size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UnsupportedError

_PLACE = re.compile(r"(?P<stack>.+?)\.(?P<index>\d+)\.(?P<inner>.+)")
"""``model.layers.3.self_attn``: the list of layers, the layer, the attention module in it."""
_Call = tuple[Tensor, dict[str, Any]]
"""Hidden states and the other arguments of one layer."""


@dataclass(frozen=True)
class Layer:
    """One decoder layer and how the model calls it.

    Attributes:
        attention: name of its attention module inside the layer; None where it has none.
        arguments: keyword arguments besides the hidden states: position embeddings, mask, …, for ``B`` blocks at once.
    """

    module: nn.Module
    attention: str | None
    arguments: dict[str, Any]

    def __call__(self, h_BTC: Tensor) -> Tensor:
        return first_tensor(self.module(h_BTC, **self.arguments))

    @property
    def attention_module(self) -> nn.Module:
        assert self.attention is not None
        return self.module.get_submodule(self.attention)


def decoder_layers(model: Any, modules: Sequence[str], ids_BT: Tensor) -> list[Layer]:
    """The decoder layers in order, with the arguments that the model gives them for blocks like ``ids_BT``.

    Args:
        modules: names of the attention modules.

    Raises:
        UnsupportedError: the layers are no plain chain, in which each gets the output of the one before.
    """
    places = [_PLACE.fullmatch(name) for name in modules]
    stacks = {place["stack"] for place in places if place}
    if len(stacks) != 1 or None in places:
        raise _no_chain(model)
    inner = {int(place["index"]): place["inner"] for place in places if place}
    stack = list(model.get_submodule(stacks.pop()))
    calls, outputs = _recorded(model, stack, ids_BT)
    for call, before in zip(calls[1:], outputs, strict=False):
        if len(calls) != len(stack) or not torch.equal(call[0], before):
            raise _no_chain(model)
    return [Layer(module, inner.get(index), calls[index][1]) for index, module in enumerate(stack)]


def _no_chain(model: Any) -> UnsupportedError:
    return UnsupportedError(
        f"{type(model).__name__} does not pass its states from layer to layer in the plain way that refinement needs.",
        "Convert without --refine; uptraining works with every model.",
    )


def _recorded(model: Any, stack: list[nn.Module], ids_BT: Tensor) -> tuple[list[_Call], list[Tensor]]:
    """Per layer (hidden states, other arguments) and its output, in one forward pass."""
    calls: list[_Call] = []
    outputs: list[Tensor] = []

    def before(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        others = {name: _in_float32(value) for name, value in named.items() if name != "hidden_states"}
        calls.append((arguments[0] if arguments else named["hidden_states"], others))

    def after(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        outputs.append(first_tensor(output))

    handles = [module.register_forward_pre_hook(before, with_kwargs=True) for module in stack]
    handles += [module.register_forward_hook(after) for module in stack]
    try:
        with torch.no_grad():
            model.base_model(input_ids=ids_BT, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return calls, outputs


def _in_float32(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.float()
    return tuple(map(_in_float32, value)) if isinstance(value, tuple) else value


class _Reached(Exception):
    """The first layer was reached; nothing after it is needed."""


def first_inputs(model: Any, layer: Layer, blocks_NT: Tensor, batch: int) -> Tensor:
    """(N, T, C) float32: what enters the first layer."""
    found: list[Tensor] = []

    def stop(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        found.append((arguments[0] if arguments else named["hidden_states"]).detach().float())
        raise _Reached

    handle = layer.module.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        for ids_BT in blocks_NT.split(batch):
            with torch.no_grad():
                try:
                    model.base_model(input_ids=ids_BT, use_cache=False)
                except _Reached:
                    continue
    finally:
        handle.remove()
    return torch.cat(found)


@contextmanager
def in_float32(module: nn.Module, device: torch.device) -> Iterator[torch.dtype]:
    """Hold one layer in float32 on ``device``; afterwards it is back where it was, in the dtype that it had.

    Yields:
        The dtype that its weights had and will have again.
    """
    tensors = [*module.parameters(), *module.buffers()]
    kept = [(tensor.dtype, tensor.device) for tensor in tensors]
    for tensor in tensors:
        tensor.data = tensor.data.to(device=device, dtype=torch.float32 if tensor.is_floating_point() else tensor.dtype)
    try:
        yield kept[0][0]
    finally:
        for tensor, (dtype, place) in zip(tensors, kept, strict=True):
            tensor.data = tensor.data.to(device=place, dtype=dtype)


def mapped(call: Callable[[Tensor], Tensor], h_NTC: Tensor, batch: int, device: torch.device) -> Tensor:
    """``call`` over all blocks, ``batch`` of them at once, without gradients; states rest on the CPU."""
    with torch.no_grad():
        return torch.cat([call(h_BTC.to(device)).cpu() for h_BTC in h_NTC.split(batch)])


def first_tensor(output: Any) -> Tensor:
    """Layers return a tensor or a tuple that starts with it."""
    found = output[0] if isinstance(output, tuple) else output
    assert isinstance(found, Tensor)
    return found
