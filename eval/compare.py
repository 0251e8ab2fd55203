"""Compare converted and uptrained checkpoints with their source: one run, one folder with the report."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ..checkpoint.publish import claiming, publishing, refuse_overlap
from ..console import info, process_count
from ..corpus import HELDOUT, Corpus, open_corpus, refuse_idle_column
from ..local_paths import command_line, expanded
from .measurements import ModelMeasurements, ModelPair, model_result
from .measures.intervals import LEVEL, RESAMPLES, SEED
from .measures.retrieval import hide_passages
from .measures.tasks import TaskSettings, find_tasks, task_identity
from .models import ComparedModel, open_models, tokenize_for_all
from .protocol import EvalProtocol, fit_protocol
from .report.write import write_report
from .results import (
    KIND,
    SCHEMA,
    Comparison,
    DocumentSize,
    IntervalProtocol,
    MeasurementProtocol,
    TargetProtocol,
)
from .runner import Runner
from .scoring.limits import choose_device, device_name
from .scoring.processes import join_processes
from .scoring.resume import SavedMeasurements
from .scoring.source_cache import SourceCache
from .scoring.windows import TokenText, make_windows
from .settings import EvalSettings
from .vs_source import against_source

# Numbers may differ between versions of these.
_PACKAGES = ("headfold", "torch", "transformers", "tokenizers", "scipy")
_SAVED_FORMAT = 2
"""Goes up when saved measurements change their form, so that older ones are measured again."""


def compare(
    source: str | Path,
    others: Sequence[str | Path],
    *,
    out: str | Path,
    settings: EvalSettings | None = None,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    command: str | None = None,
) -> Comparison:
    """Measure all checkpoints on the same tokens and write ``out/results.json``, ``report.md`` and ``report.html``.

    Under ``accelerate launch`` the processes share the text, and the numbers equal those of one process. Measurements
    are saved in ``<out>.partial`` until the report is written. Repeat the call to continue a comparison that stopped.

    Args:
        source: folder or hub id of the original checkpoint.
        others: checkpoints made from it (none measures the source alone).
        settings: the text, the windows, and which measurements to make.
        command: the command line to print in the report (default: the command line of this process).

    Returns:
        the content of results.json, with whole paths where the file has only their last parts.

    Raises:
        UsageError: a wrong path or number, or tokenizers that differ.
        CheckpointError: a checkpoint that is damaged or lacks weights, or whose logits are not finite.
        DataError: no text to score.
    """
    wanted, folder = settings or EvalSettings(), expanded(out)
    with claiming(folder, overwrite=overwrite):
        named = [str(other) for other in others]
        return _compare(str(source), named, folder, wanted, overwrite, trust_remote_code, command or command_line())


def _compare(
    source: str,
    others: Sequence[str],
    out: Path,
    settings: EvalSettings,
    overwrite: bool,
    trust_remote_code: bool,
    command: str,
) -> Comparison:
    # cheap refusals come first, since loading and scoring may take hours
    models = open_models(source, others, trust_remote_code)
    for model in models:
        refuse_overlap(model.folder, out)
    tasks = _task_settings(settings, models[0])
    # an unknown task is refused now and not after the models were scored
    known_tasks = find_tasks(tasks) if tasks.tasks else None
    corpus = open_corpus(settings.data, HELDOUT, settings.columns)
    refuse_idle_column([corpus], settings.columns)
    accelerator = join_processes(settings.device)
    protocol = fit_protocol(settings, models, accelerator.device if accelerator else choose_device(settings.device))
    text = tokenize_for_all(models, lambda tokenizer: protocol.tokenize(tokenizer, corpus, settings))
    make_windows(text.documents, protocol.window, protocol.stride)  # a bad stride is refused before anything is loaded
    # The other processes find the hashes of the first in the user's cache.
    with accelerator.local_main_process_first() if accelerator else nullcontext():
        identity = _Identity.of(protocol, text, tasks, models)
    runner = Runner(
        protocol, models, text, SavedMeasurements(out, identity.measurements, accelerator), accelerator,
        passages=hide_passages(text.documents, protocol.needle) if protocol.needle.passages else [],
        tasks=None if known_tasks is None else (tasks, known_tasks),
        cache=_source_cache(settings, identity.source_scores),
    )  # fmt: skip
    _announce(corpus, text, protocol, models)
    measured, pairs = runner.run()
    results = _results(measured, pairs, runner, corpus, settings, command)
    _publish(results, runner, out, overwrite)
    return results


def _publish(results: Comparison, runner: Runner, out: Path, overwrite: bool) -> None:
    """Write the report on the first process, while the others wait."""
    accelerator = runner.accelerator
    if accelerator is None or accelerator.is_main_process:
        with publishing(out, overwrite=overwrite) as folder:
            write_report(results, folder)
        # until the report is whole, the measurements are all there is
        runner.saved.clear()
    if accelerator is not None:
        # no process returns before the report is there
        accelerator.wait_for_everyone()


def _task_settings(settings: EvalSettings, source: ComparedModel) -> TaskSettings:
    """Leave the tasks out for encoder-decoders, of which :func:`fit_protocol` warns."""
    names = () if source.is_encoder_decoder else tuple(settings.tasks)
    return TaskSettings(names, settings.shots, settings.task_limit, settings.batch)


@dataclass(frozen=True)
class _Identity:
    """Everything that saved numbers depend on. Numbers saved under another identity are not used."""

    source_scores: dict[str, Any]
    measurements: dict[str, Any]

    @classmethod
    def of(
        cls, protocol: EvalProtocol, text: TokenText, tasks: TaskSettings, models: Sequence[ComparedModel]
    ) -> _Identity:
        scores = {
            **protocol.identity(),
            "ids": text.ids_sha256,
            "tasks": task_identity(tasks),
            "versions": {name: version(name) for name in ("headfold", "torch", "transformers")},
            "format": _SAVED_FORMAT,
        }
        digests = [model.checkpoint.digest() for model in models]
        return cls(
            # decoding settings and batch size have no effect on scores, so the cache serves any of them
            {**scores, "source": digests[0]},
            {**scores, "decode": asdict(protocol.decode), "batch": protocol.batch_size, "digests": digests},
        )


def _source_cache(settings: EvalSettings, identity: dict[str, Any]) -> SourceCache | None:
    return None if settings.source_cache is None else SourceCache(expanded(settings.source_cache), identity)


def _announce(corpus: Corpus, text: TokenText, protocol: EvalProtocol, models: Sequence[ComparedModel]) -> None:
    processes = f", {process_count()} processes" if process_count() > 1 else ""
    info(
        f"{text.scored:,} tokens of {len(text.documents)} documents from {corpus.spec}, "
        f"{len(models)} models, {protocol.dtype_name} on {protocol.device}{processes}"
    )


def _results(
    source: ModelMeasurements,
    pairs: Sequence[ModelPair],
    runner: Runner,
    corpus: Corpus,
    settings: EvalSettings,
    command: str,
) -> Comparison:
    """Put all measurements into the form of results.json."""
    protocol, decode = runner.protocol, source.model.tokenizer().decode
    others = [
        model_result(pair.other).model_copy(
            update={"against_source": against_source(pair, pairs, protocol.window, protocol.stride, decode)}
        )
        for pair in pairs
    ]
    return Comparison(
        schema_version=SCHEMA,
        kind=KIND,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=command,
        settings=settings.model_dump(mode="json"),
        versions={"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}},
        protocol=_protocol_of(source, runner, corpus, settings),
        documents=[
            DocumentSize(name=document.name, tokens=document.scored, utf8_bytes=document.utf8_bytes)
            for document in runner.text.documents
        ],
        models=[model_result(source), *others],
    )


def _protocol_of(
    source: ModelMeasurements, runner: Runner, corpus: Corpus, settings: EvalSettings
) -> MeasurementProtocol:
    protocol, text, total = runner.protocol, runner.text, source.scores.total()
    vocab = protocol.vocab or source.model.vocab
    return MeasurementProtocol(
        corpus=corpus.spec,
        revision=corpus.revision,
        window=protocol.window,
        stride=protocol.stride,
        batch_size=protocol.batch_size,
        dtype=protocol.dtype_name,
        device=device_name(protocol.device),
        processes=process_count(),
        attention=runner.attention,
        vocab=vocab,
        decode=protocol.decode,
        needle=protocol.needle,
        targets=_target_protocol(protocol, settings),
        source_from_cache=runner.source_from_cache,
        text_sha256=text.text_sha256,
        ids_sha256=text.ids_sha256,
        documents=len(text.documents),
        skipped=text.skipped,
        truncated=text.truncated,
        tokens=total.tokens,
        utf8_bytes=total.utf8_bytes,
        bos=text.bos,
        uniform_perplexity=float(vocab),  # each of the ids is equally likely to a model that guesses
        interval=IntervalProtocol(method="BCa bootstrap over documents", level=LEVEL, resamples=RESAMPLES, seed=SEED),
    )


def _target_protocol(protocol: EvalProtocol, settings: EvalSettings) -> TargetProtocol | None:
    if protocol.targets is None:
        return None
    columns = {"source_column": settings.text_column, "target_column": settings.target_column}
    return TargetProtocol(**protocol.targets.describe(), **(columns if protocol.targets.from_column else {}))
