"""Distance between the hidden states of student and teacher, decoder layer by decoder layer.

Letters of shapes: B sequences, T tokens, C hidden width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...console import counted
from ...errors import UnsupportedError, UsageError
from ...libraries.transformers_internals import layers_within

_TINY = torch.finfo(torch.float32).tiny  # a token whose hidden states are all zero would divide by zero


class LayerOutputs:
    """Collects the output of each decoder layer during a forward pass.

    Args:
        model: as loaded, before anything wraps it. For an encoder-decoder, only the layers of the decoder count.

    Raises:
        UsageError: the class does not say which of its modules are layers.
    """

    def __init__(self, model: Any) -> None:
        self.layers = layers_within(model, model.get_decoder())
        self.hidden_size = getattr(model.config.get_text_config(decoder=True), "hidden_size", None)
        if not self.layers:
            raise UsageError(
                f"{type(model).__name__} does not say which of its modules are layers, so their hidden states cannot "
                "be compared.",
                "Leave --hidden-weight out.",
            )
        self._outputs: list[Tensor] | None = None
        for layer in self.layers:
            layer.register_forward_hook(self._collect)

    def _collect(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        # outside of `collecting` nothing is held: gradient checkpointing runs layers a second time in the backward pass
        if self._outputs is not None:
            self._outputs.append(output[0] if isinstance(output, tuple) else output)

    @contextmanager
    def collecting(self) -> Iterator[list[Tensor]]:
        """While open, add the output (B, T, C) of every layer to the list, in the order of the pass."""
        outputs = self._outputs = []
        try:
            yield outputs
        finally:
            self._outputs = None


def refuse_unlike_layers(student: LayerOutputs, teacher: LayerOutputs) -> None:
    """Check that the layers of two models can be compared one by one.

    Raises:
        UsageError: their number or their width differs.
    """
    sizes = [
        f"{counted(len(outputs.layers), 'layer')} of width {outputs.hidden_size}" for outputs in (student, teacher)
    ]
    if sizes[0] != sizes[1]:
        raise UsageError(
            f"The checkpoint has {sizes[0]} and the teacher {sizes[1]}, so their hidden states cannot be compared.",
            "Leave --hidden-weight out, or distil from the checkpoint's own source.",
        )


def layer_distance(student_BTC: Sequence[Tensor], teacher_BTC: list[Tensor], scored_BT: Tensor) -> Tensor:
    """Sum over tokens of the mean over layers of ‖s − t‖² / ‖t‖², in float32 and without unit.

    This is the mean squared error of hidden states (Jiao et al. 2020, TinyBERT, arXiv 1909.10351, §3.1, eq. 8, without
    its projection, since the widths agree), divided by the teacher's mean square at that token. Without the division,
    the few tokens and layers whose states are hundreds of times larger than the others' would be all that counts.

    Args:
        student_BTC: one tensor per layer.
        teacher_BTC: one tensor per layer. The function empties this list as it goes, so that the teacher's states and
            the differences, which the backward pass needs, are not in memory together.
        scored_BT: True at the tokens that count.

    Raises:
        UnsupportedError: the student left layers out in this pass (layer drop).
    """
    layers = len(teacher_BTC)
    if len(student_BTC) != layers:
        raise UnsupportedError(
            f"The model ran {len(student_BTC)} layers in a pass and its teacher {layers}.",
            "Leave --hidden-weight out, or set the model's layer drop to zero.",
        )
    total = torch.zeros((), device=scored_BT.device)
    for state_BTC in student_BTC:
        # float32: squares of bf16 numbers would lose their last digits
        target_BTC = teacher_BTC.pop(0).float()
        squared_distance_BT = (state_BTC.float() - target_BTC).square().sum(dim=-1)
        squared_size_BT = target_BTC.square().sum(dim=-1).clamp_min(_TINY)
        total = total + (squared_distance_BT / squared_size_BT)[scored_BT].sum()
    return total / layers
