"""The models of a comparison: what they are, and whether they can be compared at all."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.load import is_seq2seq, load_config, load_language_model, load_tokenizer
from ..checkpoint.record import METRICS_NAME, last_entry
from ..checkpoint.source import Checkpoint
from ..console import warn
from ..errors import CheckpointError, DataError, UsageError
from .scoring.windows import TokenText

SOURCE, CONVERTED, UPTRAINED, OTHER = "source", "converted", "uptrained", "other"


@dataclass(frozen=True)
class Subject:
    """One checkpoint of the comparison.

    Attributes:
        name: short and unique among the subjects.
        role: ``source``, ``converted``, ``uptrained`` or ``other``, from the records beside the weights.
        vocab: rows of the embedding, padding included.
    """

    name: str
    role: str
    spec: str
    checkpoint: Checkpoint
    config: Any
    vocab: int
    trust_remote_code: bool

    @property
    def folder(self) -> Path:
        return self.checkpoint.folder

    @property
    def writes(self) -> bool:
        """An encoder-decoder, which writes a target of what it read."""
        return is_seq2seq(self.config)

    def tokenizer(self) -> Any:
        return load_tokenizer(self.folder, trust_remote_code=self.trust_remote_code)

    def load(self, dtype: torch.dtype, device: torch.device) -> Any:
        model = load_language_model(self.folder, dtype=dtype, trust_remote_code=self.trust_remote_code)
        return model.to(device).eval()


def open_subjects(source: str, others: Sequence[str], trust_remote_code: bool) -> list[Subject]:
    """Open all checkpoints by their headers, the source first, before any weight is loaded.

    Raises:
        UsageError: a checkpoint is not there, or is named twice.
        CheckpointError: a checkpoint is damaged.
    """
    specs = [source, *others]
    checkpoints = [Checkpoint.open(spec) for spec in specs]
    names = _short_names([checkpoint.folder for checkpoint in checkpoints], specs)
    subjects: list[Subject] = []
    for name, spec, checkpoint in zip(names, specs, checkpoints, strict=True):
        config = _read_config(checkpoint, trust_remote_code)
        vocab = int(config.get_text_config().vocab_size)
        role = _role(checkpoint.folder) if subjects else SOURCE
        subjects.append(Subject(name, role, spec, checkpoint, config, vocab, trust_remote_code))
        if subjects[-1].writes != subjects[0].writes:
            raise UsageError(
                f"One of {subjects[0].name} and {name} is an encoder-decoder and the other is not.",
                "Compare models of one kind.",
            )
    return subjects


def _read_config(checkpoint: Checkpoint, trust_remote_code: bool) -> Any:
    try:
        return load_config(checkpoint.folder, trust_remote_code=trust_remote_code)
    except CheckpointError as problem:
        raise CheckpointError(
            f"{checkpoint.folder / 'config.json'} describes no model that can be run: {problem.message}",
            "A newer transformers may know the model type; one with code of its own needs --trust-remote-code.",
        ) from problem


def _short_names(folders: Sequence[Path], specs: Sequence[str]) -> list[str]:
    """The folder's own name where that tells the subjects apart, else the path as given."""
    if len(set(specs)) < len(specs):
        raise UsageError("A checkpoint is named twice.", "Name the source once, then each model to compare with it.")
    short = [
        spec.rstrip("/") if not Path(spec).expanduser().is_dir() else folder.name
        for spec, folder in zip(specs, folders, strict=True)
    ]
    return short if len(set(short)) == len(short) else [spec.rstrip("/") for spec in specs]


def _role(folder: Path) -> str:
    if (folder / METRICS_NAME).is_file() or last_entry(folder, "uptrain"):
        return UPTRAINED
    return CONVERTED if last_entry(folder, "convert") else OTHER


def tokenize_for_all(subjects: Sequence[Subject], tokenize: Callable[[Any], TokenText]) -> TokenText:
    """The token ids that every subject scores.

    Args:
        tokenize: makes them with a tokenizer.

    Raises:
        UsageError: two tokenizers differ, so that perplexities per token would not be comparable.
        DataError: the text holds ids that one of the models does not have.
    """
    first = subjects[0].tokenizer()
    text = tokenize(first)
    for other in subjects[1:]:
        tokenizer = other.tokenizer()
        same = _vocabulary(tokenizer) == _vocabulary(first)
        if not same or tokenize(tokenizer).ids_sha256 != text.ids_sha256:
            raise UsageError(
                f"The tokenizers of {subjects[0].name} and {other.name} differ, "
                "so their perplexities per token cannot be compared.",
                "Evaluate each alone and compare their bits per byte, which do not depend on the tokenizer.",
            )
    highest = max(document.highest for document in text.documents)
    for subject in subjects:
        if highest >= subject.vocab:
            raise DataError(
                f"The text holds token id {highest}, but {subject.name} has {subject.vocab} embeddings.",
                "Its tokenizer does not belong to it; take both from one place.",
            )
    if text.skipped:
        warn(f"{text.skipped} documents are empty or shorter than two tokens and were skipped.")
    return text


def _vocabulary(tokenizer: Any) -> Any:
    """Vocabulary and merges in a form that does not depend on how the file was written."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return tokenizer.get_vocab() if backend is None else json.loads(backend.to_str())["model"]


def shared_vocab(subjects: Sequence[Subject]) -> int | None:
    """Ids that all models have where padding makes their vocabularies differ in size, else None."""
    sizes = {subject.vocab for subject in subjects}
    return None if len(sizes) == 1 else min(sizes)
