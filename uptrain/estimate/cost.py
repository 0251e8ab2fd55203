"""What a run will take: operations, and memory of one device.

Both are estimates for dense models, good enough to see whether a plan can work; ``--measure`` times the real thing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...checkpoint.backbone import is_encoder_decoder
from ...errors import HeadfoldError
from ...spans import SpanCorruption
from ..loss.chunked import chunk_size
from ..settings import UptrainSettings

_FLOAT32, _BF16 = 4, 2
_KEPT_IN_BF16 = 3  # bytes of an activation on average: what norms keep stays float32
_COPIES_OF_A_CHUNK = 4  # logits, log-probabilities, gradient, and the teacher's
_INNER = ("intermediate_size", "d_ff", "encoder_ffn_dim")
_DECODER_LAYERS = ("num_decoder_layers", "decoder_layers")
_OF_THE_SOURCE = re.compile(r"\b(EncDecAttention|encoder_attn)\.(k|v)(_proj)?\.")


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that cost depends on.

    Attributes:
        parameters: all of them; tied ones count once.
        trained: those that get gradients.
        looked_up: parameters of tables (embeddings, positions) that are read, not multiplied, as a tied head does.
        layers, hidden, inner, vocabulary: layers, C, width of the MLP, V.
        written: of an encoder-decoder: those that are multiplied for what is written alone, head included.
        decoder_layers: of an encoder-decoder; ``layers`` are then the encoder's.
    """

    parameters: int
    trained: int
    looked_up: int
    layers: int
    hidden: int
    inner: int
    vocabulary: int
    written: int = 0
    decoder_layers: int = 0

    @classmethod
    def of(cls, model: Any) -> Shape:
        """Read from a model, which may be on the meta device."""
        config = model.config.get_text_config()
        embedding = model.get_input_embeddings()
        hidden = embedding.weight.shape[-1]
        inner = next((found for name in _INNER if (found := getattr(config, name, None))), 4 * hidden)
        return cls(
            sum(one.numel() for one in model.parameters()),
            sum(one.numel() for one in model.parameters() if one.requires_grad),
            sum(one.numel() for one in _tables(model).values()),
            config.num_hidden_layers,
            hidden,
            max(inner) if isinstance(inner, list | tuple) else inner,
            embedding.weight.shape[0],
            *(_decoder_side(model) if is_encoder_decoder(model) else (0, 0)),
        )

    def per_token(self, targets: float) -> int:
        """Parameters that a token of a block is multiplied with, where ``targets`` of it are written for each one."""
        used = self.parameters - self.looked_up
        return round(used - self.written + self.written * targets)


def _tables(model: Any) -> dict[int, nn.Parameter]:
    """Tables that the head does not multiply with, by identity."""
    multiplied = getattr(model.get_output_embeddings(), "weight", None)
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    return {id(one): one for one in tables if isinstance(one, nn.Parameter) and one is not multiplied}


def _decoder_side(model: Any) -> tuple[int, int]:
    """(parameters of decoder and head, its layers); keys and values of what was read are made once a source token."""
    tables = _tables(model)
    own = {id(one): one for name, one in model.get_decoder().named_parameters() if not _OF_THE_SOURCE.search(name)}
    own |= {id(one): one for one in model.get_output_embeddings().parameters()}
    layers = next((found for name in _DECODER_LAYERS if (found := getattr(model.config, name, None))), 0)
    return sum(one.numel() for key, one in own.items() if key not in tables), layers


def targets_per_token(settings: UptrainSettings, model_writes: bool) -> float:
    """Target tokens for each token of a block: of span corruption as it counts them; pairs are taken to be even."""
    if not model_writes or settings.target_column is not None:
        return 1.0
    corrupt = SpanCorruption(tuple(range(settings.sequence_length)), 0, settings.noise_density, settings.mean_span)
    return corrupt.lengths(corrupt.tokens_for(settings.sequence_length))[1] / settings.sequence_length


def flops_per_token(student: Shape, teacher: Shape | None = None, targets: float = 1.0) -> int:
    """Floating-point operations that a token costs in training (Kaplan et al. 2020, arXiv 2001.08361, §2.1).

    Per weight: 2 in the forward pass, 2 for the gradient of the inputs, 2 more where the weight is trained; the
    teacher's forward pass 2. The products of attention with itself are left out, as there. Of an encoder-decoder, a
    token is one of the source, and its decoder works on ``targets`` tokens for each.
    """
    used, seen = student.parameters - student.looked_up, student.per_token(targets)
    own = 4 * seen + round(2 * min(student.trained, used) * seen / used)
    return own + (0 if teacher is None else 2 * teacher.per_token(targets))


@dataclass(frozen=True)
class CostEstimate:
    """What a run takes.

    Attributes:
        flops: of the whole run.
        memory: bytes on one device, by what they are for.
    """

    flops: int
    memory: dict[str, int]

    @property
    def bytes_per_device(self) -> int:
        return sum(self.memory.values())


def estimate_cost(
    settings: UptrainSettings,
    tokens: int,
    student: Shape,
    teacher: Shape | None = None,
    *,
    teacher_bytes: int = _BF16,
    processes: int = 1,
    sharded: bool = False,
    bf16: bool = False,
    cpu: bool = False,
) -> CostEstimate:
    """Estimate a run on ``processes`` devices.

    Weights, their gradients and AdamW's two moments are float32; under FSDP each device holds its share of all that
    and of the teacher. A layer keeps about 12 C + 5 I numbers a token for its backward pass where attention itself
    is computed in one fused piece, C being the hidden size and I the width of the MLP; with gradient checkpointing
    the C at its entrance, and one layer at a time the rest. A forward pass in bf16 keeps a bf16 copy of each weight
    for the backward pass; under FSDP layers are gathered anew instead.

    Args:
        teacher_bytes: of one of the teacher's weights.
        sharded: the processes share the weights (FSDP) instead of each holding all (DDP).
        bf16: the forward pass computes in bf16.
        cpu: the devices are CPUs, where chunks of logits are smaller.
    """
    share = processes if sharded else 1
    positions = min(settings.micro_batch, max(1, settings.batch // processes)) * settings.sequence_length
    kept = (12 * student.hidden + 5 * student.inner) * positions * (_KEPT_IN_BF16 if bf16 else _FLOAT32)
    targets = targets_per_token(settings, bool(student.decoder_layers))
    layers = student.layers + student.decoder_layers * targets
    layer = student.hidden * positions * _FLOAT32  # bytes of what one puts out
    chunk = min(positions, chunk_size(student.vocabulary, torch.device("cpu" if cpu else "cuda")))
    memory = {
        "weights": student.parameters * _FLOAT32 // share,
        "gradients": student.trained * _FLOAT32 // share,
        "optimizer": _state(settings, student) * _FLOAT32 // share,
        "activations": round(layer * layers) + kept if settings.gradient_checkpointing else round(kept * layers),
        "logits": _COPIES_OF_A_CHUNK * chunk * student.vocabulary * _FLOAT32,
        "the head's gradient": 2 * student.vocabulary * student.hidden * _FLOAT32,  # its sum, and that times the scale
    }
    if bf16 and not sharded:
        memory["weights in bf16"] = student.parameters * _BF16
    if teacher is not None:
        memory["teacher"] = teacher.parameters * teacher_bytes // share
    if teacher is not None and settings.hidden_weight:
        # the teacher's, of what is written; they make room for the differences one by one
        memory["hidden states"] = round(layer * (student.decoder_layers * targets or student.layers))
    return CostEstimate(flops_per_token(student, teacher, targets) * tokens, memory)


def _state(settings: UptrainSettings, student: Shape) -> int:
    """Numbers that the optimizer keeps: two for each trained one, or for Adafactor two for each row of a matrix."""
    return 2 * student.trained // (student.hidden if settings.optimizer == "adafactor" else 1)


def on_paper(place: str | Path, *, trust_remote_code: bool = False) -> tuple[Any, int]:
    """A checkpoint's model on the meta device from its config alone, and the bytes of one weight on disk.

    Raises:
        UsageError, CheckpointError: there is no config.json to be had.
    """
    from ...checkpoint.load import blank_language_model
    from ...checkpoint.source import Checkpoint

    source = Checkpoint.open(place, weights=False)
    with torch.device("meta"):
        model = blank_language_model(source.folder, trust_remote_code=trust_remote_code)
    return model, source.config_dtype.itemsize


def refuse_what_cannot_fit(plan: CostEstimate, available: int, where: str) -> None:
    """Raise where a plan needs more memory than a device has.

    Raises:
        HeadfoldError: it does.
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
