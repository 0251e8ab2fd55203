"""Sums of token losses: cross-entropy with the text, and KL divergence from a teacher.

Sums, not means: the caller divides by the tokens of the whole step, over all micro-batches and processes, so that the
gradient is that of one big batch however it was cut.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def cross_entropy_sum(logits_BTV: Tensor, ids_BT: Tensor) -> Tensor:
    """Sum over positions of −ln p(next token), in nats and float32.

    Args:
        logits_BTV: logits at each position.
        ids_BT: the tokens; those at 1… are the targets of positions 0….
    """
    targets = ids_BT[:, 1:].reshape(-1)
    return F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1).float(), targets, reduction="sum")


def distillation_sum(student_BTV: Tensor, teacher_BTV: Tensor) -> Tensor:
    """Sum over positions of KL(teacher ‖ student), in nats and float32 (Hinton et al. 2015, arXiv 1503.02531, T = 1).

    The last position is left out, as it is for the cross-entropy.
    """
    student = F.log_softmax(student_BTV[:, :-1].flatten(0, 1).float(), dim=-1)
    teacher = F.log_softmax(teacher_BTV[:, :-1].flatten(0, 1).float(), dim=-1)
    return F.kl_div(student, teacher, reduction="sum", log_target=True)
