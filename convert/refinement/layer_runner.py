"""Run a causal language model one decoder layer at a time, as refinement needs it.

Letters of shapes: N blocks, B blocks at once, T tokens of a block, C hidden size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate.hooks import AlignDevicesHook
from torch import Tensor, nn

from ...errors import UnsupportedError

_PLACE = re.compile(r"(?P<stack>.+?)\.(?P<index>\d+)\.(?P<inner>.+)")
"""``model.layers.3.self_attn.q_proj``: the list of layers, the layer, a module in it."""


def layer_index(module: str) -> int:
    """Which decoder layer a module is in, by its name."""
    place = _PLACE.fullmatch(module)
    assert place is not None, module
    return int(place["index"])


@dataclass(frozen=True)
class DecoderLayer:
    """One decoder layer and how the model calls it.

    Attributes:
        reader: name inside the layer of the module whose input is the attention's; None where it has no attention.
        arguments: keyword arguments besides the hidden states: position embeddings, mask, …, for ``B`` blocks at once.
        hidden: C.
    """

    module: nn.Module
    reader: str | None
    arguments: dict[str, Any]
    hidden: int

    def __call__(self, h_BTC: Tensor) -> Tensor:
        return first_tensor(self.module(h_BTC, **self.arguments))

    @property
    def attention_module(self) -> nn.Module:
        assert self.reader is not None
        return self.module.get_submodule(self.reader.rpartition(".")[0])

    @property
    def reads(self) -> str:
        """Name of the reader inside the attention module."""
        assert self.reader is not None
        return self.reader.rpartition(".")[2]

    def attended(self, h_BTC: Tensor) -> Tensor:
        """What its attention block puts out; nothing after that is run."""
        handle = self.attention_module.register_forward_hook(_stop_with_output)
        try:
            self(h_BTC)
        except _Reached as reached:
            return reached.states
        finally:
            handle.remove()
        raise AssertionError(f"{self.reader} did not run")


def decoder_layers(model: Any, readers: Sequence[str], ids_BT: Tensor) -> list[DecoderLayer]:
    """The decoder layers in order, with the arguments that the model gives them for any blocks like ``ids_BT``.

    Args:
        readers: names of the modules whose input is the attention's, in layer order.
        ids_BT: two blocks or more, which show whether the arguments depend on the text.

    Raises:
        UnsupportedError: the layers are no plain chain, in which each gets the output of the one before and nothing
            else that depends on the text.
    """
    places = [_PLACE.fullmatch(name) for name in readers]
    stacks = {place["stack"] for place in places if place}
    if len(stacks) != 1 or None in places:
        raise _no_chain(model)
    inner = {int(place["index"]): place["inner"] for place in places if place}
    stack = list(model.get_submodule(stacks.pop()))
    watch = _InputRecorder(len(ids_BT))
    with ExitStack() as handles, torch.no_grad():
        for module in stack:
            handles.callback(module.register_forward_pre_hook(watch.before, with_kwargs=True).remove)
            handles.callback(module.register_forward_hook(watch.after).remove)
        model.base_model(input_ids=ids_BT, use_cache=False)
    if not watch.plain or len(watch.arguments) != len(stack) or watch.states is None:
        raise _no_chain(model)
    hidden = watch.states.shape[-1]
    return [DecoderLayer(module, inner.get(i), watch.arguments[i], hidden) for i, module in enumerate(stack)]


def _no_chain(model: Any) -> UnsupportedError:
    return UnsupportedError(
        f"{type(model).__name__} does not pass its states from layer to layer in the plain way that refinement needs.",
        "Convert with --refine 0; uptraining works with every model.",
    )


class _InputRecorder:
    """Hooks that record what each layer is given in one forward pass.

    Attributes:
        arguments: of each layer in turn; what layers share is kept once.
        states: the output of the layer that ran last.
        plain: each layer was given the output of the one before, and no other text.
    """

    def __init__(self, blocks: int) -> None:
        self.arguments: list[dict[str, Any]] = []
        self.states: Tensor | None = None
        self.plain = True
        self._blocks = blocks
        self._seen: dict[int, tuple[Any, Any]] = {}

    def before(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        given = arguments[0] if arguments else named["hidden_states"]
        others = [value for value in arguments[1:] if value is not None]  # GPTBigCode hands on that it has no encoder
        if others or (self.states is not None and not torch.equal(given, self.states)):
            self.plain = False
        self.arguments.append({name: self._kept(value) for name, value in named.items() if name != "hidden_states"})

    def after(self, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        self.states = first_tensor(output)

    def _kept(self, value: Any) -> Any:
        """The argument in float32; the original is held as well, for its identity."""
        if id(value) not in self._seen:
            self._seen[id(value)] = value, self._checked(value)
        return self._seen[id(value)][1]

    def _checked(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(self._checked, value))
        if not isinstance(value, Tensor):
            return value
        if value.dim() and len(value) == self._blocks and not torch.equal(value, value[:1].expand_as(value)):
            self.plain = False
        return value.float() if value.is_floating_point() else value


class _Reached(Exception):
    """What was wanted is there; nothing after it is run."""

    def __init__(self, states: Tensor) -> None:
        super().__init__()
        self.states = states


def _stop_with_output(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
    raise _Reached(first_tensor(output))


def first_inputs(model: Any, layer: DecoderLayer, blocks_NT: Tensor, batch: int, out_NTC: Tensor) -> None:
    """Write what enters the first layer to ``out_NTC``, ``batch`` blocks at once."""

    def stop(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        raise _Reached(arguments[0] if arguments else named["hidden_states"])

    handle = layer.module.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        for ids_BT, out_BTC in zip(blocks_NT.split(batch), out_NTC.split(batch), strict=True):
            try:
                with torch.no_grad():
                    model.base_model(input_ids=ids_BT, use_cache=False)
            except _Reached as reached:
                out_BTC.copy_(reached.states)
    finally:
        handle.remove()


@contextmanager
def held(layer: DecoderLayer, device: torch.device) -> Iterator[tuple[DecoderLayer, dict[Tensor, torch.dtype]]]:
    """Hold one layer in float32 on ``device``.

    Afterwards its weights are back where they were, in the dtype that they had; those that accelerate keeps on disk
    are read from there at the start and forgotten at the end.

    Yields:
        The layer with its arguments on the device, and its tensors with the dtypes that they are stored in.
    """
    with ExitStack() as stack:
        stored: dict[Tensor, torch.dtype] = {}
        for part in layer.module.modules():
            hook = getattr(part, "_hf_hook", None)
            if isinstance(hook, AlignDevicesHook) and hook.offload:
                stack.callback(_forget, part, part.forward)
                stored |= _read(part, hook)
        for tensor in (*layer.module.parameters(), *layer.module.buffers()):
            stored.setdefault(tensor, tensor.dtype)
            stack.callback(_move, tensor, tensor.device, stored[tensor])
            _move(tensor, device, torch.float32 if tensor.is_floating_point() else tensor.dtype)
        yield replace(layer, arguments=_moved(layer.arguments, device)), stored


def _read(part: nn.Module, hook: AlignDevicesHook) -> dict[Tensor, torch.dtype]:
    """Fetch the weights that one module keeps on disk, and run it without the hook that fetches them anew each time."""
    assert hook.weights_map is not None
    for name, _ in list(part.named_parameters(recurse=False)):
        part.register_parameter(name, nn.Parameter(hook.weights_map[name]))
    part.forward = part._old_forward  # type: ignore[assignment]
    return {parameter: parameter.dtype for parameter in part.parameters(recurse=False)}


def _forget(part: nn.Module, forward: Callable[..., Any]) -> None:
    part.forward = forward
    for name, parameter in list(part.named_parameters(recurse=False)):
        part.register_parameter(name, nn.Parameter(parameter.to("meta")))


def _move(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> None:
    tensor.data = tensor.data.to(device=device, dtype=dtype)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, dict):
        return {name: _moved(part, device) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_moved(part, device) for part in value)
    return value.to(device) if isinstance(value, Tensor) else value


def mapped(call: Callable[[Tensor], Tensor], h_NTC: Tensor, out_NTC: Tensor, batch: int, device: torch.device) -> None:
    """Write ``call`` of all blocks to ``out_NTC``, ``batch`` blocks at once, without gradients."""
    with torch.no_grad():
        for h_BTC, out_BTC in zip(h_NTC.split(batch), out_NTC.split(batch), strict=True):
            out_BTC.copy_(call(h_BTC.to(device)))


def first_tensor(output: Any) -> Tensor:
    """Layers return a tensor or a tuple that starts with it."""
    found = output[0] if isinstance(output, tuple) else output
    assert isinstance(found, Tensor)
    return found
