"""Calibration text as token blocks, and the one statistic of it that methods need: E[x xᵀ] of each attention's input.

One forward pass over the source gives a (C+1)×(C+1) matrix per layer, whatever the method and the number of groups.
Letters of shapes: N blocks, B blocks at once, T tokens of a block, C hidden size, E = C + 1 with the constant 1 last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from ... import console
from ...checkpoint.load import is_seq2seq, load_config, load_language_model
from ...corpus import Corpus, Encoder
from ...errors import DataError, UnsupportedError
from ..family.attention_layer import AttentionLayer
from .statistics import TOKENS, MomentSums, Statistics, writing_statistics

_IN_MEMORY_SHARE = 0.5
"""Weights stay on disk where they would take more than this share of the memory that is free."""


def token_blocks(corpus: Corpus, tokenizer: Any, *, tokens: int, sequence_length: int) -> Tensor:
    """The first ``tokens`` tokens of a corpus, packed: documents follow each other with the tokenizer's separator.

    Returns:
        (N, T) token ids with T = ``block``; what does not fill a block is dropped.

    Raises:
        DataError: the corpus gives fewer tokens than one block.
    """
    wanted = max(tokens // sequence_length, 1) * sequence_length
    encode, ids = Encoder(tokenizer), list[int]()
    for document in corpus:
        if len(ids) >= wanted:
            break
        ids.extend(encode(document.text))
    whole = min(len(ids), wanted) // sequence_length
    if whole == 0:
        raise DataError(
            f"The calibration text {corpus.spec} gives {len(ids)} tokens, fewer than one block of {sequence_length}.",
            "Give more text with --calibration.",
        )
    if whole * sequence_length < wanted:
        console.warn(f"The calibration text {corpus.spec} gives only {whole * sequence_length:,} of {wanted:,} tokens.")
    return torch.tensor(ids[: whole * sequence_length]).view(whole, sequence_length)


def reading_modules(blocks: Sequence[AttentionLayer]) -> list[str]:
    """Names of the modules whose input is the attention's input, block by block."""
    return [f"{block.module}.{block.reads}" for block in blocks]


def input_projections(model: nn.Module) -> list[str]:
    """Names of the q projections that have a k and a v projection beside them, in the order of the layers.

    Raises:
        UnsupportedError: the model has none.
    """
    sides = ("q_proj", "k_proj", "v_proj")
    found = [name for name, module in model.named_modules() if all(hasattr(module, side) for side in sides)]
    if not found:
        raise UnsupportedError(
            f"{type(model).__name__} has no attention with separate q, k and v projections.",
            "Use --method mean, which needs no calibration.",
        )
    return [f"{name}.q_proj" for name in found]


def collect_statistics(
    model: Any,
    blocks_NT: Tensor,
    file: Path,
    *,
    metadata: dict[str, str],
    readers: Sequence[str] | None = None,
    batch_tokens: int = 4096,
    device: torch.device | str = "cpu",
) -> Statistics:
    """One pass of the source over calibration text; activations are not kept.

    Args:
        model: a causal language model; only its decoder runs, so no logits are made.
        blocks_NT: token ids, all of them real (no padding).
        file: where the statistics are saved; it appears when they are complete.
        metadata: kept with them: ``SOURCE`` and what describes the text.
        readers: the modules whose input is the attention's, in layer order; default: :func:`input_projections`.
        batch_tokens: about how many tokens go through the model at once; weights on disk are read once per batch.
        device: where the token ids go; the model is there already.

    Raises:
        UnsupportedError: the class runs its attention in an unusual way, so tokens would be missed.
    """
    names = list(readers) if readers is not None else input_projections(model)
    projections = [model.get_submodule(name) for name in names]
    hidden = [next(weight.shape[1] for weight in part.parameters() if weight.dim() == 2) for part in projections]
    batches = blocks_NT.split(max(batch_tokens // blocks_NT.shape[1], 1))
    details = {**metadata, TOKENS: str(blocks_NT.numel())}
    with writing_statistics(file, hidden, details) as sums, ExitStack() as stack, torch.inference_mode():
        stack.callback(model.train, model.training)
        model.eval()
        for layer, projection in enumerate(projections):
            stack.callback(projection.register_forward_pre_hook(_adding(sums, layer)).remove)
        advance = stack.enter_context(console.progress("calibration", len(blocks_NT)))
        for ids_BT in batches:
            model.base_model(input_ids=ids_BT.to(device), use_cache=False)
            advance(len(ids_BT))
        for name, count in zip(names, sums.counts, strict=True):
            if count != blocks_NT.numel():
                raise UnsupportedError(
                    f"{type(model).__name__} does not send every token through {name} exactly once.",
                    "Use --method mean, which needs no calibration.",
                )
    return Statistics.open(file)


def _adding(sums: MomentSums, layer: int) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        sums.add(layer, inputs[0].flatten(0, -2))

    return hook


def load_for_calibration(
    folder: Path,
    weight_bytes: int,
    scratch: Path,
    *,
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
) -> Any:
    """The source, for forward passes on ``device``: in memory where it fits, else with its weights left on disk.

    On disk, accelerate maps a module's weights from the safetensors files just before it runs and drops them after,
    so memory holds one module's weights and the activations of a batch. With a GPU it keeps there what fits.

    Args:
        weight_bytes: size of all weights.
        scratch: an empty folder; weights that the class stores in another form than the files go there.
    """
    if weight_bytes < psutil.virtual_memory().available * _IN_MEMORY_SHARE:
        return load_language_model(folder, trust_remote_code=trust_remote_code).to(device)
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    places = {"": "disk"} if torch.device(device).type == "cpu" else "auto"
    pair = is_seq2seq(load_config(folder, trust_remote_code=trust_remote_code))
    return (AutoModelForSeq2SeqLM if pair else AutoModelForCausalLM).from_pretrained(
        folder, dtype="auto", device_map=places, offload_folder=scratch, trust_remote_code=trust_remote_code
    )
