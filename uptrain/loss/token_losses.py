"""Sums of token losses and their gradients: cross-entropy with the text, and KL divergence from a teacher.

These are sums. The caller divides by the tokens of the whole step, over all micro-batches and processes, so the
gradient equals the gradient of one big batch, however it was cut. Gradients are written out by hand: autograd would
keep several more copies of the logits, the largest tensor of a step.

Letters of shapes: N target tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..settings import UptrainSettings

Direction = Literal["forward", "reverse"]


class LossSums(NamedTuple):
    """The weighted loss and its terms, each summed over tokens in float32. A term that was not computed is zero.

    All are in nats except ``hidden``, which has no unit (:func:`headfold.uptrain.loss.hidden_states.layer_distance`).
    """

    loss: Tensor
    cross_entropy: Tensor
    divergence: Tensor
    hidden: Tensor


def _sums(loss: Tensor, **terms: Tensor) -> LossSums:
    """Fill in zero for terms that were not computed."""
    zero = torch.zeros_like(loss)
    return LossSums(loss, *(terms.get(name, zero) for name in LossSums._fields[1:]))


def cross_entropy(logits_NV: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the sum of −ln p(target), and its gradient (N, V) by the logits: softmax − one-hot."""
    # float32, since the bf16 logits of autocast have about three digits
    log_p_NV = F.log_softmax(logits_NV.float(), dim=-1)
    loss = -log_p_NV.gather(1, targets_N[:, None]).sum()
    grad_NV = log_p_NV.exp_()  # in place: the log-probabilities are not needed again
    grad_NV[torch.arange(len(targets_N), device=targets_N.device), targets_N] -= 1
    return loss, grad_NV


def forward_divergence(student_NV: Tensor, teacher_NV: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Compute T² · Σ KL(teacher ‖ student) at temperature T, and its gradient by the student's logits.

    Hinton et al. 2015, arXiv 1503.02531, §2. The gradient is T · (q − p), with p the teacher's and q the student's
    probabilities.
    """
    log_q_NV = F.log_softmax(student_NV.float() / temperature, dim=-1)
    log_p_NV = F.log_softmax(teacher_NV.float() / temperature, dim=-1)
    loss = F.kl_div(log_q_NV, log_p_NV, reduction="sum", log_target=True)
    grad_NV = log_q_NV.exp_().sub_(log_p_NV.exp_())
    return loss * temperature**2, grad_NV.mul_(temperature)


def reverse_divergence(student_NV: Tensor, teacher_NV: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Compute T² · Σ KL(student ‖ teacher) at temperature T, and its gradient by the student's logits.

    Gu et al. 2024, arXiv 2306.08543, §2.1. The gradient is T · q · (ln q − ln p − KL), with the KL of that token.
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
    """The loss of a run: ``weight`` · divergence from the teacher + (1 − ``weight``) · cross-entropy, plus
    ``hidden_weight`` · distance of the hidden states to the teacher's.

    Attributes:
        weight: share of the divergence. Without a teacher the loss is the cross-entropy alone.
        temperature: divides the logits of both models before they are compared.
        direction: ``forward`` is KL(teacher ‖ student), which covers all that the teacher finds likely; ``reverse`` is
            KL(student ‖ teacher), which avoids what the teacher finds unlikely.
        hidden_weight: weight of the hidden states; 0 leaves them alone.
    """

    weight: float = 1.0
    temperature: float = 1.0
    direction: Direction = "forward"
    hidden_weight: float = 0.0

    @classmethod
    def of(cls, settings: UptrainSettings) -> TrainingLoss:
        """Make the loss of these settings."""
        return cls(settings.distillation_weight, settings.temperature, settings.divergence, settings.hidden_weight)

    def logged_terms(self, has_teacher: bool) -> list[str]:
        """Name the terms that the metrics show beside the loss."""
        terms = {"divergence": has_teacher, "hidden": self.hidden_weight > 0}
        return [name for name, used in terms.items() if used]

    def __call__(self, logits_NV: Tensor, targets_N: Tensor, teacher_NV: Tensor | None) -> tuple[LossSums, Tensor]:
        """Compute the sums, and the gradient (N, V) of ``loss`` by the student's logits."""
        if teacher_NV is None:
            text, grad_NV = cross_entropy(logits_NV, targets_N)
            return _sums(text, cross_entropy=text), grad_NV
        divergence, grad_NV = _DIVERGENCES[self.direction](logits_NV, teacher_NV, self.temperature)
        if self.weight == 1:  # the default. Another softmax over the vocabulary would be for nothing
            return _sums(divergence, divergence=divergence), grad_NV
        text, text_grad_NV = cross_entropy(logits_NV, targets_N)
        grad_NV.mul_(self.weight).add_(text_grad_NV, alpha=1 - self.weight)
        loss = self.weight * divergence + (1 - self.weight) * text
        return _sums(loss, cross_entropy=text, divergence=divergence), grad_NV

    def add_hidden(self, sums: LossSums, hidden: Tensor) -> LossSums:
        """Add the distance of the hidden states to the sums."""
        return sums._replace(loss=sums.loss + self.hidden_weight * hidden, hidden=hidden)
