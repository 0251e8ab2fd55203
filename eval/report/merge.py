"""Put the results of several comparisons with one source together, and the curve of a sweep beside them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...errors import UsageError
from ..models import UPTRAINED
from ..results import array
from ..vs_source import recovered_share
from .sweep import RESULTS_NAME as SWEEP_NAME
from .sweep import read_sweep
from .write import read_results

Result = dict[str, Any]
_SAME = ("ids_sha256", "window", "stride", "dtype", "device", "vocab", "attention", "decode", "needle")


def gather(paths: Sequence[Path]) -> Result:
    """Results of one or several comparisons as one.

    Args:
        paths: results.json files or their folders; folders of a sweep add their curve.

    Raises:
        UsageError: something is not there, or the comparisons differ in source, text or protocol.
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
    if sweeps:
        merged["sweep"] = read_sweep(sweeps[0] if sweeps[0].is_dir() else sweeps[0].parent)
    return merged


def _merged(first: Result, second: Result, first_path: Path, second_path: Path) -> Result:
    """The models of both; of one that stands in both, the second's numbers."""
    _refuse_unlike(first, second, first_path, second_path)
    again = {model["digest"] for model in second["models"][1:]}
    kept = [model for model in first["models"][1:] if model["digest"] not in again]
    models = [first["models"][0], *kept, *second["models"][1:]]
    _tell_apart(models)
    for place, model in enumerate(models):
        if model["role"] == UPTRAINED and model["against_source"]["recovered"] is None:
            model["against_source"]["recovered"] = _recovered(models[:place], model)
    return {**first, "models": models, "command": f"{first['command']}\n{second['command']}"}


def _refuse_unlike(first: Result, second: Result, first_path: Path, second_path: Path) -> None:
    before, after = first["protocol"], second["protocol"]
    unlike = [name for name in _SAME if before[name] != after[name]]
    if first["models"][0]["digest"] != second["models"][0]["digest"]:
        unlike.insert(0, "source")
    if unlike:
        names = ", ".join("tokens scored" if name == "ids_sha256" else name for name in unlike)
        raise UsageError(
            f"{first_path} and {second_path} cannot be put together: {names} differ.",
            "Report each alone, or evaluate again with the same source and options.",
        )


def _tell_apart(models: Sequence[Result]) -> None:
    """Paths in place of names where names are not unique."""
    names = [model["name"] for model in models]
    for model in models:
        if names.count(model["name"]) > 1:
            model["name"] = model["path"].rstrip("/")


def _recovered(earlier: Sequence[Result], uptrained: Result) -> Result | None:
    """What uptraining won back of the conversion that stands before it."""
    converted = [model for model in earlier[1:] if model["role"] != UPTRAINED]
    if not converted:
        return None
    before, lost, found = (array(model["nll_nats"]) for model in (earlier[0], converted[-1], uptrained))
    return recovered_share(before, lost, found, converted[-1]["name"])
