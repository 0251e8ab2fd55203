"""The loss of a step, computed a chunk of positions at a time.

Letters of shapes: B blocks, T tokens, C hidden size, N positions, V vocabulary, X = C, or V for a model run whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .head import Split, divert
from .hidden_states import LayerOutputs, layer_distance
from .token_losses import LossSums, TrainingLoss

_LOGITS_BYTES = {"cpu": 16 * 2**20}
_LOGITS_BYTES_ELSEWHERE = 256 * 2**20
"""Float32 logits of one chunk: on a CPU what its cache holds, on a GPU enough to keep it busy."""
_FEWEST = 256
"""Positions of a chunk at least: each adds a gradient as large as the head to the sum, which must not dominate."""


@dataclass(frozen=True)
class Lesson:
    """What one micro-batch is to teach, beside its tokens.

    Attributes:
        objective: what is minimised.
        keep_BT: positions whose logits are for a target.
        targets_N: these targets: the next tokens of a text, or those that an encoder-decoder is to write.
        teacher_NX: what the teacher's head makes its logits from at these positions; None without a teacher.
        teacher: the teacher itself.
        layers_BTC: what each of the teacher's layers put out; None where hidden states are left alone.
    """

    objective: TrainingLoss
    keep_BT: Tensor
    targets_N: Tensor
    teacher_NX: Tensor | None = None
    teacher: Split | None = None
    layers_BTC: list[Tensor] | None = None

    def chunk(self, logits_NV: Tensor, place: slice) -> tuple[LossSums, Tensor]:
        """LossSums and gradient for the logits of the positions at ``place``."""
        teacher_NV = None
        if self.teacher is not None and self.teacher_NX is not None:
            with torch.no_grad():
                teacher_NV = self.teacher.logits(self.teacher_NX[place])
        return self.objective(logits_NV, self.targets_N[place], teacher_NV)


def teach_in_chunks(model: Any, taps: LayerOutputs | None = None) -> Split:
    """Let ``model(lesson=Lesson, **inputs)`` return the :class:`LossSums` of that lesson; other calls stay as they are.

    The loss is computed inside the call of the head, which is inside that of the model, since a sharded model has its
    whole weights there and nowhere else.

    Args:
        taps: of the model's layers, for lessons that have the teacher's.
    """
    split = Split(model)

    def on_head(lesson: Lesson, states_NX: Tensor) -> LossSums:
        if split.whole:
            return _lesson_sums(split, lesson, states_NX)
        sums: LossSums = split.head(states_NX, lesson=lesson)
        return sums

    def on_model(*, lesson: Lesson, **inputs: Any) -> LossSums:
        if taps is None or lesson.layers_BTC is None:
            return on_head(lesson, split.features(**inputs)[lesson.keep_BT])
        with taps.watching() as layers_BTC:
            states_BTX = split.features(**inputs)
        sums = on_head(lesson, states_BTX[lesson.keep_BT])
        return lesson.objective.with_hidden(sums, layer_distance(layers_BTC, lesson.layers_BTC, lesson.keep_BT))

    if not split.whole:
        divert(split.head, "lesson", lambda states_NX, *, lesson: _lesson_sums(split, lesson, states_NX))
    divert(model, "lesson", on_model)
    return split


def _lesson_sums(split: Split, lesson: Lesson, states_NX: Tensor) -> LossSums:
    size = chunk_size(split.vocabulary, states_NX.device)
    apply: Any = _ChunkedLoss.apply
    return LossSums(*apply(split.logits, lesson.chunk, size, states_NX, *split.head_parameters()))


class _ChunkedLoss(torch.autograd.Function):
    """Loss and gradients in one go: a chunk's logits are gone before the next chunk's are made."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_of: Callable[[Tensor], Tensor],
        loss_of: Callable[[Tensor, slice], tuple[LossSums, Tensor]],
        size: int,
        states_NX: Tensor,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        grad_NX = torch.empty_like(states_NX)
        grads: list[Tensor] = []
        totals = torch.zeros(len(LossSums._fields), device=states_NX.device)
        for first in range(0, len(states_NX), size):
            place = slice(first, first + size)
            with torch.enable_grad():
                chunk_NX = states_NX[place].detach().requires_grad_()
                logits_NV = logits_of(chunk_NX)
            sums, grad_NV = loss_of(logits_NV.detach(), place)
            found = torch.autograd.grad(logits_NV, [chunk_NX, *trained], grad_NV.to(logits_NV.dtype))
            grad_NX[place] = found[0]
            # float32 sums, whatever the weights are in
            grads = [new.float() if not grads else grads[i].add_(new) for i, new in enumerate(found[1:])]
            totals += torch.stack(sums)
            del logits_NV, grad_NV, found
        if not len(states_NX):  # a micro-batch of one-token documents, kept apart, teaches nothing
            grads = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in trained]
        ctx.places = [index for index, parameter in enumerate(parameters) if parameter.requires_grad]
        ctx.count = len(parameters)
        ctx.save_for_backward(grad_NX, *grads)
        loss, *parts = (one.clone() for one in totals.unbind())
        ctx.mark_non_differentiable(*parts)
        return loss, *parts

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        grad_NX, *grads = ctx.saved_tensors
        given: list[Tensor | None] = [None] * ctx.count
        for place, one in zip(ctx.places, grads, strict=True):
            given[place] = one * grad
        return None, None, None, grad_NX * grad.to(grad_NX.dtype), *given


def chunk_size(vocabulary: int, device: torch.device) -> int:
    """Positions whose float32 logits fit into what a chunk may take, or the fewest that are worth a chunk."""
    granted = _LOGITS_BYTES.get(device.type, _LOGITS_BYTES_ELSEWHERE)
    return max(_FEWEST, granted // (4 * vocabulary))
