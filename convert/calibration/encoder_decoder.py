"""Collect the statistics of an encoder-decoder, on text with spans cut out.

The encoder reads the text without the spans, and the decoder writes the spans, as T5 was pretrained. In
cross-attention queries are made of the decoder's states, keys and values of the encoder's. So the file holds the second
moments of both.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ... import console
from ...errors import UnsupportedError
from ...spans import SpanCorruption
from ..family.attention_layer import AttentionLayer
from .collect import summing_inputs
from .statistics import TOKENS, Statistics, writing_statistics


def cut_spans(text_BT: Tensor, tokenizer: Any, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Cut spans out of sequences: what the encoder reads (B, S), and what the decoder writes (B, T).

    There is no padding, because the same number of tokens is cut out of each sequence.

    Raises:
        UnsupportedError: the tokenizer has no sentinels, so the model was not trained to fill in spans.
        UsageError: a sequence is too short for a span, or needs more sentinels than there are.
    """
    try:
        corrupt = SpanCorruption.of(tokenizer)
    except UnsupportedError as problem:
        raise UnsupportedError(
            "Calibration lets an encoder-decoder fill in spans of text, for which this tokenizer has no sentinels "
            "(<extra_id_0>, …).",
            "Leave --calibration out: mean, first, random, aligned and folded work without.",
        ) from problem
    corrupt.require(text_BT.shape[1])
    draw = random.Random(seed)
    pairs = [corrupt(ids, draw) for ids in text_BT.tolist()]
    return torch.tensor([pair.source for pair in pairs]), torch.tensor([pair.target for pair in pairs])


def collect_encoder_decoder_statistics(
    model: Any,
    read_BS: Tensor,
    written_BT: Tensor,
    file: Path,
    layers: Sequence[AttentionLayer],
    *,
    metadata: dict[str, str],
    batch_tokens: int = 4096,
    device: torch.device | str = "cpu",
) -> Statistics:
    """Run the source once over text with spans cut out; see :func:`.collect.collect_statistics`.

    Args:
        read_BS, written_BT: token ids from :func:`cut_spans`.
        layers: the attention layers whose inputs are measured.

    Raises:
        UnsupportedError: the class runs its attention in an unusual way, so tokens would be missed.
    """
    crossing = [layer.layer for layer in layers if layer.side == "cross"]
    # Hooks on k see the input of keys and values; in cross-attention queries have another, seen by hooks on q.
    keys = [f"{layer.module}.k{layer.reads.removeprefix('q')}" for layer in layers]
    queries = [f"{layer.module}.{layer.reads}" for layer in layers if layer.layer in crossing]
    read, written = read_BS.numel(), written_BT.numel()
    expected = [written if layer.side == "self" else read for layer in layers] + [written] * len(queries)
    hidden = [model.get_submodule(name).weight.shape[1] for name in keys]
    batch = max(batch_tokens // (read_BS.shape[1] + written_BT.shape[1]), 1)
    details = {**metadata, TOKENS: str(read + written)}
    with writing_statistics(file, hidden, details, crossing=crossing) as sums:
        with (
            summing_inputs(model, [*keys, *queries], sums),
            console.progress("calibration", len(read_BS)) as advance,
        ):
            for ids_BS, labels_BT in zip(read_BS.split(batch), written_BT.split(batch), strict=True):
                shifted_BT = model.prepare_decoder_input_ids_from_labels(labels_BT.to(device))
                model(input_ids=ids_BS.to(device), decoder_input_ids=shifted_BT, use_cache=False)
                advance(len(ids_BS))
        # A class that skips or repeats a projection would give moments of other text than the text that was read.
        if sums.counts != expected:
            raise UnsupportedError(
                f"{type(model).__name__} does not send every token through its attention exactly once.",
                "Use --method mean, which needs no calibration.",
            )
    return Statistics.open(file)
