"""Measure what fewer KV heads save: bytes of KV cache per token, and decoding time."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...checkpoint.backbone import decoder_inputs, is_encoder_decoder
from ...console import progress
from ...errors import UnsupportedError
from ..results import DecodeSettings
from ..scoring.perplexity import evaluation_mode
from .capacity import CacheSize, peak_bytes

_SHORT, _LONG = 4, 12
"""Two lengths below any sliding window. Their difference leaves out state of fixed size."""


@dataclass(frozen=True)
class DecodeTimes:
    """Timings of one model at one context and batch. Lists of seconds have one entry per repeat.

    Attributes:
        peak_bytes: the model's weights, and the most that prompt and decoding hold beside them.
    """

    context: int
    batch: int
    new_tokens: int
    peak_bytes: int = 0
    first_token_seconds: list[float] = field(default_factory=list)
    decode_seconds: list[float] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> list[float]:
        """Divide the new tokens of all sequences by the seconds, without the first token (prefill)."""
        return [self.batch * self.new_tokens / seconds for seconds in self.decode_seconds]


def measure_cache(model: Any) -> CacheSize:
    """Measure the KV cache from its tensors at two lengths. For an encoder-decoder, count tokens that it writes.

    Raises:
        UnsupportedError: the model has no cache of keys and values.
    """
    with evaluation_mode(model):
        caches = []
        for length in (_SHORT, _LONG):
            inputs, ids_BT = _prompt(model, _some_ids(model, _SHORT if is_encoder_decoder(model) else length))
            written_BT = _some_ids(model, length) if is_encoder_decoder(model) else ids_BT
            caches.append(_forward(model, written_BT, None, inputs)[1])
    return _growth(*(_cache_layers(getattr(cache, "self_attention_cache", cache)) for cache in caches))


def measure_cross_cache(model: Any) -> CacheSize | None:
    """Measure the cache of an encoder-decoder by tokens that it reads (None for other models)."""
    if not is_encoder_decoder(model):
        return None
    with evaluation_mode(model):
        caches = []
        for length in (_SHORT, _LONG):
            inputs, start_B1 = _prompt(model, _some_ids(model, length))
            caches.append(_forward(model, start_B1, None, inputs)[1])
    return _growth(*(_cache_layers(getattr(cache, "cross_attention_cache", None)) for cache in caches))


def _growth(short: Sequence[Any], long: Sequence[Any]) -> CacheSize:
    """Compute sizes by layer from caches of two lengths."""
    grown = [
        (_layer_bytes(after) - _layer_bytes(before)) / (_LONG - _SHORT)
        for before, after in zip(short, long, strict=True)
    ]
    return CacheSize(grown, [layer.keys.shape[1] for layer in long], [_window(layer) for layer in long])


def cache_formula(config: Any, element_bytes: int) -> float | None:
    """Compute KV-cache bytes per token from the config: 2 · layers · KV heads · head dim · bytes of an element.

    Layers and heads of an encoder-decoder are its decoder's. None where the config does not describe one plain cache
    for all layers.
    """
    text = config.get_text_config()
    try:
        heads = getattr(text, "decoder_attention_heads", None) or text.num_attention_heads
        layers = (
            getattr(text, "num_decoder_layers", None) or getattr(text, "decoder_layers", None) or text.num_hidden_layers
        )
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        return float(2 * layers * kv_heads * head_dim * element_bytes)
    # the config of remote code may lack any of these
    except (AttributeError, TypeError, ValueError):
        return None


def _window(layer: Any) -> int | None:
    found = getattr(layer, "sliding_window", None)
    return found if isinstance(found, int) and found > 0 else None


def _layer_bytes(layer: Any) -> int:
    return int(layer.keys.nbytes + layer.values.nbytes)


def _cache_layers(cache: Any) -> list[Any]:
    """List the layers of the cache with keys and values, each of shape (B, K, T, D)."""
    # layers of a state-space model have no keys, and do not grow with the context
    found = [layer for layer in getattr(cache, "layers", []) if getattr(layer, "keys", None) is not None]
    if not found:
        raise UnsupportedError(
            "The model has no KV cache that could be measured.", "Only models with one can be compared."
        )
    return found


def _some_ids(model: Any, length: int, batch: int = 1) -> Tensor:
    # the same ids for every model; their content has no effect on the time
    generator = torch.Generator().manual_seed(0)
    vocab = model.get_input_embeddings().weight.shape[0]
    return torch.randint(vocab, (batch, length), generator=generator).to(model.device)


def _prompt(model: Any, ids_BT: Tensor) -> tuple[dict[str, Any], Tensor]:
    """Prepare a prompt: the inputs of every later step, and the ids that the first step reads.

    An encoder-decoder reads the prompt with its encoder once, and its decoder begins with its start token.
    """
    if not is_encoder_decoder(model):
        return {}, ids_BT
    start_B1 = decoder_inputs(model, ids_BT[:, :1])
    return {"encoder_outputs": model.get_encoder()(input_ids=ids_BT)}, start_B1


def _forward(model: Any, ids_BT: Tensor, cache: Any, inputs: dict[str, Any]) -> tuple[Tensor, Any]:
    """Run one step and return the logits of the last position (B, V) and the cache.

    Args:
        inputs: from :func:`_prompt`.
    """
    # transformers 5.24 renamed past_key_values to cache, and remote code may still have the old name
    parameters = inspect.signature(model.forward).parameters
    name = "cache" if "cache" in parameters else "past_key_values"
    # logits of a whole prompt would need far more memory than generation does
    last_only = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
    ids = "decoder_input_ids" if "encoder_outputs" in inputs else "input_ids"
    outputs = model(**{ids: ids_BT, name: cache}, **inputs, use_cache=True, **last_only)
    return outputs.logits[:, -1], getattr(outputs, name)


def measure_decoding(models: Sequence[Any], settings: DecodeSettings) -> list[list[DecodeTimes]]:
    """Time greedy decoding with a KV cache at every context and batch, and return one list per model.

    Each model first runs once untimed, which warms it up and measures its memory. Then the models take turns, in
    reverse order in every second repeat.
    """
    results: list[list[DecodeTimes]] = [[] for _ in models]
    points = settings.points()
    with progress("timing", total=len(points) * len(models) * (settings.repeats + 1)) as advance:
        for context, batch in points:
            for model, result in zip(models, results, strict=True):
                peak = peak_bytes(model.device, partial(_decode_once, model, context, batch, settings.new_tokens))
                result.append(DecodeTimes(context, batch, settings.new_tokens, _weight_bytes(model) + peak))
                advance()
            pairs = list(zip(models, results, strict=True))
            for repeat in range(settings.repeats):
                # who goes first alternates, so that a drift of the machine favours no model
                for model, result in pairs if repeat % 2 == 0 else reversed(pairs):
                    first, decode = _decode_once(model, context, batch, settings.new_tokens)
                    result[-1].first_token_seconds.append(first)
                    result[-1].decode_seconds.append(decode)
                    advance()
    return results


def _weight_bytes(model: Any) -> int:
    """Count parameters and buffers in memory. Tied ones count once."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def _decode_once(model: Any, context: int, batch: int, new_tokens: int) -> tuple[float, float]:
    """Decode once and return the seconds to the first token, and the seconds of the ``new_tokens`` after it."""
    prompt_BT = _some_ids(model, context, batch)
    clock = _clock(model.device)
    with evaluation_mode(model):
        began = next(clock)
        inputs, ids_BT = _prompt(model, prompt_BT)
        logits_BV, cache = _forward(model, ids_BT, None, inputs)
        # greedy, since sampling would take time of its own
        ids_B1 = logits_BV.argmax(-1, keepdim=True)
        first = next(clock)
        for _ in range(new_tokens):
            logits_BV, cache = _forward(model, ids_B1, cache, inputs)
            ids_B1 = logits_BV.argmax(-1, keepdim=True)
        return first - began, next(clock) - first


def _clock(device: torch.device) -> Iterator[float]:
    """Read the time, again and again."""
    while True:
        # kernels run on after their call returns; the device must have finished before the time counts
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        yield time.perf_counter()
