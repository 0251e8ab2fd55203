"""Estimate the operations of a run, and the memory that it needs on each device.

The estimates are for dense models, and good enough to see whether a plan can work. ``--measure`` times real steps.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...checkpoint.load import blank_language_model
from ...checkpoint.source import Checkpoint
from ...errors import HeadfoldError
from ...spans import SpanCorruption
from ..loss.chunked import chunk_tokens
from ..settings import UptrainSettings

_FLOAT32, _BF16 = 4, 2
_ACTIVATION_IN_BF16 = 3  # bytes on average: the activations of norms stay float32
_COPIES_OF_A_CHUNK = 4  # logits, log-probabilities, gradient, and the teacher's logits
_INNER = ("intermediate_size", "d_ff", "encoder_ffn_dim")
_DECODER_LAYERS = ("num_decoder_layers", "decoder_layers")
_OF_THE_SOURCE = re.compile(r"\b(EncDecAttention|encoder_attn)\.(k|v)(_proj)?\.")


@dataclass(frozen=True)
class ModelSize:
    """The sizes of a model that the cost depends on.

    Attributes:
        parameters: number of all parameters; tied ones count once.
        trained: number of those that get gradients.
        looked_up: parameters of tables (embeddings, positions) that are read and not multiplied. The weight of a head
            is multiplied, also if it is tied to a table.
        layers: number of layers; of an encoder-decoder, those of its encoder.
        hidden: hidden width C.
        inner: width of the MLP.
        vocabulary: width V of the logits.
        written: in an encoder-decoder, parameters that are multiplied for written tokens alone, head included.
        decoder_layers: in an encoder-decoder, number of decoder layers.
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
    def of(cls, model: Any, encoder_decoder: bool) -> ModelSize:
        """Read the sizes from a model, which may be on the meta device."""
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
            *(_decoder_side(model) if encoder_decoder else (0, 0)),
        )

    def per_token(self, targets: float) -> int:
        """Number of parameters that one read token is multiplied with, if ``targets`` tokens are written for each."""
        used = self.parameters - self.looked_up
        return round(used - self.written + self.written * targets)


def _tables(model: Any) -> dict[int, nn.Parameter]:
    """Find tables that the head does not multiply with, by identity."""
    multiplied = getattr(model.get_output_embeddings(), "weight", None)
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    return {id(one): one for one in tables if isinstance(one, nn.Parameter) and one is not multiplied}


def _decoder_side(model: Any) -> tuple[int, int]:
    """Count (parameters of decoder and head, decoder layers).

    The decoder makes keys and values of the source once per source token, so those count as the encoder's.
    """
    tables = _tables(model)
    own = {id(one): one for name, one in model.get_decoder().named_parameters() if not _OF_THE_SOURCE.search(name)}
    own |= {id(one): one for one in model.get_output_embeddings().parameters()}
    layers = next((found for name in _DECODER_LAYERS if (found := getattr(model.config, name, None))), 0)
    return sum(one.numel() for key, one in own.items() if key not in tables), layers


def targets_per_token(settings: UptrainSettings, encoder_decoder: bool) -> float:
    """Number of target tokens for each token read. Sources and targets of pairs are assumed to be of equal length."""
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
    pass; under FSDP layers are gathered anew instead.

    Args:
        teacher_bytes: bytes of one of the teacher's weights.
        sharded: the processes share the weights (FSDP) instead of each holding all (DDP).
        bf16: the forward pass computes in bf16.
        cpu: the devices are CPUs, where chunks of logits are smaller.
    """
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
        # the teacher's, of written tokens; they are freed one by one as the differences are made
        memory["hidden states"] = round(layer_output * (student.decoder_layers * targets or student.layers))
    return CostEstimate(flops_per_token(student, teacher, targets) * tokens, memory)


def _optimizer_numbers(settings: UptrainSettings, student: ModelSize) -> int:
    """Count the optimizer's numbers: two for each trained one, or for Adafactor two for each row of a matrix."""
    return 2 * student.trained // (student.hidden if settings.optimizer == "adafactor" else 1)


def model_without_weights(place: str | Path, *, trust_remote_code: bool = False) -> tuple[Any, int]:
    """Make a checkpoint's model on the meta device from its config alone; also return the bytes of one weight on disk.

    Raises:
        UsageError, CheckpointError: there is no config.json.
    """
    source = Checkpoint.open(place, weights=False)
    with torch.device("meta"):
        model = blank_language_model(source.folder, trust_remote_code=trust_remote_code)
    return model, source.config_dtype.itemsize


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
