"""One target type as data, and the writer that writes the neutral form as any of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .decoder import (
    LinearWeights,
    NeutralDecoder,
    NeutralLayer,
    NeutralSettings,
    NormWeights,
    TensorNames,
    without_norms,
)
from .lazy import LazyTensor, at_least_float32, combined


@dataclass(frozen=True)
class TargetType:
    """A type that a decoder can be written as.

    Attributes:
        names: its tensors. A fused ``qkv`` holds q, k and v of one head after the other.
        any_groups: False if the type has either one KV head or as many as query heads.
        config: (settings, head tied to the embedding) → the part of config.json that describes the architecture.
        folds_norms: fold the norms of the layers away where attention and MLP have different ones. The layers then
            read other hidden states than those of the source.
        norms_minus: norm weights are stored less this number.
        head_has_bias: the output head has a bias, and is never tied.
        optional_biases: config.json can switch biases off. Every other type gets zeros where the source has none.
    """

    model_type: str
    class_name: str
    names: TensorNames
    any_groups: bool
    config: Callable[[NeutralSettings, bool], dict[str, Any]]
    folds_norms: bool = True
    norms_minus: float = 0.0
    head_has_bias: bool = False
    optional_biases: bool = False

    def tensors(self, decoder: NeutralDecoder) -> Iterator[tuple[str, LazyTensor]]:
        """Name and compute every tensor of the type."""
        names, hidden = self.names, decoder.layers[0].q.weight
        has_bias = self._has_bias(decoder.settings)
        yield f"{names.embedding}.weight", decoder.embedding
        if names.positions is not None and decoder.positions is not None:
            yield f"{names.positions}.weight", decoder.positions
        for name, projection in ((names.project_in, decoder.project_in), (names.project_out, decoder.project_out)):
            if name is not None and projection is not None:
                yield f"{name}.weight", projection.weight
        for index, source in enumerate(decoder.layers):
            # a norm that attention and MLP share can stay as it is, since the target shares its norm, too
            layer = without_norms(source) if self.folds_norms and source.mlp_norm is not None else source
            for name, tensor in self._layer(layer, decoder.settings):
                yield f"{names.layer.format(index)}.{name}", tensor
        for name, norm in ((names.embedding_norm, decoder.embedding_norm), (names.final_norm, decoder.final_norm)):
            if name is not None and norm is not None:
                yield from self._norm(name, norm, hidden, biased=has_bias["norm"])
        head = decoder.head
        if self.head_has_bias:
            yield from _linear(names.head, LinearWeights(decoder.embedding, None) if head is None else head)
        elif head is not None:
            yield f"{names.head}.weight", head.weight

    def _layer(self, layer: NeutralLayer, settings: NeutralSettings) -> Iterator[tuple[str, LazyTensor]]:
        names, has_bias = self.names, self._has_bias(settings)
        yield from self._norm(names.attention_norm, layer.attention_norm, layer.q.weight, biased=has_bias["norm"])
        if "{}" in names.qkv:
            for letter, linear in (("q", layer.q), ("k", layer.k), ("v", layer.v)):
                yield from _linear(names.qkv.format(letter), linear, biased=has_bias["qkv"])
        else:
            yield from _linear(names.qkv, _fused_head_by_head(layer, settings.heads))
        yield from _linear(names.o, layer.o, biased=has_bias["output"])
        if names.mlp_norm is not None:
            assert layer.mlp_norm is not None
            yield from self._norm(names.mlp_norm, layer.mlp_norm, layer.q.weight, biased=has_bias["norm"])
        yield from _linear(names.up, layer.up, biased=has_bias["mlp"])
        yield from _linear(names.down, layer.down, biased=has_bias["mlp"])

    def _has_bias(self, settings: NeutralSettings) -> dict[str, bool]:
        kinds = ("qkv", "output", "mlp", "norm")
        return {kind: not self.optional_biases or settings.biases.get(kind, True) for kind in kinds}

    def _norm(
        self, name: str, norm: NormWeights, near: LazyTensor, *, biased: bool
    ) -> Iterator[tuple[str, LazyTensor]]:
        """A norm whose missing parts are filled in; ``near`` has as many columns as the norm has channels."""
        shape = (near.shape[1],)
        weight = norm.weight or near.filled(shape, 1.0)
        if self.norms_minus:
            weight = weight.then(lambda values: at_least_float32(values) - self.norms_minus)
        yield f"{name}.weight", weight
        if biased:
            yield f"{name}.bias", norm.bias or near.filled(shape, 0.0)


def _linear(name: str, linear: LinearWeights, *, biased: bool = True) -> Iterator[tuple[str, LazyTensor]]:
    yield f"{name}.weight", linear.weight
    if biased:
        yield f"{name}.bias", linear.bias_or_zero()


def _fused_head_by_head(layer: NeutralLayer, heads: int) -> LinearWeights:
    def interleaved(*sides: Tensor) -> Tensor:
        # q may have been widened alone (divided by the layer's number), and torch stacks one dtype only
        same = [at_least_float32(side) for side in sides] if len({side.dtype for side in sides}) > 1 else list(sides)
        return torch.stack([side.reshape(heads, -1, *side.shape[1:]) for side in same], 1).flatten(0, 2)

    parts = (layer.q, layer.k, layer.v)
    biases = [part.bias_or_zero() for part in parts]
    return LinearWeights(combined(interleaved, *(part.weight for part in parts)), combined(interleaved, *biases))
