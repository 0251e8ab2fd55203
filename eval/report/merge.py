"""Merge the results of several comparisons with one source, and the curve of a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...errors import UsageError
from ..measures.intervals import float_array
from ..measures.recovery import reported_recovery
from ..results import UPTRAINED, Comparison, ModelResult, read_results
from .sweep import RESULTS_NAME as SWEEP_NAME
from .sweep import read_sweep

_SAME = ("ids_sha256", "window", "stride", "dtype", "device", "vocab", "attention", "decode", "needle")
"""Parts of the protocol that must be equal for numbers to stand in one table."""


def read_and_merge(paths: Sequence[Path]) -> Comparison:
    """Read the results of one or several comparisons as one.

    Args:
        paths: results.json files or their folders. Folders of a sweep add their curve.

    Raises:
        UsageError: a path does not exist, or the comparisons differ in source, text or protocol.
        DataError: a file that cannot be read.
    """
    sweeps = [path for path in paths if path.name == SWEEP_NAME or (path / SWEEP_NAME).is_file()]
    plain = [path for path in paths if path not in sweeps]
    if not plain:
        raise UsageError(
            "There are no results of headfold eval among these.", "Name a folder that headfold eval wrote."
        )
    merged = read_results(plain[0])
    for path in plain[1:]:
        merged = _merged(merged, read_results(path), plain[0], path)
    if not sweeps:
        return merged
    return merged.model_copy(update={"sweep": read_sweep(sweeps[0] if sweeps[0].is_dir() else sweeps[0].parent)})


def _merged(first: Comparison, second: Comparison, first_path: Path, second_path: Path) -> Comparison:
    """Put together the models of both. A model that is in both has the second's numbers."""
    _refuse_unlike(first, second, first_path, second_path)
    # by digest, since one folder may hold other weights than before
    again = {model.digest for model in second.others}
    earlier = [model for model in first.others if model.digest not in again]
    models = _tell_apart([first.source, *earlier, *second.others])
    models = [_with_recovery(models[:place], model) for place, model in enumerate(models)]
    return first.model_copy(update={"models": models, "command": f"{first.command}\n{second.command}"})


def _refuse_unlike(first: Comparison, second: Comparison, first_path: Path, second_path: Path) -> None:
    unlike = [name for name in _SAME if getattr(first.protocol, name) != getattr(second.protocol, name)]
    if first.source.digest != second.source.digest:
        unlike.insert(0, "source")
    if unlike:
        names = ", ".join("tokens scored" if name == "ids_sha256" else name for name in unlike)
        raise UsageError(
            f"{first_path} and {second_path} cannot be put together: {names} differ.",
            "Report each alone, or evaluate again with the same source and options.",
        )


def _tell_apart(models: Sequence[ModelResult]) -> list[ModelResult]:
    """Replace names that are not unique by paths, or add a part of the digest where the paths are alike, too."""
    # two comparisons may each have a model in a folder of this name
    names, paths = [model.name for model in models], [model.path.rstrip("/") for model in models]
    told = []
    for model, path in zip(models, paths, strict=True):
        other = path if paths.count(path) == 1 else f"{model.name} ({model.digest[:8]})"
        told.append(model.model_copy(update={"name": other}) if names.count(model.name) > 1 else model)
    return told


def _with_recovery(earlier: Sequence[ModelResult], model: ModelResult) -> ModelResult:
    """Add the share that uptraining recovered where the conversion before it comes from the other comparison."""
    pair = model.against_source
    converted = [one for one in earlier[1:] if one.role != UPTRAINED]
    if model.role != UPTRAINED or pair is None or pair.recovered is not None or not converted:
        return model
    before, lost, found = (float_array(one.nll_nats) for one in (earlier[0], converted[-1], model))
    share = reported_recovery(before, lost, found, converted[-1].name)
    return model.model_copy(update={"against_source": pair.model_copy(update={"recovered": share})})
