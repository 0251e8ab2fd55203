"""Refinement: fit each converted attention block to the source on calibration text, layer after layer.

The inputs of a layer come from the layers that are converted and refined already, and the target is the source's
residual stream after the block, so each layer also repairs what the ones before it left wrong.
Letters of shapes: N blocks of text, B blocks at once, T tokens of a block, C hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ... import console
from ...console import Advance, human_bytes
from ...errors import DataError, UnsupportedError
from ..calibration.collect import input_projections
from ..calibration.out_of_memory import fitting
from ..family.exactness import OUTPUTS
from .fit import RefineSettings, Task, fit, learning_only
from .layer_runner import DecoderLayer, decoder_layers, first_inputs, first_tensor, held, mapped
from .resume import LayerFit, RefineWork


def refine_layers(
    source: Any,
    converted: Any,
    blocks_NT: Tensor,
    settings: RefineSettings,
    work: RefineWork,
    *,
    readers: Sequence[str] | None = None,
    device: torch.device | str = "cpu",
) -> list[LayerFit]:
    """Fit q, k, v and o of every layer of ``converted``.

    One layer of one model is on ``device`` in float32 at a time; the two models' states rest in files. Fitted tensors
    go to ``work``, rounded to the dtype in which they are stored; a model in memory holds them as well.

    Args:
        source: the model to follow; it is not changed. Its weights may rest on disk.
        converted: the same model with fewer KV heads, in any state of repair. Its weights may rest on disk.
        blocks_NT: calibration text as token ids, without padding. Blocks should be as long as what the model will
            read: attention over longer distances is not fitted.
        work: where it goes on, after the layers that are finished.
        readers: the modules whose input is the attention's, in layer order; default: the q projections that stand
            beside k and v projections.

    Returns:
        What was done to each layer with attention, the layers of earlier calls included.

    Raises:
        DataError: too little text.
        UnsupportedError: the model's layers are no plain chain.
    """
    names = list(readers) if readers is not None else input_projections(converted)
    blocks_NT, batch = whole_batches(blocks_NT, settings)
    originals, layers = (decoder_layers(model, names, blocks_NT[:batch]) for model in (source, converted))
    walk = _Walk(work, settings, batch, torch.device(device), (*blocks_NT.shape, layers[0].hidden))
    last = max(index for index, layer in enumerate(layers) if layer.reader)
    if work.layer is None:
        work.start(*walk.shape)
        first_inputs(source, originals[0], blocks_NT, batch, walk.states("source", 0))
        first_inputs(converted, layers[0], blocks_NT, batch, walk.states("converted", 0))
        work.finish(-1)
    elif work.fits:
        console.info(f"{len(work.fits)} of {len(names)} layers are refined already.")
    with (
        console.progress("refinement", len(names) * settings.steps) as advance,
        fitting(device, "Refinement", lambda: _needs(layers, batch * blocks_NT.shape[1])),
    ):
        advance(len(work.fits) * settings.steps)
        for index in range(work.layer or 0, last + 1):
            walk.step(index, originals[index], layers[index], advance, last=index == last)
    return work.fits


def _needs(layers: Sequence[DecoderLayer], tokens: int) -> str:
    """What the largest layer holds: weights in float32; of those that are fitted also gradient, moments and copy."""
    sizes = []
    for layer in layers:
        fitted = projections(layer.attention_module, layer.reads).values() if layer.reader else ()
        weights = sum(weight.numel() for weight in layer.module.parameters())
        sizes.append(4 * weights + 16 * sum(weight.numel() for weight in fitted))
    return (
        f"a layer takes {human_bytes(max(sizes))} in float32 with the optimizer's state, besides the states of a step "
        f"of {tokens:,} tokens"
    )


def whole_batches(blocks_NT: Tensor, settings: RefineSettings) -> tuple[Tensor, int]:
    """The text without the blocks of an incomplete batch (masks and positions are recorded for a full one).

    Returns:
        The text, and how many blocks a step sees.

    Raises:
        DataError: it does not fill two steps.
    """
    batch = max(settings.batch_tokens // blocks_NT.shape[1], 2)
    whole = len(blocks_NT) // batch * batch
    if whole < 2 * batch:
        raise DataError(
            f"Refinement got {blocks_NT.numel()} tokens of text, fewer than two steps of {batch * blocks_NT.shape[1]}.",
            "Give it more calibration text, or --refine 0.",
        )
    return blocks_NT[:whole], batch


class _Walk:
    """Goes from layer to layer; the states before each are in ``work``."""

    def __init__(
        self, work: RefineWork, settings: RefineSettings, batch: int, device: torch.device, shape: tuple[int, int, int]
    ) -> None:
        self.work, self.settings, self.batch, self.device, self.shape = work, settings, batch, device, shape

    def states(self, kind: str, layer: int) -> Tensor:
        return self.work.states(kind, layer, self.shape)

    def step(self, index: int, original: DecoderLayer, layer: DecoderLayer, advance: Advance, *, last: bool) -> None:
        """Bring both models' states past one layer, and fit the converted one where it has attention.

        Args:
            last: nobody reads the states after it.
        """
        with held(original, self.device) as (here, _):
            target = self._follow(index, here)
        found, tensors = None, dict[str, Tensor]()
        with held(layer, self.device) as (here, stored):
            if target is not None:
                task = target.task(here, self.states("converted", index), self.batch, self.device)
                parameters = projections(here.attention_module, here.reads)
                with learning_only(here.module, list(parameters.values())):
                    found = LayerFit(index, *fit(list(parameters.values()), task, self.settings, advance))
                for name, parameter in parameters.items():
                    tensors[name] = parameter.detach().to(stored[parameter])
                    parameter.data = tensors[name].float()  # the next layer sees what will be stored
            if not last:
                h_NTC, after_NTC = (self.states("converted", place) for place in (index, index + 1))
                mapped(here, h_NTC, after_NTC, self.batch, self.device)
        self.work.finish(index, found, tensors)

    @torch.no_grad()
    def _follow(self, index: int, original: DecoderLayer) -> LayerTarget | None:
        """Run one layer of the source; what its attention block is wanted to give, or None where it has none."""
        wanted_NTC, after_NTC = self.states("source", index), self.states("source", index + 1)
        if original.reader is None:
            mapped(original, wanted_NTC, after_NTC, self.batch, self.device)
            return None
        h_NTC, targets_NTC = self.states("converted", index), self.states("target", index)
        plain = _adds(original, wanted_NTC[: self.batch].to(self.device))
        weights, variances = [], []
        for wanted_BTC, after_BTC, h_BTC, targets_BTC in zip(
            *(states.split(self.batch) for states in (wanted_NTC, after_NTC, h_NTC, targets_NTC)), strict=True
        ):
            given_BTC = wanted_BTC.to(self.device)
            added_BTC, result_BTC = _run(original, given_BTC)
            after_BTC.copy_(result_BTC)
            stream_BTC = given_BTC + added_BTC if plain else result_BTC
            weights_BT = 1 / _mean_square(stream_BTC).clamp_min(torch.finfo(torch.float32).tiny)
            variances.append((_mean_square(stream_BTC - given_BTC) * weights_BT).mean().item())
            weights.append(weights_BT.cpu())
            targets_BTC.copy_(stream_BTC - h_BTC.to(self.device) if plain else stream_BTC)
        return LayerTarget(targets_NTC, torch.cat(weights), sum(variances) / len(variances), plain)


@dataclass(frozen=True)
class LayerTarget:
    """What the source does in one layer, for the converted layer to be fitted to.

    Attributes:
        weights_NT, variance: see :class:`headfold.convert.refinement.fit.Task`.
        plain: the stream after the attention block is its input plus the block's output, and the targets are outputs
            that lead to the source's stream. Otherwise (parallel blocks, norms after the block) they are the layer's.
    """

    targets_NTC: Tensor
    weights_NT: Tensor
    variance: float
    plain: bool

    def task(self, layer: DecoderLayer, h_NTC: Tensor, batch: int, device: torch.device) -> Task:
        call = layer.attended if self.plain else layer
        return Task(call, h_NTC, self.targets_NTC, self.weights_NT, self.variance, batch, device)


def _adds(original: DecoderLayer, wanted_BTC: Tensor) -> bool:
    """Whether a module of the layer reads its input plus what the attention block puts out."""
    read: list[Tensor] = []

    def keep(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        if arguments and isinstance(arguments[0], Tensor):
            read.append(arguments[0])

    with ExitStack() as probes:
        for child in original.module.children():
            probes.callback(child.register_forward_pre_hook(keep).remove)
        added_BTC, _ = _run(original, wanted_BTC)
    return any(torch.equal(candidate, wanted_BTC + added_BTC) for candidate in read)


def _run(original: DecoderLayer, wanted_BTC: Tensor) -> tuple[Tensor, Tensor]:
    """(what the attention block puts out, what the layer puts out)."""
    added: list[Tensor] = []

    def keep(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        added.append(first_tensor(output))

    handle = original.attention_module.register_forward_hook(keep)
    try:
        after_BTC = original(wanted_BTC)
    finally:
        handle.remove()
    return added[0], after_BTC


def _mean_square(x_BTC: Tensor) -> Tensor:
    norm_BT: Tensor = torch.linalg.vector_norm(x_BTC, dim=-1)
    return norm_BT.square() / x_BTC.shape[-1]


def projections(attention: nn.Module, reads: str) -> dict[str, nn.Parameter]:
    """The weights and biases of q, k and v, and the weight of the output projection (its bias is nobody's head).

    Args:
        reads: the projection of the queries, or the one that holds k and v as well.

    Returns:
        Parameters by their names inside the attention module.

    Raises:
        UnsupportedError: the output projection is not known.
    """
    output = next((name for name in OUTPUTS if hasattr(attention, name)), None)
    if output is None:
        raise UnsupportedError(
            f"The output projection of {type(attention).__name__} is not known, so it cannot be refined.",
            "Convert with --refine 0; uptraining works with every model.",
        )
    found = {name.partition("."): value for name, value in attention.named_parameters()}
    inputs = {"".join(name): value for name, value in found.items() if name[0] in (reads, "k_proj", "v_proj")}
    return inputs | {"".join(name): value for name, value in found.items() if name[0] == output and value.dim() == 2}
