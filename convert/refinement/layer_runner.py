"""Run a causal language model one decoder layer at a time, as refinement needs it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import UnsupportedError
from ...libraries.accelerate_internals import weights_in_memory

_PLACE = re.compile(r"(?P<stack>.+?)\.(?P<index>\d+)\.(?P<inner>.+)")
"""``model.layers.3.self_attn.q_proj``: the list of layers, the layer, a module in it."""


def layer_index(module: str) -> int:
    """Read from a module's name which decoder layer it is in."""
    place = _PLACE.fullmatch(module)
    assert place is not None, module
    return int(place["index"])


@dataclass(frozen=True)
class DecoderLayer:
    """One decoder layer, and how the model calls it.

    Attributes:
        reader: name inside the layer of the module that reads the attention's input; None in a layer without attention.
        arguments: keyword arguments besides the hidden states (position embeddings, mask, …), for ``B`` sequences.
        hidden: C.
    """

    module: nn.Module
    reader: str | None
    arguments: dict[str, Any]
    hidden: int

    def __call__(self, states_BTC: Tensor) -> Tensor:
        return first_tensor(self.module(states_BTC, **self.arguments))

    @property
    def attention_module(self) -> nn.Module:
        assert self.reader is not None
        return self.module.get_submodule(self.reader.rpartition(".")[0])

    @property
    def reads(self) -> str:
        """Name of the reader inside the attention module."""
        assert self.reader is not None
        return self.reader.rpartition(".")[2]

    def attended(self, states_BTC: Tensor) -> Tensor:
        """Run the layer as far as the output of its attention module."""
        # An exception is the only way to leave a forward pass of any class early.
        handle = self.attention_module.register_forward_hook(_stop_with_output)
        try:
            self(states_BTC)
        except _StopForward as stop:
            return stop.states
        finally:
            handle.remove()
        raise AssertionError(f"{self.reader} did not run")


def decoder_layers(model: Any, readers: Sequence[str], ids_BT: Tensor) -> list[DecoderLayer]:
    """Find the decoder layers in order, with the arguments that the model gives them for sequences like ``ids_BT``.

    Args:
        readers: names of the modules that read the attention's input, in layer order.
        ids_BT: at least two sequences, so that arguments that depend on the text differ.

    Raises:
        UnsupportedError: the layers are not a plain chain, in which each gets the output of the one before and nothing
            else that depends on the text.
    """
    places = [_PLACE.fullmatch(name) for name in readers]
    stacks = {place["stack"] for place in places if place}
    if len(stacks) != 1 or None in places:
        raise _not_a_chain(model)
    inner = {int(place["index"]): place["inner"] for place in places if place}
    stack = list(model.get_submodule(stacks.pop()))
    recorder = _InputRecorder(len(ids_BT))
    with ExitStack() as handles, torch.no_grad():
        for module in stack:
            handles.callback(module.register_forward_pre_hook(recorder.before, with_kwargs=True).remove)
            handles.callback(module.register_forward_hook(recorder.after).remove)
        model.base_model(input_ids=ids_BT, use_cache=False)
    if not recorder.plain or len(recorder.arguments) != len(stack) or recorder.states is None:
        raise _not_a_chain(model)
    hidden = recorder.states.shape[-1]
    return [DecoderLayer(module, inner.get(i), recorder.arguments[i], hidden) for i, module in enumerate(stack)]


def _not_a_chain(model: Any) -> UnsupportedError:
    return UnsupportedError(
        f"{type(model).__name__} does not pass its states from layer to layer in the plain way that refinement needs.",
        "Convert with --refine 0; uptraining works with every model.",
    )


class _InputRecorder:
    """Hooks that record the inputs of each layer in one forward pass.

    Attributes:
        arguments: of each layer in turn; arguments that layers share are stored once.
        states: the output of the layer that ran last.
        plain: each layer was given the output of the one before, and nothing else that depends on the text.
    """

    def __init__(self, sequences: int) -> None:
        self.arguments: list[dict[str, Any]] = []
        self.states: Tensor | None = None
        self.plain = True
        self._sequences = sequences
        self._seen: dict[int, tuple[Any, Any]] = {}

    def before(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        given = arguments[0] if arguments else named["hidden_states"]
        others = [value for value in arguments[1:] if value is not None]  # GPTBigCode passes None for an encoder
        if others or (self.states is not None and not torch.equal(given, self.states)):
            self.plain = False
        self.arguments.append({name: self._stored(value) for name, value in named.items() if name != "hidden_states"})

    def after(self, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        self.states = first_tensor(output)

    def _stored(self, value: Any) -> Any:
        """Convert an argument to float32, once for all layers that share it."""
        if id(value) not in self._seen:
            # The original is held as well: were it freed, another object could get its id.
            self._seen[id(value)] = value, self._checked(value)
        return self._seen[id(value)][1]

    def _checked(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(self._checked, value))
        if not isinstance(value, Tensor):
            return value
        # A tensor with a row for each sequence must have equal rows, or it depends on the text.
        if value.dim() and len(value) == self._sequences and not torch.equal(value, value[:1].expand_as(value)):
            self.plain = False
        return value.float() if value.is_floating_point() else value


class _StopForward(Exception):
    """Ends a forward pass early: ``states`` are all that was needed of it."""

    def __init__(self, states: Tensor) -> None:
        super().__init__()
        self.states = states


def _stop_with_output(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
    raise _StopForward(first_tensor(output))


def first_inputs(model: Any, layer: DecoderLayer, text_BT: Tensor, batch: int, out_BTC: Tensor) -> None:
    """Write the input of the first layer to ``out_BTC``, ``batch`` sequences at once."""

    def stop(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        raise _StopForward(arguments[0] if arguments else named["hidden_states"])

    handle = layer.module.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        for ids_BT, states_BTC in zip(text_BT.split(batch), out_BTC.split(batch), strict=True):
            try:
                with torch.no_grad():
                    model.base_model(input_ids=ids_BT, use_cache=False)
            except _StopForward as stopped:
                states_BTC.copy_(stopped.states)
    finally:
        handle.remove()


@contextmanager
def float32_on(device: torch.device, layer: DecoderLayer) -> Iterator[tuple[DecoderLayer, dict[Tensor, torch.dtype]]]:
    """Bring one layer to ``device`` in float32.

    Afterwards its weights are back where they were, in the dtype that they had. Weights that accelerate keeps on disk
    are read from there at the start and dropped at the end.

    Yields:
        The layer with its arguments on the device, and its tensors with the dtypes that they are stored in.
    """
    with ExitStack() as stack:
        stored = stack.enter_context(weights_in_memory(layer.module))
        for tensor in (*layer.module.parameters(), *layer.module.buffers()):
            stored.setdefault(tensor, tensor.dtype)
            stack.callback(_move, tensor, tensor.device, stored[tensor])
            _move(tensor, device, torch.float32 if tensor.is_floating_point() else tensor.dtype)
        yield replace(layer, arguments=_on_device(layer.arguments, device)), stored


def _move(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> None:
    # Through .data, so that the parameter stays the same object: optimizers and hooks refer to it.
    tensor.data = tensor.data.to(device=device, dtype=dtype)


def _on_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, dict):
        return {name: _on_device(part, device) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_on_device(part, device) for part in value)
    return value.to(device) if isinstance(value, Tensor) else value


def write_outputs(
    call: Callable[[Tensor], Tensor], inputs_BTC: Tensor, out_BTC: Tensor, batch: int, device: torch.device
) -> None:
    """Write ``call`` of all sequences to ``out_BTC``, ``batch`` sequences at once, without gradients."""
    with torch.no_grad():
        for states_BTC, outputs_BTC in zip(inputs_BTC.split(batch), out_BTC.split(batch), strict=True):
            outputs_BTC.copy_(call(states_BTC.to(device)))


def first_tensor(output: Any) -> Tensor:
    """Take the hidden states from a layer's output: a tensor, or a tuple that starts with it."""
    found = output[0] if isinstance(output, tuple) else output
    assert isinstance(found, Tensor)
    return found
