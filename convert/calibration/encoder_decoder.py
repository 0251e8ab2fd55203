"""Statistics of an encoder-decoder: text with spans cut out, of which the encoder reads one part and the decoder writes
the other.

In cross-attention queries are made of the decoder's states, keys and values of the encoder's; the file holds the second
moments of both. Letters of shapes: N pairs, S tokens of a source, T tokens of a target.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ... import console
from ...errors import UnsupportedError
from ...spans import SpanCorruption
from ..family.attention_layer import AttentionLayer
from ..rewrites.encoder_decoder import side
from .statistics import TOKENS, MomentSums, Statistics, writing_statistics


def corrupted(blocks_NB: Tensor, tokenizer: Any, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Sources (N, S) and targets (N, T) of blocks of B tokens; no place is padding, since as much is cut out of each.

    Raises:
        UnsupportedError: the tokenizer has no sentinels, so the model was not trained to fill in spans.
        UsageError: a block is too short for a span, or needs more sentinels than there are.
    """
    try:
        corrupt = SpanCorruption.of(tokenizer)
    except UnsupportedError as problem:
        raise UnsupportedError(
            "Calibration lets an encoder-decoder fill in spans of text, for which this tokenizer has no sentinels "
            "(<extra_id_0>, …).",
            "Leave --calibration out: mean, first, random, aligned and folded work without.",
        ) from problem
    tokens = blocks_NB.shape[1]
    corrupt.require(tokens)
    draw = random.Random(seed)
    pairs = [corrupt(block, draw) for block in blocks_NB.tolist()]
    return torch.tensor([pair.source for pair in pairs]), torch.tensor([pair.target for pair in pairs])


def collect_pair_statistics(
    model: Any,
    sources_NS: Tensor,
    targets_NT: Tensor,
    file: Path,
    blocks: Sequence[AttentionLayer],
    *,
    metadata: dict[str, str],
    batch_tokens: int = 4096,
    device: torch.device | str = "cpu",
) -> Statistics:
    """One pass of the source over pairs; see :func:`headfold.convert.calibration.collect.collect_statistics`.

    Args:
        blocks: the attention blocks whose inputs are looked at.

    Raises:
        UnsupportedError: the class runs its attention in an unusual way, so tokens would be missed.
    """
    crossing = [block.layer for block in blocks if side(block.module) == "cross"]
    keys = [f"{block.module}.k{block.reads.removeprefix('q')}" for block in blocks]
    queries = [f"{block.module}.{block.reads}" for block in blocks if block.layer in crossing]
    read, written = sources_NS.numel(), targets_NT.numel()
    expected = [written if side(block.module) == "self" else read for block in blocks] + [written] * len(queries)
    hidden = [model.get_submodule(name).weight.shape[1] for name in keys]
    pairs_at_once = max(batch_tokens // (sources_NS.shape[1] + targets_NT.shape[1]), 1)
    details = {**metadata, TOKENS: str(read + written)}
    with (
        writing_statistics(file, hidden, details, crossing=crossing) as sums,
        ExitStack() as stack,
        torch.inference_mode(),
    ):
        stack.callback(model.train, model.training)
        model.eval()
        for place, name in enumerate((*keys, *queries)):
            projection = model.get_submodule(name)
            stack.callback(projection.register_forward_pre_hook(_adding(sums, place)).remove)
        advance = stack.enter_context(console.progress("calibration", len(sources_NS)))
        for ids, labels in zip(sources_NS.split(pairs_at_once), targets_NT.split(pairs_at_once), strict=True):
            shifted = model.prepare_decoder_input_ids_from_labels(labels.to(device))
            model(input_ids=ids.to(device), decoder_input_ids=shifted, use_cache=False)
            advance(len(ids))
        if sums.counts != expected:
            raise UnsupportedError(
                f"{type(model).__name__} does not send every token through its attention exactly once.",
                "Use --method mean, which needs no calibration.",
            )
    return Statistics.open(file)


def _adding(sums: MomentSums, place: int) -> Callable[[torch.nn.Module, tuple[Tensor, ...]], None]:
    def hook(module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        sums.add(place, inputs[0].flatten(0, -2))

    return hook
