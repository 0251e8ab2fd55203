"""Held-out text that is scored during a run, and how much of what conversion lost is won back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator

from ..checkpoint.load import load_language_model
from ..corpus import HELDOUT, open_corpus
from ..eval.perplexity import quick_perplexity
from ..eval.windows import TokenDocument, tokenize_documents
from .settings import UptrainSettings


@dataclass(frozen=True)
class Watch:
    """The held-out text."""

    documents: list[TokenDocument]
    description: dict[str, str]
    window: int

    def perplexity(self, model: Any, accelerator: Accelerator) -> float:
        """Collective: the processes share the windows."""
        return quick_perplexity(model, self.documents, window=self.window, accelerator=accelerator)

    def perplexity_of(self, place: str, accelerator: Accelerator, trust_remote_code: bool) -> float:
        """That of a checkpoint that is loaded for this alone."""
        model = load_language_model(place, dtype=torch.float32, trust_remote_code=trust_remote_code)
        return self.perplexity(model.to(accelerator.device), accelerator)


def open_watch(settings: UptrainSettings, tokenizer: Any) -> Watch | None:
    if settings.eval_data is None:
        return None
    corpus = open_corpus(settings.eval_data, HELDOUT)
    documents = tokenize_documents(tokenizer, corpus, max_tokens=settings.eval_tokens)
    return Watch(documents, corpus.describe(), settings.block)


def recovered_share(lines: Sequence[dict[str, Any]]) -> float | None:
    """Share of the gap in log-perplexity between the start and the source that is closed at the last evaluation.

    Args:
        lines: of the metrics; those of kind ``source`` and ``eval`` count.

    Returns:
        1 where the source is reached; None where it was not measured or was not better at the start.
    """
    source = next((line["perplexity"] for line in lines if line["kind"] == "source"), None)
    seen = [line["perplexity"] for line in lines if line["kind"] == "eval"]
    if source is None or not seen or seen[0] <= source:
        return None
    return math.log(seen[0] / seen[-1]) / math.log(seen[0] / source)
