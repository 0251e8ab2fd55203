"""Helpers of tests of whole runs."""

from __future__ import annotations

import json
import random
from contextlib import nullcontext
from pathlib import Path

import torch
from headfold.checkpoint.backbone import decoder_inputs
from headfold.pairs import Pair, padded
from headfold.uptrain.data.batches import PairBatch
from safetensors.torch import load_file
from tiny import randomise, tiny_config
from transformers import AutoModelForSeq2SeqLM


class OneProcess:
    """As much of accelerate as one process needs."""

    num_processes, device, is_fsdp2 = 1, torch.device("cpu"), False

    def backward(self, loss):
        loss.backward()

    def reduce(self, tensor, how):
        return tensor

    def no_sync(self, model):
        return nullcontext()

    def clip_grad_norm_(self, parameters, norm):
        return torch.nn.utils.clip_grad_norm_(parameters, norm)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def metrics(folder: Path, kind: str) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "headfold_metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def called(command, *arguments: str) -> None:
    """A command as the command line calls it."""
    import typer

    app = typer.Typer()
    app.command()(command)
    app(list(arguments), standalone_mode=False)


def tiny_pair_model(model_type: str, seed: int = 0):
    over = {"decoder_start_token_id": 0, "pad_token_id": 1, "dropout_rate": 0.0, "dropout": 0.0}
    config = tiny_config(model_type, **over, **({"decoder_vocab_size": 300} if model_type == "marian" else {}))
    model = AutoModelForSeq2SeqLM.from_config(config).eval()
    randomise(model, seed)
    return model


def some_pairs() -> list[Pair]:
    """Unequal lengths on both sides."""
    draw = random.Random(0)
    return [
        Pair(*([draw.randrange(5, 290) for _ in range(length)] for length in lengths))
        for lengths in ((9, 4), (5, 7), (12, 3), (6, 6))
    ]


def batch_of(model, pairs) -> PairBatch:
    ids_BS, mask_BS, labels_BT = padded(pairs, 1)
    targets = sum(len(pair.target) for pair in pairs)
    return PairBatch(ids_BS, mask_BS, decoder_inputs(model, labels_BT), labels_BT, targets)
