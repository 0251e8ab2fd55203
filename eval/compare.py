"""Compare converted and uptrained checkpoints with their source: one run, one folder with the report."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ..checkpoint.publish import publishing, refuse_occupied, refuse_overlap
from ..console import info
from ..corpus import HELDOUT, Corpus, open_corpus, refuse_idle_column
from .measures.kv_cache import DecodeSettings
from .measures.retrieval import NeedleSettings, hide
from .measures.tasks import TaskSettings, find_tasks, task_identity
from .models import Subject, open_subjects, tokenize_for_all
from .protocol import Protocol, settle
from .report.write import write_report
from .results import Measured, collect
from .runner import Runner
from .scoring.limits import choose_device, device_name
from .scoring.processes import join_processes, process_count
from .scoring.resume import Kept
from .scoring.source_cache import SourceCache
from .scoring.targets import Asking
from .scoring.windows import TokenText, make_windows
from .settings import EvalSettings
from .vs_source import ModelPair, against_source


def compare(
    source: str,
    others: Sequence[str],
    *,
    out: Path,
    settings: EvalSettings | None = None,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    command: str | None = None,
) -> dict[str, Any]:
    """Measure all checkpoints on the same tokens and write ``out/results.json``, ``report.md`` and ``report.html``.

    Under ``accelerate launch`` the processes share the text, and the numbers are those of one process. What is
    measured is kept in ``<out>.partial`` until the report stands, and the same call goes on with it.

    Args:
        source: folder or hub id of the original checkpoint.
        others: checkpoints made from it; none at all measures the source alone.
        settings: the text, how it is read, and what else is measured.
        command: the command line to print in the report; default the one of this process.

    Returns:
        The content of results.json, see :mod:`headfold.eval.results`.

    Raises:
        UsageError: a path, a number, or tokenizers that differ.
        CheckpointError: a checkpoint that is damaged or lacks weights, or whose logits are not finite.
        DataError: no text to score.
    """
    settings = settings or EvalSettings()
    refuse_occupied(out, overwrite)
    subjects = open_subjects(source, others, trust_remote_code)
    names = () if subjects[0].writes else tuple(settings.tasks)
    tasks = TaskSettings(names, settings.shots, settings.task_limit, settings.batch)
    known_tasks = find_tasks(tasks) if tasks.tasks else None
    for subject in subjects:
        refuse_overlap(subject.checkpoint.folder, out)
    corpus = open_corpus(settings.data, HELDOUT, settings.columns)
    refuse_idle_column([corpus], settings.columns)
    accelerator = join_processes(settings.device)
    protocol = settle(settings, subjects, accelerator.device if accelerator else choose_device(settings.device))
    text = tokenize_for_all(subjects, lambda tokenizer: protocol.tokenize(tokenizer, corpus, settings))
    make_windows(text.documents, protocol.window, protocol.stride)  # a bad stride is refused before anything is loaded
    reading = {**protocol.reading(), "ids": text.ids_sha256, "tasks": task_identity(tasks),
               "versions": {name: version(name) for name in ("headfold", "torch", "transformers")}}  # fmt: skip
    digests = [subject.checkpoint.digest() for subject in subjects]
    identity = {**reading, "decode": asdict(protocol.decode), "batch": protocol.batch_size, "digests": digests}
    kept = Kept(out, identity, accelerator)
    runner = Runner(
        protocol, subjects, text, kept, accelerator,
        hidden=hide(text.documents, protocol.needle) if protocol.needle.passages else [],
        tasks=None if known_tasks is None else (tasks, known_tasks),
        cache=_source_cache(settings, {**reading, "source": digests[0]}),
    )  # fmt: skip
    _announce(corpus, text, protocol, subjects)
    measured, pairs = runner.run()
    results = _results(measured, pairs, text, runner, corpus, settings, command or _command_line())
    if accelerator is None or accelerator.is_main_process:
        with publishing(out, overwrite=overwrite) as folder:
            write_report(results, folder)
        kept.clear()
    if accelerator is not None:
        accelerator.wait_for_everyone()
    return results


def _source_cache(settings: EvalSettings, identity: dict[str, Any]) -> SourceCache | None:
    return None if settings.source_cache is None else SourceCache(Path(settings.source_cache).expanduser(), identity)


def _announce(corpus: Corpus, text: TokenText, protocol: Protocol, subjects: Sequence[Subject]) -> None:
    processes = f", {process_count()} processes" if process_count() > 1 else ""
    info(
        f"{text.scored:,} tokens of {len(text.documents)} documents from {corpus.spec}, "
        f"{len(subjects)} models, {protocol.dtype_name} on {protocol.device}{processes}"
    )


def _results(
    source: Measured,
    pairs: Sequence[ModelPair],
    text: TokenText,
    runner: Runner,
    corpus: Corpus,
    settings: EvalSettings,
    command: str,
) -> dict[str, Any]:
    protocol, tokenizer = runner.protocol, source.subject.tokenizer()
    described = {
        "corpus": corpus.spec,
        "revision": corpus.revision,
        "window": protocol.window,
        "stride": protocol.stride,
        "batch_size": protocol.batch_size,
        "dtype": protocol.dtype_name,
        "device": device_name(protocol.device),
        "processes": process_count(),
        "attention": runner.attention,
        "vocab": protocol.vocab or source.subject.vocab,
        "decode": _jsonable(protocol.decode),
        "needle": _jsonable(protocol.needle),
        "targets": None if protocol.asking is None else _asked(protocol.asking, settings),
        "source_from_cache": runner.source_from_cache,
    }
    others = [
        (pair.other, against_source(pair, pairs, protocol.window, protocol.stride, tokenizer.decode)) for pair in pairs
    ]
    return collect(source, others, text, described, command, settings.model_dump(mode="json"))


def _asked(asking: Asking, settings: EvalSettings) -> dict[str, Any]:
    columns = {"source_column": settings.source_column, "target_column": settings.target_column}
    return {**asking.describe(), **(columns if asking.from_column else {})}


def _jsonable(settings: DecodeSettings | NeedleSettings) -> dict[str, Any]:
    return {name: list(found) if isinstance(found, tuple) else found for name, found in asdict(settings).items()}


def _command_line() -> str:
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
