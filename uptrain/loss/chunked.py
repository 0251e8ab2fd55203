"""Compute the loss of a step a chunk of tokens at a time.

Letters of shapes: B sequences, T tokens, C hidden width, N target tokens, V vocabulary. Inputs of a head, and their
gradients, have no letter for their last dimension: its width is C, or V for a model that is run whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .head import SplitModel, route_calls
from .hidden_states import LayerOutputs, layer_distance
from .token_losses import LossSums, TrainingLoss

_LOGITS_BYTES = {"cpu": 16 * 2**20}
_LOGITS_BYTES_ELSEWHERE = 256 * 2**20
"""Bytes of the float32 logits of one chunk: on a CPU they fit into its cache, on a GPU they keep it busy."""
_MIN_CHUNK_TOKENS = 256
"""Each chunk adds a gradient as large as the head to the sum. With fewer tokens that addition would dominate."""


@dataclass(frozen=True)
class LossInputs:
    """Inputs of the loss of one micro-batch, besides those of the model.

    Attributes:
        loss: what is computed.
        scored_BT: True at the tokens whose logits predict a target.
        targets_N: these targets: the next tokens of a text, or the tokens that an encoder-decoder is to write.
        teacher_N: inputs of the teacher's head for these tokens; None without a teacher.
        teacher: the teacher itself.
        layers_BTC: output of each of the teacher's layers; None if hidden states are not compared.
    """

    loss: TrainingLoss
    scored_BT: Tensor
    targets_N: Tensor
    teacher_N: Tensor | None = None
    teacher: SplitModel | None = None
    layers_BTC: list[Tensor] | None = None

    def of_chunk(self, logits_NV: Tensor, chunk: slice) -> tuple[LossSums, Tensor]:
        """Compute the sums of one chunk of tokens, and the gradient by its logits."""
        teacher_NV = None
        if self.teacher is not None and self.teacher_N is not None:
            with torch.no_grad():
                teacher_NV = self.teacher.logits(self.teacher_N[chunk])
        return self.loss(logits_NV, self.targets_N[chunk], teacher_NV)


def attach_chunked_loss(model: Any, outputs: LayerOutputs | None = None) -> SplitModel:
    """Make ``model(loss_inputs=LossInputs, **inputs)`` return :class:`LossSums`. Other calls stay as they are.

    The loss is computed inside the call of the head, which is inside the call of the model: a sharded model has its
    whole weights there and nowhere else.

    Args:
        outputs: of the model's layers, for losses that compare hidden states with the teacher's.
    """
    split = SplitModel(model)

    def run_head(loss_inputs: LossInputs, head_inputs_N: Tensor) -> LossSums:
        if split.whole:
            return _sums(split, loss_inputs, head_inputs_N)
        sums: LossSums = split.head(head_inputs_N, loss_inputs=loss_inputs)
        return sums

    def run_model(*, loss_inputs: LossInputs, **inputs: Any) -> LossSums:
        if outputs is None or loss_inputs.layers_BTC is None:
            return run_head(loss_inputs, split.head_inputs(**inputs)[loss_inputs.scored_BT])
        with outputs.collecting() as layers_BTC:
            head_inputs_BT = split.head_inputs(**inputs)
        sums = run_head(loss_inputs, head_inputs_BT[loss_inputs.scored_BT])
        distance = layer_distance(layers_BTC, loss_inputs.layers_BTC, loss_inputs.scored_BT)
        return loss_inputs.loss.add_hidden(sums, distance)

    if not split.whole:
        route_calls(
            split.head, "loss_inputs", lambda head_inputs_N, *, loss_inputs: _sums(split, loss_inputs, head_inputs_N)
        )
    route_calls(model, "loss_inputs", run_model)
    return split


def _sums(split: SplitModel, loss_inputs: LossInputs, head_inputs_N: Tensor) -> LossSums:
    size = chunk_tokens(split.vocabulary, head_inputs_N.device)
    apply: Any = _ChunkedLoss.apply
    return LossSums(*apply(split.logits, loss_inputs.of_chunk, size, head_inputs_N, *split.head_parameters()))


class _ChunkedLoss(torch.autograd.Function):
    """Computes loss and gradients in one go: the logits of a chunk are gone before those of the next are made."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_of: Callable[[Tensor], Tensor],
        loss_of: Callable[[Tensor, slice], tuple[LossSums, Tensor]],
        size: int,
        head_inputs_N: Tensor,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        grad_N = torch.empty_like(head_inputs_N)
        grads: list[Tensor] = []
        totals = torch.zeros(len(LossSums._fields), device=head_inputs_N.device)
        for first in range(0, len(head_inputs_N), size):
            chunk = slice(first, first + size)
            with torch.enable_grad():  # autograd is off inside a Function
                inputs_N = head_inputs_N[chunk].detach().requires_grad_()
                logits_NV = logits_of(inputs_N)
            sums, grad_NV = loss_of(logits_NV.detach(), chunk)
            found = torch.autograd.grad(logits_NV, [inputs_N, *trained], grad_NV.to(logits_NV.dtype))
            grad_N[chunk] = found[0]
            # float32 sums, whatever the weights are in
            grads = [new.float() if not grads else grads[i].add_(new) for i, new in enumerate(found[1:])]
            totals += torch.stack(sums)
            del logits_NV, grad_NV, found  # or they would still be there while the next chunk's are made
        if not len(head_inputs_N):  # a micro-batch of one-token documents that do not see each other has no targets
            grads = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in trained]
        ctx.trained = [index for index, parameter in enumerate(parameters) if parameter.requires_grad]
        ctx.parameters = len(parameters)
        ctx.save_for_backward(grad_N, *grads)
        loss, *terms = (one.clone() for one in totals.unbind())
        ctx.mark_non_differentiable(*terms)
        return loss, *terms

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        grad_N, *grads = ctx.saved_tensors
        of_parameters: list[Tensor | None] = [None] * ctx.parameters
        for index, one in zip(ctx.trained, grads, strict=True):
            of_parameters[index] = one * grad
        return None, None, None, grad_N * grad.to(grad_N.dtype), *of_parameters


def chunk_tokens(vocabulary: int, device: torch.device) -> int:
    """Choose the tokens of a chunk: as many as its bytes allow, but enough to be worth a chunk."""
    allowed = _LOGITS_BYTES.get(device.type, _LOGITS_BYTES_ELSEWHERE)
    return max(_MIN_CHUNK_TOKENS, allowed // (4 * vocabulary))
