"""Sums of token losses and their gradients: cross-entropy with the text, and KL divergence from a teacher.

Sums, not means: the caller divides by the tokens of the whole step, over all micro-batches and processes, so that the
gradient is that of one big batch however it was cut. Gradients are written out, since autograd would keep several more
copies of the logits, the largest tensor of a step.

Letters of shapes: N positions, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Direction = Literal["forward", "reverse"]


class LossSums(NamedTuple):
    """Summed over positions, float32: the weighted loss, and what it is made of (zero where not asked for).

    Nats, but for ``hidden``, which has no unit (:func:`headfold.uptrain.loss.hidden_states.layer_distance`).
    """

    loss: Tensor
    cross_entropy: Tensor
    divergence: Tensor
    hidden: Tensor


def cross_entropy(logits_NV: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of −ln p(target), and its gradient (N, V) by the logits: softmax − one-hot."""
    log_p_NV = F.log_softmax(logits_NV.float(), dim=-1)
    loss = -log_p_NV.gather(1, targets_N[:, None]).sum()
    grad_NV = log_p_NV.exp_()
    grad_NV[torch.arange(len(targets_N), device=targets_N.device), targets_N] -= 1
    return loss, grad_NV


def forward_divergence(student_NV: Tensor, teacher_NV: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """T² · Σ KL(teacher ‖ student) at temperature T (Hinton et al. 2015, arXiv 1503.02531, §2), and its gradient.

    The gradient by the student's logits is T · (q − p), with p the teacher's and q the student's probabilities.
    """
    log_q_NV = F.log_softmax(student_NV.float() / temperature, dim=-1)
    log_p_NV = F.log_softmax(teacher_NV.float() / temperature, dim=-1)
    loss = F.kl_div(log_q_NV, log_p_NV, reduction="sum", log_target=True)
    grad_NV = log_q_NV.exp_().sub_(log_p_NV.exp_())
    return loss * temperature**2, grad_NV.mul_(temperature)


def reverse_divergence(student_NV: Tensor, teacher_NV: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """T² · Σ KL(student ‖ teacher) at temperature T (Gu et al. 2024, arXiv 2306.08543, §2.1), and its gradient.

    The gradient by the student's logits is T · q · (ln q − ln p − KL), with KL that of the position.
    """
    log_q_NV = F.log_softmax(student_NV.float() / temperature, dim=-1)
    apart_NV = log_q_NV - F.log_softmax(teacher_NV.float() / temperature, dim=-1)
    q_NV = log_q_NV.exp_()
    loss_N1 = (q_NV * apart_NV).sum(dim=-1, keepdim=True)
    grad_NV = q_NV.mul_(apart_NV.sub_(loss_N1))
    return loss_N1.sum() * temperature**2, grad_NV.mul_(temperature)


_DIVERGENCES = {"forward": forward_divergence, "reverse": reverse_divergence}


@dataclass(frozen=True)
class TrainingLoss:
    """What a run minimises: ``weight`` · divergence from the teacher + (1 − ``weight``) · cross-entropy, and
    ``hidden_weight`` · distance of the hidden states to the teacher's.

    Attributes:
        weight: share of the divergence where there is a teacher.
        temperature: divides the logits of both before they are compared.
        direction: ``forward`` is KL(teacher ‖ student), which covers all that the teacher finds likely; ``reverse`` is
            KL(student ‖ teacher), which keeps away from what the teacher finds unlikely.
        hidden_weight: of the hidden states, beside the rest; 0 leaves them alone.
    """

    weight: float = 1.0
    temperature: float = 1.0
    direction: Direction = "forward"
    hidden_weight: float = 0.0

    def __call__(self, logits_NV: Tensor, targets_N: Tensor, teacher_NV: Tensor | None) -> tuple[LossSums, Tensor]:
        """The sums, and the gradient (N, V) of ``loss`` by the student's logits."""
        zero = torch.zeros((), device=logits_NV.device)
        if teacher_NV is None:
            loss, grad_NV = cross_entropy(logits_NV, targets_N)
            return LossSums(loss, loss, zero, zero), grad_NV
        divergence, grad_NV = _DIVERGENCES[self.direction](logits_NV, teacher_NV, self.temperature)
        if self.weight == 1:
            return LossSums(divergence, zero, divergence, zero), grad_NV
        loss, text_grad_NV = cross_entropy(logits_NV, targets_N)
        grad_NV.mul_(self.weight).add_(text_grad_NV, alpha=1 - self.weight)
        return LossSums(self.weight * divergence + (1 - self.weight) * loss, loss, divergence, zero), grad_NV

    def with_hidden(self, sums: LossSums, hidden: Tensor) -> LossSums:
        """The sums with the distance of the hidden states added."""
        return sums._replace(loss=sums.loss + self.hidden_weight * hidden, hidden=hidden)
