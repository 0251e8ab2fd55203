"""What tests of whole runs look at."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import torch
from safetensors.torch import load_file


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
