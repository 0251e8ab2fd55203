"""Estimate the operations of a run, and the memory that it needs on each device.

The estimates are for dense models, and good enough to see whether a plan can work. ``--measure`` times real steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...errors import HeadfoldError
from ...spans import SpanCorruption
from ..loss.chunked import chunk_tokens
from ..settings import UptrainSettings
from .model_size import ModelSize

_FLOAT32, _BF16 = 4, 2
_ACTIVATION_IN_BF16 = 3  # bytes on average: the activations of norms stay float32
_COPIES_OF_A_CHUNK = 4  # logits, log-probabilities, gradient, and the teacher's logits


def targets_per_token(settings: UptrainSettings, encoder_decoder: bool) -> float:
    """Compute the target tokens for each token read. Sources and targets of pairs are assumed to be of equal length."""
    if not encoder_decoder or settings.target_column is not None:
        return 1.0
    corrupt = SpanCorruption(tuple(range(settings.sequence_length)), 0, settings.noise_density, settings.mean_span)
    return corrupt.lengths(corrupt.tokens_for(settings.sequence_length))[1] / settings.sequence_length


def flops_per_token(student: ModelSize, teacher: ModelSize | None = None, targets: float = 1.0) -> int:
    """Count the floating-point operations of one token in training (Kaplan et al. 2020, arXiv 2001.08361, §2.1).

    Each weight costs 2 in the forward pass, 2 for the gradient of the inputs, and 2 more if it is trained. The
    teacher's forward pass costs 2 per weight. As in the paper, the products of queries with keys and of attention
    weights with values are left out. In an encoder-decoder the token is one of the source, and the decoder works on
    ``targets`` tokens for each.
    """
    used, seen = student.parameters - student.looked_up, student.per_token(targets)
    own = 4 * seen + round(2 * min(student.trained, used) * seen / used)
    return own + (0 if teacher is None else 2 * teacher.per_token(targets))


@dataclass(frozen=True)
class CostEstimate:
    """Operations and memory of a run.

    Attributes:
        flops: floating-point operations of the whole run.
        memory: bytes on one device, by their purpose.
    """

    flops: int
    memory: dict[str, int]

    @property
    def bytes_per_device(self) -> int:
        return sum(self.memory.values())


def estimate_cost(
    settings: UptrainSettings,
    tokens: int,
    student: ModelSize,
    teacher: ModelSize | None = None,
    *,
    teacher_bytes: int = _BF16,
    processes: int = 1,
    sharded: bool = False,
    bf16: bool = False,
    cpu: bool = False,
) -> CostEstimate:
    """Estimate the cost of a run on ``processes`` devices.

    Weights, their gradients and AdamW's two moments are float32. Under FSDP each device holds its share of all these
    and of the teacher. With fused attention, a layer keeps about 12 C + 5 I numbers per token for its backward pass,
    where C is the hidden width and I the width of the MLP. With gradient checkpointing it keeps the C at its entrance,
    and only one layer at a time has the rest. A forward pass in bf16 keeps a bf16 copy of each weight for the backward
    pass. Under FSDP layers are gathered anew instead.

    Args:
        teacher_bytes: bytes of one of the teacher's weights.
        sharded: the processes share the weights (FSDP) instead of each holding all (DDP).
        bf16: the forward pass computes in bf16.
        cpu: the devices are CPUs, where chunks of logits are smaller.
    """
    # under DDP every device holds everything
    share = processes if sharded else 1
    tokens_at_once = min(settings.micro_batch, max(1, settings.batch // processes)) * settings.sequence_length
    per_token = 12 * student.hidden + 5 * student.inner
    inside_layer = per_token * tokens_at_once * (_ACTIVATION_IN_BF16 if bf16 else _FLOAT32)
    targets = targets_per_token(settings, bool(student.decoder_layers))
    layers = student.layers + student.decoder_layers * targets
    layer_output = student.hidden * tokens_at_once * _FLOAT32
    checkpointed = round(layer_output * layers) + inside_layer
    chunk = min(tokens_at_once, chunk_tokens(student.vocabulary, torch.device("cpu" if cpu else "cuda")))
    memory = {
        "weights": student.parameters * _FLOAT32 // share,
        "gradients": student.trained * _FLOAT32 // share,
        "optimizer": _optimizer_numbers(settings, student) * _FLOAT32 // share,
        "activations": checkpointed if settings.gradient_checkpointing else round(inside_layer * layers),
        "logits": _COPIES_OF_A_CHUNK * chunk * student.vocabulary * _FLOAT32,
        # twice: the sum over chunks, and the sum times the gradient of the loss
        "the head's gradient": 2 * student.vocabulary * student.hidden * _FLOAT32,
    }
    if bf16 and not sharded:
        memory["weights in bf16"] = student.parameters * _BF16
    if teacher is not None:
        memory["teacher"] = teacher.parameters * teacher_bytes // share
    if teacher is not None and settings.hidden_weight:
        # the teacher's, of written tokens. They are freed one by one as the differences are made
        memory["hidden states"] = round(layer_output * (student.decoder_layers * targets or student.layers))
    return CostEstimate(flops_per_token(student, teacher, targets) * tokens, memory)


def _optimizer_numbers(settings: UptrainSettings, student: ModelSize) -> int:
    """Count the optimizer's numbers: two for each trained one, or for Adafactor two for each row of a matrix."""
    return 2 * student.trained // (student.hidden if settings.optimizer == "adafactor" else 1)


def refuse_what_cannot_fit(plan: CostEstimate, available: int, where: str) -> None:
    """Check that a device has the memory that a plan needs.

    Raises:
        HeadfoldError: it has not.
    """
    if plan.bytes_per_device <= available:
        return
    gib = 2**30
    raise HeadfoldError(
        f"This run needs about {plan.bytes_per_device / gib:.1f} GiB on each device, and {where} has "
        f"{available / gib:.1f} GiB.",
        "Lower --micro-batch, add --gradient-checkpointing, share the weights over more devices "
        "(--launch fsdp2-8), or train less (--train attention).",
    )
