"""What tests of whole runs look at."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file


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
