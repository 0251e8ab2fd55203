"""Hidden states of the student drawn towards the teacher's, decoder layer by decoder layer.

Letters of shapes: B blocks, T tokens, C hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import UnsupportedError, UsageError

_TINY = torch.finfo(torch.float32).tiny  # keeps a position whose states are all zero from dividing by zero


class LayerOutputs:
    """Hands out what each decoder layer of a model puts out in a pass.

    Args:
        model: as loaded, before anything wraps it. Of an encoder-decoder the layers of the decoder count.

    Raises:
        UsageError: the class does not say which of its modules are layers.
    """

    def __init__(self, model: Any) -> None:
        kinds = set(getattr(model, "_no_split_modules", None) or [])
        self.layers = [module for module in model.get_decoder().modules() if type(module).__name__ in kinds]
        self.hidden_size = getattr(model.config.get_text_config(decoder=True), "hidden_size", None)
        if not self.layers:
            raise UsageError(
                f"{type(model).__name__} does not say which of its modules are layers, so their hidden states cannot "
                "be compared.",
                "Leave --hidden-weight out.",
            )
        self._seen: list[Tensor] | None = None
        for layer in self.layers:
            layer.register_forward_hook(self._see)

    def _see(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        if self._seen is not None:
            self._seen.append(output[0] if isinstance(output, tuple) else output)

    @contextmanager
    def watching(self) -> Iterator[list[Tensor]]:
        """While open, every layer's output (B, T, C) is added to the list, in the order of the pass."""
        seen = self._seen = []
        try:
            yield seen
        finally:
            self._seen = None


def refuse_unlike_layers(student: LayerOutputs, teacher: LayerOutputs) -> None:
    """Raise where the layers of two models cannot be compared one by one.

    Raises:
        UsageError: their number or their width differs.
    """
    sizes = [f"{len(taps.layers)} layers of width {taps.hidden_size}" for taps in (student, teacher)]
    if sizes[0] != sizes[1]:
        raise UsageError(
            f"The checkpoint has {sizes[0]} and the teacher {sizes[1]}, so their hidden states cannot be compared.",
            "Leave --hidden-weight out, or distil from the checkpoint's own source.",
        )


def layer_distance(student_BTC: Sequence[Tensor], teacher_BTC: list[Tensor], keep_BT: Tensor) -> Tensor:
    """Σ over positions of the mean over layers of ‖s − t‖² / ‖t‖², float32, without unit.

    The mean squared error of hidden states (Jiao et al. 2020, TinyBERT, arXiv 1909.10351, §3.1, eq. 8, without its
    projection, since the widths agree), divided by the teacher's mean square at that position: otherwise the few
    positions and layers whose states are hundreds of times as large as the others' would be all that counts.

    Args:
        student_BTC, teacher_BTC: one each for every layer. The teacher's are taken off the list as they are used, so
            that they and the differences, which the backward pass needs, do not stand in memory together.
        keep_BT: positions that count.

    Raises:
        UnsupportedError: the student left layers out in this pass (layer drop).
    """
    layers = len(teacher_BTC)
    if len(student_BTC) != layers:
        raise UnsupportedError(
            f"The model ran {len(student_BTC)} layers in a pass and its teacher {layers}.",
            "Leave --hidden-weight out, or set the model's layer drop to zero.",
        )
    total = torch.zeros((), device=keep_BT.device)
    for state_BTC in student_BTC:
        target_BTC = teacher_BTC.pop(0).float()
        apart_BT = (state_BTC.float() - target_BTC).square().sum(dim=-1)
        size_BT = target_BTC.square().sum(dim=-1).clamp_min(_TINY)
        total = total + (apart_BT / size_BT)[keep_BT].sum()
    return total / layers
