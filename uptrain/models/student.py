"""The model to train: read or drawn, checked, limited to the weights to train, and made faster."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from ...checkpoint.load import blank_language_model, load_language_model
from ...checkpoint.source import Checkpoint
from ...errors import UnsupportedError, UsageError
from ...libraries.transformers_internals import layers_within, name_no_absent_layers
from ..settings import UptrainSettings

_ATTENTION = re.compile(r"\.(self_attn|self_attention|attention|attn|encoder_attn|SelfAttention|EncDecAttention)\.")
_TRAINED = {
    "all": re.compile(""),
    "attention": _ATTENTION,
    # names of keys and values alone: a fused projection would train the queries as well
    "kv": re.compile(_ATTENTION.pattern + r"(.*\.)?(k|v|kv|key|value|key_value)_?(proj|projection|norm|layernorm)?\."),
}


def build_student(source: Checkpoint, from_scratch: bool, trust_remote_code: bool) -> Any:
    """Make the model with float32 weights: in bf16, updates smaller than its step size would be lost."""
    build = blank_language_model if from_scratch else load_language_model
    return build(source.folder, dtype=torch.float32, trust_remote_code=trust_remote_code)


def refuse_long_sequences(sequence_length: int, config: Any) -> None:
    """Check that a sequence is not longer than the positions of the model.

    Raises:
        UsageError: it is.
    """
    # models with relative positions state no limit
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and sequence_length > longest:
        raise UsageError(
            f"Sequences of {sequence_length} tokens are longer than the {longest} that the model can take.",
            f"Give --sequence-length {longest}.",
        )


def freeze_other_weights(model: nn.Module, train: str) -> None:
    """Leave only the weights of ``train`` trainable: ``all``, ``attention``, or ``kv`` (keys and values).

    Raises:
        UsageError: the class has no weights of that kind, for example because keys and values are fused with queries.
    """
    wanted = _TRAINED[train]
    found = False
    for name, parameter in model.named_parameters():
        trained = wanted.search(f".{name}") is not None
        parameter.requires_grad_(trained)
        found |= trained and parameter.ndim >= 2  # a norm of keys alone is not what the user meant
    if not found:
        raise UsageError(
            f"{type(model).__name__} has no weights that `--train {train}` means.", "Take --train attention, or all."
        )


def speed_up(model: Any, settings: UptrainSettings) -> None:
    """Apply the settings that change speed and memory, but not the result.

    Raises:
        UnsupportedError: the class cannot compute its activations again, or does not name the layers to compile.
    """
    if settings.gradient_checkpointing:
        if not model.supports_gradient_checkpointing:
            raise UnsupportedError(
                f"{type(model).__name__} cannot compute its activations again.", "Leave --gradient-checkpointing out."
            )
        # the re-entrant form needs inputs with a gradient, which frozen embeddings do not give
        model.activation_checkpointing_enable({"use_reentrant": False})
    if settings.compile:
        # layer by layer: all layers share one graph, and the head is called from outside the model's forward
        layers = layers_within(model, model)
        if not layers:
            raise UnsupportedError(
                f"{type(model).__name__} does not say which of its modules are layers, so none can be compiled.",
                "Leave --compile out.",
            )
        for layer in layers:
            layer.compile()


def fit_for_sharding(model: Any, encoder_decoder: bool) -> None:
    """Let both sides of an encoder-decoder use the very same embedding module, and not only the same weight.

    Otherwise FSDP would put the weight into two of its groups, which it refuses. Names of layers are checked as well.
    """
    name_no_absent_layers(model)
    if encoder_decoder:
        model.set_input_embeddings(model.get_input_embeddings())
