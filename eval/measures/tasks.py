"""Run tasks of lm-evaluation-harness (the extra ``harness``), every model with the same settings and questions."""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ...console import talk, warn
from ...errors import DataError, UsageError, reason
from ...local_paths import expanded


@dataclass(frozen=True)
class TaskSettings:
    """Settings of the tasks.

    Attributes:
        tasks: names that lm-eval knows, or YAML files and folders of the user.
        shots: examples before each question (None for the task's own number).
        limit: questions per task, None for all.
        batch_size: questions in one forward pass.
    """

    tasks: tuple[str, ...] = ()
    shots: int | None = None
    limit: int | None = None
    batch_size: int = 8


@dataclass(frozen=True)
class TaskAnswers:
    """One measure of one task for one model.

    Attributes:
        values: one per question, in the task's order. The measure is their mean.
    """

    task: str
    measure: str
    higher_is_better: bool
    values: list[float]


def find_tasks(settings: TaskSettings) -> tuple[Any, list[str]]:
    """Find the tasks, local ones by their files, and return lm-eval's task manager and the names.

    Raises:
        UsageError: lm-eval is not installed, or does not know a task.
    """
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as problem:
        raise UsageError(
            "--tasks needs lm-eval, which is not installed.", "Try: pip install 'headfold[harness]'"
        ) from problem

    folders = sorted({str(_folder(name)) for name in settings.tasks if _is_local(name)})
    # lm-eval's own task files are thousands, and reading them takes many seconds
    local_only = all(map(_is_local, settings.tasks))
    manager = TaskManager(include_path=folders or None, include_defaults=not local_only)
    names = [name for given in settings.tasks for name in (_names_in(given) if _is_local(given) else [given])]
    unknown = [name for name in names if not manager.match_tasks([name])]
    if unknown:
        raise UsageError(
            f"lm-eval has no task named {unknown[0]!r}.",
            "List its tasks with `lm-eval ls tasks`; write ./my_task.yaml for a file.",
        )
    return manager, names


def _is_local(name: str) -> bool:
    if name.startswith((".", "/", "~")) or name.endswith((".yaml", ".yml")):
        if not expanded(name).exists():
            raise UsageError(f"There is no task file or folder {name}.", "Check the path given to --tasks.")
        return True
    return False


def _folder(name: str) -> Path:
    path = expanded(name).resolve()
    return path if path.is_dir() else path.parent


def _names_in(given: str) -> list[str]:
    """Read the names of the tasks that a YAML file, or the YAML files of a folder, define."""
    import yaml

    path = expanded(given)
    files = sorted([*path.rglob("*.yaml"), *path.rglob("*.yml")]) if path.is_dir() else [path]
    names = []
    for file in files:
        # only these lines are parsed, since the rest may hold tags such as !function, which only lm-eval can read
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.startswith(("task:", "group:"))]
        found = [value for line in lines for value in yaml.safe_load(line).values()]
        names += [value for value in found if isinstance(value, str)]
    if not names:
        raise UsageError(f"{given} defines no task.", "A task file has a line `task: NAME`.")
    return names


def answer_tasks(model: Any, tokenizer: Any, settings: TaskSettings, found: tuple[Any, list[str]]) -> list[TaskAnswers]:
    """Run the tasks on one model.

    Args:
        found: from :func:`find_tasks`, the same for every model.

    Raises:
        DataError: a task's data cannot be loaded, or a task has no question.
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    manager, names = found
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    wrapped: Any = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=settings.batch_size, backend="causal")
    try:
        with _without_bars():
            results: Any = simple_evaluate(
                model=wrapped, tasks=list(names), num_fewshot=settings.shots, limit=settings.limit,
                task_manager=manager, log_samples=True, bootstrap_iters=0,
            )  # fmt: skip
    except (OSError, ValueError, KeyError, RuntimeError) as problem:  # data sets raise many kinds
        raise DataError(
            f"lm-eval cannot run {', '.join(names)}: {reason(problem)}",
            "Without a network, name task files with local data.",
        ) from problem
    return [row for task, samples in sorted(results["samples"].items()) for row in _rows(task, samples, results)]


@contextmanager
def _without_bars() -> Iterator[None]:
    """Hide lm-eval's progress bars unless stderr is a terminal, so that logs stay readable."""
    if talk.is_terminal:
        yield
        return
    with redirect_stderr(io.StringIO()):
        yield


def _rows(task: str, samples: Sequence[dict[str, Any]], results: Any) -> list[TaskAnswers]:
    """Collect the measures of a task that are plain means over its questions, for each of its filters.

    A measure whose mean differs from lm-eval's own total (a perplexity, a score of the whole text) is left out, since
    it cannot be paired by question.
    """
    if not samples:
        raise DataError(f"The task {task} has no question.", "Check its data files.")
    by_filter: dict[str, list[dict[str, Any]]] = {}
    for sample in sorted(samples, key=lambda sample: int(sample["doc_id"])):
        by_filter.setdefault(str(sample.get("filter", "none")), []).append(sample)
    better, totals = results["higher_is_better"].get(task, {}), results["results"][task]
    rows, left_out = [], []
    for name, answered in by_filter.items():
        for measure in answered[0]["metrics"]:
            values, shown = _numbers(answered, measure), measure if len(by_filter) == 1 else f"{measure} ({name})"
            total = totals.get(f"{measure},{name}")
            if values and isinstance(total, (int, float)) and math.isclose(sum(values) / len(values), total):
                rows.append(TaskAnswers(task, shown, bool(better.get(measure, True)), values))
            else:
                left_out.append(shown)
    if left_out:
        warn(f"{task}: {', '.join(left_out)} is not a mean over questions, so it is left out.")
    return rows


def _numbers(samples: Sequence[dict[str, Any]], measure: str) -> list[float]:
    """List the measure of every question (empty where it is not a finite number for all of them)."""
    values = [sample.get(measure) for sample in samples]
    plain = [float(value) for value in values if isinstance(value, (int, float)) and math.isfinite(value)]
    return plain if len(plain) == len(values) else []


def task_identity(settings: TaskSettings) -> dict[str, Any]:
    """Collect all that the answers depend on: the settings, lm-eval's version, and the files beside local tasks."""
    if not settings.tasks:
        return {}
    folders = {_folder(name) for name in settings.tasks if _is_local(name)}
    files = [
        (str(path), path.stat().st_size, path.stat().st_mtime_ns) for folder in folders for path in folder.iterdir()
    ]
    return {**asdict(settings), "lm_eval": version("lm_eval"), "files": sorted(files)}
