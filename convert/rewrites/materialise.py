"""Write a rewritten checkpoint with all its KV heads, so that calibration and refinement can run it as the source."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ...checkpoint.folder.weights import safetensors_name
from ...checkpoint.load import load_tokenizer
from ...checkpoint.modelling import write_code
from ...checkpoint.publish import remove_siblings
from ...checkpoint.source import CONFIG_NAME, Checkpoint
from ...checkpoint.write import OutFile, OutTensor, ShardWriter, copy_side_files, require_space
from ...console import info, progress, warn
from ...errors import CheckpointError
from ..family.verify import verify
from ..serving import ignored_by
from .retyped import RetypedCheckpoint, RewrittenCheckpoint

_REWRITTEN = ".rewritten-"
_TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model")
_SAMPLE = "Hello world,  it's 2024!\n\tdef f(x):\n        return [x_1, 'e\u0301', \"漢字\"] 🙂 <|endoftext|>"
"""Text on which tokenizers of one vocabulary differ: runs of spaces, code, letters in two parts, special tokens."""


def materialise(checkpoint: RewrittenCheckpoint, folder: Path) -> Path:
    """Fill the empty ``folder`` with ``checkpoint``, one tensor in memory at a time.

    Returns:
        ``folder``.

    Raises:
        CheckpointError: the target class does not accept the result.
    """
    files = [
        OutFile(
            safetensors_name(file.relative_to(checkpoint.folder)),
            tuple(OutTensor(info.name, info.dtype, info.shape, None) for info in header.tensors),
            header.metadata,
        )
        for file, header in checkpoint.headers.items()
    ]
    with ShardWriter(folder, files) as writer:
        writer.create()
        if checkpoint.sharded:
            writer.write_index()
        copy_side_files(checkpoint, folder)
        (folder / CONFIG_NAME).write_bytes(checkpoint.config_text.encode("utf-8"))
        write_code(checkpoint.config, folder)
        verify(folder)
        with progress(f"rewriting as {checkpoint.model_type}", len(checkpoint.lazies)) as advance, torch.no_grad():
            for name in checkpoint.lazies:
                writer.put(name, checkpoint.read(name))
                advance()
    return folder


@contextmanager
def loadable(checkpoint: Checkpoint, out: Path) -> Iterator[Checkpoint]:
    """Make a checkpoint that :func:`model_folder` can give a folder of. A rewritten one gets room beside ``out``.

    The room is removed at the end, and so is any that a killed run for the same ``out`` left.
    """
    if not isinstance(checkpoint, RewrittenCheckpoint):
        yield checkpoint
        return
    near = out.absolute().parent
    near.mkdir(parents=True, exist_ok=True)
    remove_siblings(out, _REWRITTEN)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}{_REWRITTEN}", dir=near) as scratch:
        yield replace(checkpoint, scratch=Path(scratch))


def model_folder(checkpoint: Checkpoint) -> Path:
    """Return the folder that transformers loads the checkpoint from. A rewritten one is written at first need.

    Raises:
        HeadfoldError: there is no room for it.
    """
    if not isinstance(checkpoint, RewrittenCheckpoint):
        return checkpoint.folder
    assert checkpoint.scratch is not None, "call loadable() first"
    folder = checkpoint.scratch / "model"
    if not folder.exists():
        require_space(checkpoint.scratch, checkpoint.weight_bytes)
        unfinished = checkpoint.scratch / "unfinished"
        unfinished.mkdir()
        materialise(checkpoint, unfinished).rename(folder)
    return folder


def say_route(checkpoint: RetypedCheckpoint) -> None:
    """Say which type the result will be and where it runs, before anything is written."""
    info(
        f"The class of {checkpoint.source_type} has no setting for KV heads, so it is rewritten as "
        f"{checkpoint.model_type} ({checkpoint.class_name}), which computes the same."
    )
    info(checkpoint.runs)
    if checkpoint.fails and ignored_by(checkpoint.model_type) is None:  # otherwise the notes of the family say it
        warn(checkpoint.fails)


def settle_tokenizer(source: Path, folder: Path) -> None:
    """Make sure that the result has the source's tokenizer, although the model type helps to choose it.

    Some types load ``tokenizer.json`` alone; where the source has only its older files, it is added.

    Raises:
        CheckpointError: the tokens would differ.
    """
    if not any((source / name).exists() for name in _TOKENIZER_FILES):
        return
    try:
        expected = load_tokenizer(source)
    except CheckpointError as problem:
        warn(f"Whether the result has the source's tokenizer was not checked: {problem.message}")
        return
    if not (folder / _TOKENIZER_FILES[0]).exists() and hasattr(expected, "backend_tokenizer"):
        expected.backend_tokenizer.save(str(folder / _TOKENIZER_FILES[0]))
    if not _same_tokens(expected, folder):
        raise CheckpointError(
            "As another model type, the tokenizer gives other tokens than the source's.",
            "Save the tokenizer once with save_pretrained, which writes tokenizer.json, and convert again.",
        )


def _same_tokens(expected: Any, folder: Path) -> bool:
    try:
        found = load_tokenizer(folder)
    except CheckpointError:
        return False
    same_ids = found(_SAMPLE)["input_ids"] == expected(_SAMPLE)["input_ids"]
    return bool(same_ids and found.get_vocab() == expected.get_vocab())
