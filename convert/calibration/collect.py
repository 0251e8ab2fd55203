"""Collect the one statistic of calibration text that methods need: E[x xᵀ] of each attention layer's input.

One forward pass over the source gives a (C+1)×(C+1) matrix per layer, whatever the method and the number of groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ... import console
from ...errors import UnsupportedError
from ..family.attention_layer import AttentionLayer
from .statistics import TOKENS, MomentSums, Statistics, writing_statistics


def reading_modules(layers: Sequence[AttentionLayer]) -> list[str]:
    """List the modules that read the attention's input, layer by layer."""
    return [f"{layer.module}.{layer.reads}" for layer in layers]


def input_projections(model: nn.Module) -> list[str]:
    """List the q projections that have a k and a v projection beside them, in the order of the layers.

    Raises:
        UnsupportedError: the model has none.
    """
    sides = ("q_proj", "k_proj", "v_proj")
    found = [name for name, module in model.named_modules() if all(hasattr(module, side) for side in sides)]
    if not found:
        raise UnsupportedError(
            f"{type(model).__name__} has no attention with separate q, k and v projections.",
            "Use --method mean, which needs no calibration.",
        )
    return [f"{name}.q_proj" for name in found]


def collect_statistics(
    model: Any,
    text_BT: Tensor,
    file: Path,
    *,
    metadata: dict[str, str],
    readers: Sequence[str] | None = None,
    batch_tokens: int = 4096,
    device: torch.device | str = "cpu",
) -> Statistics:
    """Run the source once over calibration text, and save the second moments of its attention inputs.

    Args:
        model: a causal language model; only its decoder runs, so no logits are computed.
        text_BT: token ids without padding.
        file: where the statistics are saved; it appears when they are complete.
        metadata: saved with them: ``SOURCE``, and a description of the text.
        readers: modules that read the attention's input, in layer order; default: :func:`input_projections`.
        batch_tokens: about how many tokens go through the model at once; weights on disk are read once per batch.
        device: where the token ids go; the model is there already.

    Raises:
        UnsupportedError: the class runs its attention in an unusual way, so tokens would be missed.
    """
    names = list(readers) if readers is not None else input_projections(model)
    projections = [model.get_submodule(name) for name in names]
    # Some classes wrap the projection, so its width is read from the first matrix inside.
    hidden = [next(weight.shape[1] for weight in part.parameters() if weight.dim() == 2) for part in projections]
    batches = text_BT.split(max(batch_tokens // text_BT.shape[1], 1))
    details = {**metadata, TOKENS: str(text_BT.numel())}
    with writing_statistics(file, hidden, details) as sums:
        with summing_inputs(model, names, sums), console.progress("calibration", len(text_BT)) as advance:
            for ids_BT in batches:
                model.base_model(input_ids=ids_BT.to(device), use_cache=False)
                advance(len(ids_BT))
        # Inside writing_statistics: an error here leaves no file.
        for name, count in zip(names, sums.counts, strict=True):
            if count != text_BT.numel():
                raise UnsupportedError(
                    f"{type(model).__name__} does not send every token through {name} exactly once.",
                    "Use --method mean, which needs no calibration.",
                )
    return Statistics.open(file)


@contextmanager
def summing_inputs(model: nn.Module, names: Sequence[str], sums: MomentSums) -> Iterator[None]:
    """Add what the named modules read to ``sums``, one sum for each, while the model runs without gradients."""
    with ExitStack() as stack, torch.inference_mode():
        stack.callback(model.train, model.training)
        model.eval()  # dropout would change the moments
        for place, name in enumerate(names):
            stack.callback(model.get_submodule(name).register_forward_pre_hook(_adding_to(sums, place)).remove)
        yield


def _adding_to(sums: MomentSums, place: int) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        sums.add(place, inputs[0].flatten(0, -2))

    return hook
