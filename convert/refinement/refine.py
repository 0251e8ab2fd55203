"""Refine the layers of a model: fit each converted attention layer to the source, one layer after the other.

The inputs of a layer come from the layers that are converted and refined already. Its target is the source's residual
stream after the attention. So each layer also repairs what the ones before it left wrong.
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
from ..calibration.out_of_memory import reporting_out_of_memory
from ..family.exactness import OUTPUTS
from .fit import LayerRegression, RefineSettings, fit_projections, gradients_only_for
from .layer_runner import DecoderLayer, decoder_layers, first_inputs, first_tensor, float32_on, write_outputs
from .resume import LayerFit, RefinementFolder


def refine_layers(
    source: Any,
    converted: Any,
    text_BT: Tensor,
    settings: RefineSettings,
    work: RefinementFolder,
    *,
    readers: Sequence[str] | None = None,
    device: torch.device | str = "cpu",
) -> list[LayerFit]:
    """Fit q, k, v and o of every layer of ``converted``.

    One layer of one model is on ``device`` in float32 at a time. The hidden states of both models are in files. Fitted
    tensors go to ``work``, rounded to the dtype in which they are stored; a model in memory holds them as well.

    Args:
        source: the model to fit to; it is not changed. Its weights may be on disk.
        converted: the same model with fewer KV heads, converted by any method. Its weights may be on disk.
        text_BT: calibration text as token ids, without padding. Sequences should be as long as the model will read,
            because attention over longer distances is not fitted.
        work: the state of the refinement; it continues after the layers that are finished there.
        readers: the modules that read the attention's input, in layer order; default: the q projections beside k and v
            projections.

    Returns:
        The fit of each layer with attention, layers of earlier calls included.

    Raises:
        DataError: too little text.
        UnsupportedError: the model's layers are not a plain chain.
    """
    names = list(readers) if readers is not None else input_projections(converted)
    text_BT, batch = drop_incomplete_batch(text_BT, settings)
    originals, layers = (decoder_layers(model, names, text_BT[:batch]) for model in (source, converted))
    refiner = _LayerRefiner(work, settings, batch, torch.device(device), (*text_BT.shape, layers[0].hidden))
    # No layer after the last one with attention is fitted, so none is run.
    last = max(index for index, layer in enumerate(layers) if layer.reader)
    if work.layer is None:
        work.start(*refiner.shape)
        first_inputs(source, originals[0], text_BT, batch, refiner.states("source", 0))
        first_inputs(converted, layers[0], text_BT, batch, refiner.states("converted", 0))
        work.finish(-1)  # the states before layer 0 are written
    elif work.fits:
        console.info(f"{len(work.fits)} of {len(names)} layers are refined already.")
    with (
        console.progress("refinement", len(names) * settings.steps) as advance,
        reporting_out_of_memory(device, "Refinement", lambda: _memory_of_a_layer(layers, batch * text_BT.shape[1])),
    ):
        advance(len(work.fits) * settings.steps)
        for index in range(work.layer or 0, last + 1):
            refiner.refine(index, originals[index], layers[index], advance, last=index == last)
    return work.fits


def _memory_of_a_layer(layers: Sequence[DecoderLayer], tokens: int) -> str:
    """Say how much memory the largest layer takes."""
    sizes = []
    for layer in layers:
        fitted = projections(layer.attention_module, layer.reads).values() if layer.reader else ()
        weights = sum(weight.numel() for weight in layer.module.parameters())
        # float32 weights; for fitted ones also the gradient, AdamW's two moments and a copy to go back to
        sizes.append(4 * weights + 16 * sum(weight.numel() for weight in fitted))
    return (
        f"a layer takes {human_bytes(max(sizes))} in float32 with the optimizer's state, besides the states of a step "
        f"of {tokens:,} tokens"
    )


def drop_incomplete_batch(text_BT: Tensor, settings: RefineSettings) -> tuple[Tensor, int]:
    """Drop the sequences of an incomplete batch, because masks and positions are recorded for a full one.

    Returns:
        The text, and the number of sequences of one step.

    Raises:
        DataError: the text does not fill two steps.
    """
    # At least two: equal rows of an argument show that it does not depend on the text.
    batch = max(settings.batch_tokens // text_BT.shape[1], 2)
    whole = len(text_BT) // batch * batch
    if whole < 2 * batch:
        raise DataError(
            f"Refinement got {text_BT.numel()} tokens of text, fewer than two steps of {batch * text_BT.shape[1]}.",
            "Give it more calibration text, or --refine 0.",
        )
    return text_BT[:whole], batch


class _LayerRefiner:
    """Refines layer after layer; the hidden states before each are in ``work``."""

    def __init__(
        self,
        work: RefinementFolder,
        settings: RefineSettings,
        batch: int,
        device: torch.device,
        shape: tuple[int, int, int],
    ) -> None:
        self.work, self.settings, self.batch, self.device, self.shape = work, settings, batch, device, shape

    def states(self, kind: str, layer: int) -> Tensor:
        return self.work.states(kind, layer, self.shape)

    def refine(self, index: int, original: DecoderLayer, layer: DecoderLayer, advance: Advance, *, last: bool) -> None:
        """Fit one layer where it has attention, and run both models' states through it.

        Args:
            last: no later layer needs the states after it.
        """
        with float32_on(self.device, original) as (here, _):
            targets = self._run_source(index, here)
        # One model's layer at a time is on the device: the source's is released before the converted one comes.
        found, tensors = None, dict[str, Tensor]()
        with float32_on(self.device, layer) as (here, stored):
            if targets is not None:
                problem = targets.regression(here, self.states("converted", index), self.batch, self.device)
                parameters = projections(here.attention_module, here.reads)
                with gradients_only_for(list(parameters.values()), here.module):
                    found = LayerFit(
                        index, *fit_projections(list(parameters.values()), problem, self.settings, advance)
                    )
                for name, parameter in parameters.items():
                    tensors[name] = parameter.detach().to(stored[parameter])
                    # The states of the next layer must come from the weights as stored, rounding included.
                    parameter.data = tensors[name].float()
            if not last:
                before_BTC, after_BTC = (self.states("converted", place) for place in (index, index + 1))
                write_outputs(here, before_BTC, after_BTC, self.batch, self.device)
        self.work.finish(index, found, tensors)

    @torch.no_grad()
    def _run_source(self, index: int, original: DecoderLayer) -> SourceTargets | None:
        """Run one layer of the source, and compute the targets for the converted one. Return None without attention."""
        source_BTC, after_BTC = self.states("source", index), self.states("source", index + 1)
        if original.reader is None:
            write_outputs(original, source_BTC, after_BTC, self.batch, self.device)
            return None
        files = source_BTC, after_BTC, self.states("converted", index), self.states("target", index)
        residual = _adds_to_stream(original, source_BTC[: self.batch].to(self.device))
        weights, variances = [], []
        for source_part, after_part, converted_part, targets_part in zip(
            *(states.split(self.batch) for states in files), strict=True
        ):
            given_BTC = source_part.to(self.device)
            attended_BTC, result_BTC = _run_both(original, given_BTC)
            after_part.copy_(result_BTC)
            stream_BTC = given_BTC + attended_BTC if residual else result_BTC
            weights_BT = 1 / _mean_square(stream_BTC).clamp_min(torch.finfo(torch.float32).tiny)
            variances.append((_mean_square(stream_BTC - given_BTC) * weights_BT).mean().item())
            weights.append(weights_BT.cpu())
            # The attention is to lead from the converted model's stream to the source's, not to repeat its own output.
            targets_part.copy_(stream_BTC - converted_part.to(self.device) if residual else stream_BTC)
        return SourceTargets(files[3], torch.cat(weights), sum(variances) / len(variances), residual)


@dataclass(frozen=True)
class SourceTargets:
    """Targets from one layer of the source.

    Attributes:
        weights_BT, variance: see :class:`.fit.LayerRegression`.
        residual: the stream after the attention is its input plus the attention's output, and the targets are outputs
            of the attention that lead to the source's stream. In other layers (attention and MLP in parallel, a norm
            after the attention) the targets are outputs of the whole layer.
    """

    targets_BTC: Tensor
    weights_BT: Tensor
    variance: float
    residual: bool

    def regression(self, layer: DecoderLayer, inputs_BTC: Tensor, batch: int, device: torch.device) -> LayerRegression:
        call = layer.attended if self.residual else layer
        return LayerRegression(call, inputs_BTC, self.targets_BTC, self.weights_BT, self.variance, batch, device)


def _adds_to_stream(original: DecoderLayer, states_BTC: Tensor) -> bool:
    """Return True if a later module of the layer reads the layer's input plus the attention's output."""
    read: list[Tensor] = []

    def record(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        if arguments and isinstance(arguments[0], Tensor):
            read.append(arguments[0])

    with ExitStack() as hooks:
        for child in original.module.children():
            hooks.callback(child.register_forward_pre_hook(record).remove)
        attended_BTC, _ = _run_both(original, states_BTC)
    # Bit-equal, since the layer computes the very same sum.
    return any(torch.equal(candidate, states_BTC + attended_BTC) for candidate in read)


def _run_both(original: DecoderLayer, states_BTC: Tensor) -> tuple[Tensor, Tensor]:
    """Run a layer: (output of its attention, output of the layer)."""
    attended: list[Tensor] = []

    def record(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        attended.append(first_tensor(output))

    handle = original.attention_module.register_forward_hook(record)
    try:
        after_BTC = original(states_BTC)
    finally:
        handle.remove()
    return attended[0], after_BTC


def _mean_square(x_BTC: Tensor) -> Tensor:
    norm_BT: Tensor = torch.linalg.vector_norm(x_BTC, dim=-1)
    return norm_BT.square() / x_BTC.shape[-1]


def projections(attention: nn.Module, reads: str) -> dict[str, nn.Parameter]:
    """Find the weights and biases of q, k and v, and the weight of the output projection.

    The output projection's bias belongs to no head, so it is not fitted.

    Args:
        reads: name of the query projection, or of the fused one that holds k and v as well.

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
