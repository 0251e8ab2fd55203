"""Compare converted and uptrained checkpoints with their source: one run, one folder with the report."""

from __future__ import annotations

import gc
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.publish import publishing, refuse_occupied, refuse_overlap
from ..console import info
from ..corpus import HELDOUT, Corpus, open_corpus
from ..errors import CheckpointError
from .footprint import DecodeSettings, DecodeTimes, measure_cache, measure_decoding
from .limits import choose_device, choose_dtype, choose_window, device_name, has_learned_positions, position_limit
from .paired import score_pair
from .perplexity import DEFAULT_BATCH, DEFAULT_WINDOW, Scores, score
from .report import write_report
from .results import Measured, Pair, collect, pooled
from .subjects import Subject, open_subjects, shared_vocab, tokenize_for_all
from .windows import TokenText, default_stride, make_windows

DEFAULT_TOKENS = 65536


def compare(
    source: str,
    others: Sequence[str],
    *,
    data: str,
    out: Path,
    window: int | None = None,
    stride: int | None = None,
    max_tokens: int | None = DEFAULT_TOKENS,
    batch_size: int = DEFAULT_BATCH,
    dtype: str = "auto",
    device: str = "auto",
    decode: DecodeSettings | None = None,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    command: str | None = None,
) -> dict[str, Any]:
    """Measure all checkpoints on the same tokens and write ``out/results.json``, ``report.md`` and ``report.html``.

    Args:
        source: folder or hub id of the original checkpoint.
        others: checkpoints made from it; none at all measures the source alone.
        data: corpus name, see :mod:`headfold.corpus`; its held-out split unless the name says otherwise.
        window: tokens a model sees at once; default 512 or the model's own limit.
        stride: how far windows move on; default half a window.
        max_tokens: tokens to score, None for all of the text.
        dtype: ``auto`` is that of the source's weights, for all models alike; float32 on a CPU.
        decode: how decoding speed is measured; its defaults take seconds on a small model.
        command: the command line to print in the report; default the one of this process.

    Returns:
        The content of results.json, see :mod:`headfold.eval.results`.

    Raises:
        UsageError: a path, a number, or tokenizers that differ.
        CheckpointError: a checkpoint that is damaged or lacks weights, or whose logits are not finite.
        DataError: no text to score.
    """
    refuse_occupied(out, overwrite)
    subjects = open_subjects(source, others, trust_remote_code)
    for subject in subjects:
        refuse_overlap(subject.checkpoint.folder, out)
    corpus = open_corpus(data, HELDOUT)
    text = tokenize_for_all(subjects, corpus, max_tokens)
    place = choose_device(device)
    dtype_used = choose_dtype(dtype, subjects[0].config, place)
    runner = _Runner(dtype_used, place, batch_size, stride, decode or DecodeSettings())
    source_model = runner.load(subjects[0])
    runner.fit(window, subjects, source_model, text)
    info(
        f"{text.scored:,} tokens of {len(text.documents)} documents from {corpus.spec}, "
        f"{len(subjects)} models, {str(runner.dtype).removeprefix('torch.')} on {runner.device}"
    )
    pairs = [runner.measure_pair(source_model, subjects[0], subject, text) for subject in subjects[1:]]
    alone = (
        runner.measure_alone(source_model, subjects[0], text) if not pairs else pooled([pair.source for pair in pairs])
    )
    results = collect(alone, pairs, text, runner.protocol(corpus, subjects, source_model), command or _command_line())
    with publishing(out, overwrite=overwrite) as folder:
        write_report(results, folder)
    return results


def _command_line() -> str:
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


@dataclass
class _Runner:
    """How every model of one comparison is run; the window is known once the source is loaded."""

    dtype: torch.dtype
    device: torch.device
    batch_size: int
    stride: int | None
    decode: DecodeSettings
    window: int = DEFAULT_WINDOW
    vocab: int | None = None

    def load(self, subject: Subject) -> Any:
        info(f"loading {subject.name}")
        return subject.load(self.dtype, self.device)

    def fit(self, window: int | None, subjects: Sequence[Subject], source_model: Any, text: TokenText) -> None:
        """Settle window, stride and prompt so that they suit all the models."""
        tokenizer = subjects[0].tokenizer()
        stated = [position_limit(subject.config, tokenizer) for subject in subjects]
        limit = min((found for found in stated if found is not None), default=None)
        self.window = choose_window(window, limit, has_learned_positions(source_model))
        asked = default_stride(self.window) if self.stride is None else self.stride
        self.stride = min(asked, self.window - 1)
        self.vocab = shared_vocab(subjects)
        if limit is not None and self.decode.context + self.decode.new_tokens > limit:
            new_tokens = min(self.decode.new_tokens, limit // 2)
            self.decode = replace(self.decode, context=limit - new_tokens, new_tokens=new_tokens)
        make_windows(text.documents, self.window, self.stride)  # a bad stride is refused before anything is measured

    def measure_alone(self, model: Any, subject: Subject, text: TokenText) -> Measured:
        scores = score(
            model, text.documents, window=self.window, stride=self.stride, batch_size=self.batch_size, vocab=self.vocab
        )
        return self._measured(subject, model, scores, measure_decoding([model], self.decode)[0])

    def measure_pair(self, source_model: Any, source: Subject, other: Subject, text: TokenText) -> Pair:
        """Score and time a model beside the source; it leaves memory afterwards."""
        model = self.load(other)
        scores = score_pair(
            source_model,
            model,
            text.documents,
            window=self.window,
            stride=self.stride,
            batch_size=self.batch_size,
            vocab=self.vocab,
        )
        info(f"timing {source.name} and {other.name} in turn")
        times = measure_decoding([source_model, model], self.decode)
        pair = Pair(
            self._measured(source, source_model, scores.source, times[0]),
            self._measured(other, model, scores.other, times[1]),
            scores,
        )
        del model
        gc.collect()
        if self.device.type != "cpu":
            torch.accelerator.memory.empty_cache()
        return pair

    def _measured(self, subject: Subject, model: Any, scores: Scores, times: list[DecodeTimes]) -> Measured:
        if not math.isfinite(scores.total().nll_nats):
            raise CheckpointError(
                f"{subject.name} gives logits that are not finite numbers on this text.",
                "Try --dtype float32; if that does not help, its weights are broken.",
            )
        parameters = sum(parameter.numel() for parameter in model.parameters())
        return Measured(subject, parameters, scores, measure_cache(model), times)

    def protocol(self, corpus: Corpus, subjects: Sequence[Subject], source_model: Any) -> dict[str, Any]:
        """What must be the same for the numbers to be comparable with another run's."""
        return {
            "corpus": corpus.spec,
            "revision": corpus.revision,
            "window": self.window,
            "stride": self.stride,
            "batch_size": self.batch_size,
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": device_name(self.device),
            "attention": str(getattr(source_model.config, "_attn_implementation", "unknown")),
            "vocab": self.vocab or subjects[0].vocab,
            "decode": {**asdict(self.decode), "batches": list(self.decode.batches)},
        }
