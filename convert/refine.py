"""Refinement: fit each converted attention block to the source on calibration text, layer after layer.

The inputs of a layer come from the layers that are converted and refined already, and the target is the source's
residual stream after the block, so each layer also repairs what the ones before it left wrong.
Letters of shapes: N blocks of text, B blocks at once, T tokens of a block, C hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import console
from ..console import Advance
from ..errors import DataError
from .calibration import attention_modules
from .layers import Layer, decoder_layers, first_inputs, first_tensor, in_float32, mapped

_HELD_OUT = 16
"""One block in so many measures the error and is not fitted to."""
_OUTPUTS = ("o_proj", "out_proj", "dense", "c_proj")


@dataclass(frozen=True)
class RefineSettings:
    """How each block is fitted.

    Attributes:
        steps: AdamW steps per layer.
        learning_rate: at the start, after the warm-up; it falls to zero as a cosine.
        batch_tokens: about how many tokens a step sees.
        seed: of the order of the text.
    """

    steps: int = 200
    learning_rate: float = 2e-3
    batch_tokens: int = 4096
    seed: int = 0


@dataclass(frozen=True)
class LayerFit:
    """What refinement did to one layer: mean squared error of the target on held-out text, per unit of its variance."""

    layer: int
    error_before: float
    error_after: float


@dataclass(frozen=True)
class _Task:
    """What to fit in one layer: ``call(inputs) → targets``.

    Attributes:
        weights_NT: of each token's error, one over the mean square of the stream there: the next norm divides by it.
        variance: weighted mean square of what the source's block adds, the unit of the error.
    """

    call: Callable[[Tensor], Tensor]
    inputs_NTC: Tensor
    targets_NTC: Tensor
    weights_NT: Tensor
    variance: float

    def error(self, found_BTC: Tensor, which: slice | Tensor) -> Tensor:
        """Weighted mean squared error of blocks ``which``, per unit of variance."""
        targets_BTC, weights_BT = (part[which].to(found_BTC.device) for part in (self.targets_NTC, self.weights_NT))
        return ((found_BTC - targets_BTC).square().mean(-1) * weights_BT).mean() / self.variance


def refine_layers(
    source: Any,
    converted: Any,
    blocks_NT: Tensor,
    settings: RefineSettings,
    *,
    modules: Sequence[str] | None = None,
    device: torch.device | str = "cpu",
) -> list[LayerFit]:
    """Fit q, k, v and o of every layer of ``converted``, in place.

    One layer of each model is on ``device`` in float32 at a time; results are rounded to the model's dtype.

    Args:
        source: the model to follow; it is not changed.
        converted: the same model with fewer KV heads, in any state of repair.
        blocks_NT: calibration text as token ids, without padding. Blocks should be as long as what the model will
            read: attention over longer distances is not fitted.
        modules: the attention modules in layer order; default: those with q, k and v projections.
    """
    place = torch.device(device)
    names = list(modules) if modules is not None else attention_modules(converted)
    batch = max(settings.batch_tokens // blocks_NT.shape[1], 1)
    blocks_NT = _whole_batches(blocks_NT, batch)
    originals = decoder_layers(source, names, blocks_NT[:batch])
    layers = decoder_layers(converted, names, blocks_NT[:batch])
    wanted_NTC, h_NTC = (
        first_inputs(source, originals[0], blocks_NT, batch),
        first_inputs(converted, layers[0], blocks_NT, batch),
    )
    fits = []
    with console.progress("refinement", len(names) * settings.steps) as advance:
        for index, (original, layer) in enumerate(zip(originals, layers, strict=True)):
            with in_float32(original.module, place), in_float32(layer.module, place) as dtype:
                if layer.attention is None:
                    wanted_NTC = mapped(original, wanted_NTC, batch, place)
                else:
                    task, wanted_NTC = _task(original, layer, wanted_NTC, h_NTC, batch, place)
                    parameters = _projections(layer.attention_module)
                    with _learning_only(layer.module, parameters):
                        before, after = _fit(parameters, task, settings, batch, place, advance)
                    for parameter in parameters:  # the next layer sees what will be stored
                        parameter.data = parameter.data.to(dtype).float()
                    fits.append(LayerFit(index, before, after))
                h_NTC = mapped(layer, h_NTC, batch, place)
    return fits


def _whole_batches(blocks_NT: Tensor, batch: int) -> Tensor:
    """Drop the blocks of an incomplete batch: masks and positions are recorded for a full one."""
    whole = len(blocks_NT) // batch * batch
    if whole < 2 * batch:
        raise DataError(
            f"Refinement got {blocks_NT.numel()} tokens of text, fewer than two steps of {batch * blocks_NT.shape[1]}.",
            "Give it more calibration text.",
        )
    return blocks_NT[:whole]


def _task(
    original: Layer, layer: Layer, wanted_NTC: Tensor, h_NTC: Tensor, batch: int, place: torch.device
) -> tuple[_Task, Tensor]:
    """The task of one layer, and the source's states after it.

    Where the stream after the attention block is its input plus the block's output, the block alone is fitted to that
    stream. In any other arrangement (parallel blocks, norms after the block) the layer's output is fitted as a whole.
    """
    added_NTC, after_NTC, plain = _run_source(original, wanted_NTC, batch, place)
    if plain:
        call, inputs_NTC = _attention_call(layer, h_NTC, batch, place)
        stream_NTC = wanted_NTC + added_NTC
    else:
        call, inputs_NTC = layer, h_NTC
        stream_NTC, added_NTC = after_NTC, after_NTC - wanted_NTC
    weights_NT = 1 / _mean_square(stream_NTC).clamp_min(torch.finfo(torch.float32).tiny)
    variance = (_mean_square(added_NTC) * weights_NT).mean().item()
    targets_NTC = stream_NTC.sub_(h_NTC) if plain else stream_NTC
    return _Task(call, inputs_NTC, targets_NTC, weights_NT, variance), after_NTC


def _mean_square(x_NTC: Tensor) -> Tensor:
    norm_NT: Tensor = torch.linalg.vector_norm(x_NTC, dim=-1)
    return norm_NT.square() / x_NTC.shape[-1]


def _run_source(original: Layer, wanted_NTC: Tensor, batch: int, place: torch.device) -> tuple[Tensor, Tensor, bool]:
    """(what the attention block adds, the layer's output, whether the next module reads input + added)."""
    added: list[Tensor] = []
    read: list[Tensor] = []

    def keep_added(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        added.append(first_tensor(output).cpu())

    def keep_read(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        if arguments and isinstance(arguments[0], Tensor):
            read.append(arguments[0].cpu())

    handle = original.attention_module.register_forward_hook(keep_added)
    probes = [child.register_forward_pre_hook(keep_read) for child in original.module.children()]
    try:
        mapped(original, wanted_NTC[:batch], batch, place)
        stream_BTC = wanted_NTC[:batch] + added.pop()
        plain = any(torch.equal(candidate, stream_BTC) for candidate in read)
        for probe in probes:
            probe.remove()
        after_NTC = mapped(original, wanted_NTC, batch, place)
    finally:
        for registered in (handle, *probes):
            registered.remove()
    return torch.cat(added), after_NTC, plain


class _Reached(Exception):
    """The attention block was reached; the rest of the layer is not needed."""


def _attention_call(
    layer: Layer, h_NTC: Tensor, batch: int, place: torch.device
) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """The attention block as a function of its input, and that input for all blocks."""
    found: list[Tensor] = []
    named: dict[str, Any] = {}

    def keep(module: nn.Module, arguments: tuple[Any, ...], given: dict[str, Any]) -> None:
        found.append((arguments[0] if arguments else given["hidden_states"]).cpu())
        named.update({name: value for name, value in given.items() if name != "hidden_states"})
        raise _Reached

    attention = layer.attention_module
    handle = attention.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        for h_BTC in h_NTC.split(batch):
            with suppress(_Reached):
                mapped(layer, h_BTC, batch, place)
    finally:
        handle.remove()
    return lambda x_BTC: first_tensor(attention(x_BTC, **named)), torch.cat(found)


def _fit(
    parameters: list[nn.Parameter],
    task: _Task,
    settings: RefineSettings,
    batch: int,
    place: torch.device,
    advance: Advance,
) -> tuple[float, float]:
    """AdamW on the projections; where the error on held-out blocks does not fall they stay as they were."""
    held = max(len(task.inputs_NTC) // _HELD_OUT // batch, 1) * batch
    fitted = len(task.inputs_NTC) - held
    start = [parameter.detach().clone() for parameter in parameters]
    before = _held_out_error(task, fitted, batch, place)
    optimizer = torch.optim.AdamW(parameters, lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    draw = torch.Generator().manual_seed(settings.seed)
    order = torch.empty(0, dtype=torch.long)
    for step in range(settings.steps):
        if len(order) < batch:
            order = torch.randperm(fitted, generator=draw)
        which, order = order[:batch], order[batch:]
        optimizer.param_groups[0]["lr"] = settings.learning_rate * _schedule(step, settings.steps)
        optimizer.zero_grad(set_to_none=True)
        task.error(task.call(task.inputs_NTC[which].to(place)), which).backward()
        optimizer.step()
        advance()
    after = _held_out_error(task, fitted, batch, place)
    if after < before:
        return before, after
    for parameter, value in zip(parameters, start, strict=True):
        parameter.data = value
    return before, before


def _schedule(step: int, steps: int) -> float:
    """Share of the learning rate: a short rise, then a cosine to zero."""
    return min((step + 1) / max(steps // 20, 1), 0.5 + 0.5 * math.cos(math.pi * step / steps))


def _held_out_error(task: _Task, fitted: int, batch: int, place: torch.device) -> float:
    errors = []
    with torch.no_grad():
        for first in range(fitted, len(task.inputs_NTC), batch):
            which = slice(first, first + batch)
            errors.append(task.error(task.call(task.inputs_NTC[which].to(place)), which).item())
    return sum(errors) / len(errors)


def _projections(attention: nn.Module) -> list[nn.Parameter]:
    """The weights and biases of q, k and v, and the weight of the output projection (its bias is nobody's head)."""
    inputs = [
        parameter for name in ("q_proj", "k_proj", "v_proj") for parameter in getattr(attention, name).parameters()
    ]
    return [*inputs, output_projection(attention).weight]


def output_projection(attention: nn.Module) -> Any:
    """The linear layer that takes the heads' outputs, by the names that classes give it."""
    return next(getattr(attention, name) for name in _OUTPUTS if hasattr(attention, name))


@contextmanager
def _learning_only(model: nn.Module, learned: list[nn.Parameter]) -> Iterator[None]:
    """Gradients for ``learned`` alone; afterwards every parameter is as it was."""
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    model.requires_grad_(False)
    for parameter in learned:
        parameter.requires_grad_(True)
    try:
        with torch.enable_grad():
            yield
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
            parameter.grad = None
