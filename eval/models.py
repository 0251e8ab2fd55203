"""Open the models of a comparison, and refuse those that cannot be compared."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.load import is_seq2seq, load_config, load_language_model, load_tokenizer
from ..checkpoint.record import METRICS_NAME, last_entry
from ..checkpoint.source import Checkpoint
from ..console import warn
from ..corpus import refuse_unknown_ids
from ..errors import CheckpointError, UsageError
from ..local_paths import expanded
from .results import CONVERTED, OTHER, SOURCE, UPTRAINED, Role
from .scoring.windows import TokenText


@dataclass(frozen=True)
class ComparedModel:
    """One checkpoint of the comparison.

    Attributes:
        name: short and unique in the comparison.
        role: from the records beside the weights.
        spec: the folder or hub id as the user gave it.
        vocab: rows of the embedding, padding included.
    """

    name: str
    role: Role
    spec: str
    checkpoint: Checkpoint
    config: Any
    vocab: int
    trust_remote_code: bool

    @property
    def folder(self) -> Path:
        return self.checkpoint.folder

    @property
    def is_encoder_decoder(self) -> bool:
        """The model reads with an encoder and writes a target with a decoder."""
        return is_seq2seq(self.config)

    def tokenizer(self) -> Any:
        """Load the tokenizer."""
        return load_tokenizer(self.folder, trust_remote_code=self.trust_remote_code)

    def load(self, dtype: torch.dtype, device: torch.device) -> Any:
        """Load the weights, in eval mode."""
        model = load_language_model(self.folder, dtype=dtype, trust_remote_code=self.trust_remote_code)
        return model.to(device).eval()


def open_models(source: str, others: Sequence[str], trust_remote_code: bool) -> list[ComparedModel]:
    """Open all checkpoints by their headers, the source first, before any weight is loaded.

    Raises:
        UsageError: a checkpoint does not exist, or is named twice.
        CheckpointError: a checkpoint is damaged.
    """
    specs = [source, *others]
    checkpoints = [Checkpoint.open(spec) for spec in specs]
    names = _short_names([checkpoint.folder for checkpoint in checkpoints], specs)
    models: list[ComparedModel] = []
    for name, spec, checkpoint in zip(names, specs, checkpoints, strict=True):
        config = _read_config(checkpoint, trust_remote_code)
        vocab = int(config.get_text_config().vocab_size)
        # the first is the source by its place, whatever its record says
        role = _role(checkpoint.folder) if models else SOURCE
        models.append(ComparedModel(name, role, spec, checkpoint, config, vocab, trust_remote_code))
        if models[-1].is_encoder_decoder != models[0].is_encoder_decoder:
            raise UsageError(
                f"One of {models[0].name} and {name} is an encoder-decoder and the other is not.",
                "Compare models of one kind.",
            )
    return models


def _read_config(checkpoint: Checkpoint, trust_remote_code: bool) -> Any:
    try:
        return load_config(checkpoint.folder, trust_remote_code=trust_remote_code)
    except CheckpointError as problem:
        raise CheckpointError(
            f"No model can be built from {checkpoint.folder / 'config.json'}: {problem.message}",
            "A newer transformers may know the model type; a model with code of its own needs --trust-remote-code.",
        ) from problem


def _short_names(folders: Sequence[Path], specs: Sequence[str]) -> list[str]:
    """Name each model by its folder, or by more of its path where two folders have one name."""
    if len(set(specs)) < len(specs):
        raise UsageError("A checkpoint is named twice.", "Name the source once, then each model to compare with it.")
    short = [
        spec.rstrip("/") if not expanded(spec).is_dir() else folder.name
        for spec, folder in zip(specs, folders, strict=True)
    ]
    return short if len(set(short)) == len(short) else _without_common_folder(specs)


def _without_common_folder(specs: Sequence[str]) -> list[str]:
    """Shorten paths to the parts in which they differ: reports are passed on, and must not name a user."""
    places = {spec: expanded(spec).absolute() for spec in specs if expanded(spec).is_dir()}
    common = os.path.commonpath([place.parent for place in places.values()])
    return [os.path.relpath(places[spec], common) if spec in places else spec for spec in specs]


def _role(folder: Path) -> Role:
    """Tell from the record and the metrics beside the weights how the checkpoint was made."""
    if (folder / METRICS_NAME).is_file() or last_entry(folder, "uptrain"):
        return UPTRAINED
    return CONVERTED if last_entry(folder, "convert") else OTHER


def tokenize_for_all(models: Sequence[ComparedModel], tokenize: Callable[[Any], TokenText]) -> TokenText:
    """Make the token ids that every model scores.

    Args:
        tokenize: makes them with a tokenizer.

    Raises:
        UsageError: two tokenizers differ, so that perplexities per token would not be comparable.
        DataError: the text holds ids that one of the models does not have.
    """
    first = models[0].tokenizer()
    text = tokenize(first)
    # perplexity is per token: with other tokens it would be another quantity
    for other in models[1:]:
        tokenizer = other.tokenizer()
        # equal vocabularies may still split text differently, and equal ids on this text may mean different tokens
        same = _vocabulary(tokenizer) == _vocabulary(first)
        if not same or tokenize(tokenizer).ids_sha256 != text.ids_sha256:
            raise UsageError(
                f"The tokenizers of {models[0].name} and {other.name} differ, "
                "so their perplexities per token cannot be compared.",
                "Evaluate each alone and compare their bits per byte, which do not depend on the tokenizer.",
            )
    highest = max(document.highest for document in text.documents)
    for model in models:
        refuse_unknown_ids(highest, model.vocab, model.name)
    if text.skipped:
        warn(f"{text.skipped} documents are empty or shorter than two tokens and were skipped.")
    return text


def _vocabulary(tokenizer: Any) -> Any:
    """Get vocabulary and merges in a form that does not depend on how the file was written."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return tokenizer.get_vocab() if backend is None else json.loads(backend.to_str())["model"]


def shared_vocab(models: Sequence[ComparedModel]) -> int | None:
    """Count the ids that all models have where padding makes their vocabularies differ, else None."""
    sizes = {model.vocab for model in models}
    return None if len(sizes) == 1 else min(sizes)
