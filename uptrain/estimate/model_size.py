"""The sizes of a model that the cost of a run depends on, read from its config alone if need be."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...checkpoint.load import blank_language_model
from ...checkpoint.source import Checkpoint

_INNER = ("intermediate_size", "d_ff", "encoder_ffn_dim")
_DECODER_LAYERS = ("num_decoder_layers", "decoder_layers")
# Keys and values of cross-attention, by the names of T5 and of BART.
_OF_THE_SOURCE = re.compile(r"\b(EncDecAttention|encoder_attn)\.(k|v)(_proj)?\.")


@dataclass(frozen=True)
class ModelSize:
    """The sizes of a model that the cost depends on.

    Attributes:
        parameters: number of all parameters, where tied ones count once.
        trained: number of those that get gradients.
        looked_up: parameters of tables (embeddings, positions) that are read and not multiplied. The weight of a head
            is multiplied, also if it is tied to a table.
        layers: number of layers, or of encoder layers in an encoder-decoder.
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
        # the part for language, of a config that may also describe images
        config = model.config.get_text_config()
        embedding = model.get_input_embeddings()
        hidden = embedding.weight.shape[-1]
        # GPT-2 states no width and means 4 C
        inner = next((found for name in _INNER if (found := getattr(config, name, None))), 4 * hidden)
        return cls(
            sum(one.numel() for one in model.parameters()),
            sum(one.numel() for one in model.parameters() if one.requires_grad),
            sum(one.numel() for one in _tables(model).values()),
            config.num_hidden_layers,
            hidden,
            # one width per layer; the widest decides about the memory
            max(inner) if isinstance(inner, list | tuple) else inner,
            embedding.weight.shape[0],
            *(_decoder_side(model) if encoder_decoder else (0, 0)),
        )

    def per_token(self, targets: float) -> int:
        """Count the parameters that one read token is multiplied with, if ``targets`` tokens are written for each."""
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
    # the head works on written tokens, even if its weight is tied to an embedding
    own |= {id(one): one for one in model.get_output_embeddings().parameters()}
    layers = next((found for name in _DECODER_LAYERS if (found := getattr(model.config, name, None))), 0)
    return sum(one.numel() for key, one in own.items() if key not in tables), layers


def model_without_weights(place: str | Path, *, trust_remote_code: bool = False) -> tuple[Any, int]:
    """Make a checkpoint's model on the meta device from its config alone.

    Returns:
        the model, and the bytes of one of its weights on disk.

    Raises:
        UsageError, CheckpointError: there is no config.json.
    """
    source = Checkpoint.open(place, weights=False)
    with torch.device("meta"):
        model = blank_language_model(source.folder, trust_remote_code=trust_remote_code)
    return model, source.config_dtype.itemsize
