"""What grouped heads win: bytes of KV cache per token, read off the cache, and decoding speed, measured."""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedError
from .perplexity import evaluating

_SHORT, _LONG = 4, 12  # two lengths below any sliding window; their difference leaves out state of fixed size


@dataclass(frozen=True)
class DecodeSettings:
    """How decoding is timed.

    Attributes:
        batches: sequences decoded side by side, one measurement each; empty measures nothing.
        context: prompt tokens.
        new_tokens: tokens decoded after the first.
        repeats: runs per model; models take turns, so that a slow moment of the machine hits all of them.
    """

    batches: tuple[int, ...] = (1, 8)
    context: int = 256
    new_tokens: int = 64
    repeats: int = 3


@dataclass(frozen=True)
class DecodeTimes:
    """Seconds of one model at one batch size, one entry per repeat."""

    batch: int
    context: int
    new_tokens: int
    first_token_seconds: list[float] = field(default_factory=list)
    decode_seconds: list[float] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> list[float]:
        """New tokens of all sequences together per second, the first token (prefill) left out."""
        return [self.batch * self.new_tokens / seconds for seconds in self.decode_seconds]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest of repeats."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


@dataclass(frozen=True)
class CacheSize:
    """The KV cache as the model fills it.

    Attributes:
        bytes_per_token: growth of the cache per token of one sequence, all layers.
        kv_heads: heads in the cache by layer.
    """

    bytes_per_token: float
    kv_heads: list[int]


def measure_cache(model: Any) -> CacheSize:
    """Fill the cache twice and read sizes off its tensors.

    Raises:
        UnsupportedError: the model keeps no cache of keys and values.
    """
    with evaluating(model):
        short, long = (_cache_tensors(_forward(model, _some_ids(model, length), None)[1]) for length in (_SHORT, _LONG))
    grown = sum(_bytes(tensor) for pair in long for tensor in pair) - sum(
        _bytes(tensor) for pair in short for tensor in pair
    )
    return CacheSize(grown / (_LONG - _SHORT), [keys.shape[1] for keys, _ in long])


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _cache_tensors(cache: Any) -> list[tuple[Tensor, Tensor]]:
    """Keys and values (batch, heads, tokens, D) of each layer that has them."""
    layers = getattr(cache, "layers", [])
    found = [(layer.keys, layer.values) for layer in layers if getattr(layer, "keys", None) is not None]
    if not found:
        raise UnsupportedError(
            "The model keeps no KV cache that could be measured.", "Only models with one can be compared."
        )
    return found


def _some_ids(model: Any, length: int, batch: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    vocab = model.get_input_embeddings().weight.shape[0]
    return torch.randint(vocab, (batch, length), generator=generator).to(model.device)


def _forward(model: Any, ids_BT: Tensor, cache: Any) -> tuple[Tensor, Any]:
    """Logits of the last position (B, V) and the cache; transformers 5.24 renamed past_key_values to cache."""
    parameters = inspect.signature(model.forward).parameters
    name = "cache" if "cache" in parameters else "past_key_values"
    last_only = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
    outputs = model(input_ids=ids_BT, use_cache=True, **{name: cache}, **last_only)
    return outputs.logits[:, -1], getattr(outputs, name)


def measure_decoding(models: Sequence[Any], settings: DecodeSettings) -> list[list[DecodeTimes]]:
    """Time greedy decoding with a KV cache; for each model a list by batch size.

    The models take turns within each repeat, after one run each that is not timed.
    """
    results: list[list[DecodeTimes]] = [[] for _ in models]
    for batch in settings.batches:
        times = [DecodeTimes(batch, settings.context, settings.new_tokens) for _ in models]
        for repeat in range(settings.repeats + 1):
            for model, record in zip(models, times, strict=True):
                first, decode = _decode_once(model, batch, settings)
                if repeat > 0:
                    record.first_token_seconds.append(first)
                    record.decode_seconds.append(decode)
        for result, record in zip(results, times, strict=True):
            result.append(record)
    return results


def _decode_once(model: Any, batch: int, settings: DecodeSettings) -> tuple[float, float]:
    """Seconds to the first token, and seconds of the ``new_tokens`` after it."""
    prompt_BT = _some_ids(model, settings.context, batch)
    clock = _clock(model.device)
    with evaluating(model):
        began = next(clock)
        logits_BV, cache = _forward(model, prompt_BT, None)
        ids_B1 = logits_BV.argmax(-1, keepdim=True)
        first = next(clock)
        for _ in range(settings.new_tokens):
            logits_BV, cache = _forward(model, ids_B1, cache)
            ids_B1 = logits_BV.argmax(-1, keepdim=True)
        return first - began, next(clock) - first


def _clock(device: torch.device) -> Iterator[float]:
    """Seconds, taken after the device has finished what it was given."""
    while True:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        yield time.perf_counter()
