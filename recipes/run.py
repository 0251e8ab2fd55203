"""Run a recipe: convert, uptrain, compare. Steps that are done already are skipped."""

from __future__ import annotations

import os
from errno import ENOTDIR
from pathlib import Path
from typing import Any

from ..checkpoint.record import last_entry
from ..console import info
from ..convert.plan import Plan
from ..convert.run import plan_conversion, run_plan
from ..corpus import HELDOUT, TRAIN, Columns, is_local, open_corpus
from ..errors import UsageError
from ..eval.compare import compare
from ..eval.report.write import print_report
from ..eval.results import read_results
from ..local_paths import expanded
from ..options import as_options
from ..output_lock import only_run
from ..uptrain.data.mixture import name_of
from ..uptrain.estimate.budget import plan_budget
from ..uptrain.estimate.pretraining import resolve_pretraining
from ..uptrain.processes.launch import launch
from ..uptrain.run import uptrain_checkpoint
from ..uptrain.settings import FREE_ON_RESUME
from ..working_folder import WorkingFolder
from .schema import Recipe

_RECIPE = "recipe.json"


def run_recipe(recipe: Recipe, folder: str | Path, launch_config: Path | None = None) -> Path:
    """Run the three steps of a recipe into ``folder``: ``converted``, ``uptrained`` and ``report``.

    Args:
        folder: made when absent. A folder of an earlier call is continued.
        launch_config: accelerate config for uptraining on several processes.

    Returns:
        the path of the HTML report.

    Raises:
        UsageError: ``folder`` holds the steps of another recipe.
    """
    folder = expanded(folder)
    plan = plan_conversion(recipe.checkpoint, recipe.convert)  # refuses the impossible before the folder is claimed
    plan_budget(resolve_pretraining(recipe.uptrain, recipe.checkpoint, plan.source))
    # text of the later steps is checked now and not after hours of training
    refuse_absent_text(recipe)
    with only_run(folder):
        _claim(recipe, folder)
        return _run_steps(recipe, plan, folder, launch_config)


def _run_steps(recipe: Recipe, plan: Plan, folder: Path, launch_config: Path | None) -> Path:
    converted, uptrained, report = folder / "converted", folder / "uptrained", folder / "report"
    if not _done("convert", converted, "Conversion"):
        info(f"Converting {recipe.checkpoint} to {plan.groups} groups by {plan.method_name}.")
        run_plan(plan, converted)
    if not _done("uptrain", uptrained, "Uptraining"):
        info(f"Uptraining on {recipe.uptrain.data}.")
        if launch_config is None:
            uptrain_checkpoint(converted, uptrained, recipe.uptrain)
        else:
            launch(
                launch_config,
                # the command requires --data even if it is the default
                ["uptrain", str(converted), "-o", str(uptrained), *as_options(recipe.uptrain, always=("data",))],
            )
    if (report / "results.json").exists():
        info(f"Comparison: {report} exists, skipped.")
        print_report(read_results(report / "results.json"))
    else:
        info(f"Comparing on {recipe.eval.data}.")
        print_report(compare(recipe.checkpoint, [str(converted), str(uptrained)], out=report, settings=recipe.eval))
    return report / "report.html"


def refuse_absent_text(recipe: Recipe) -> None:
    """Raise if one of the recipe's texts is a local file that is missing. Ids of data sets are not looked up.

    Raises:
        UsageError, DataError: see :func:`headfold.corpus.open_corpus`.
    """
    uptrain = recipe.uptrain
    texts = [
        (recipe.convert.calibration, TRAIN, Columns(recipe.convert.text_column)),
        (recipe.eval.data, HELDOUT, recipe.eval.columns),
    ]
    texts += [(uptrain.eval_data, HELDOUT, uptrain.columns)]
    texts += [(name_of(spec), TRAIN, uptrain.columns) for spec in uptrain.corpora]
    for spec, split, columns in texts:
        # opening a data set of the hub would need the network
        if spec is not None and is_local(spec):
            open_corpus(spec, split, columns)


def _done(step: str, folder: Path, name: str) -> bool:
    """Tell whether a step is done: folders appear whole, and the recipe is known to be the same."""
    if last_entry(folder, step) is None:
        return False
    info(f"{name}: {folder} exists, skipped.")
    return True


def _claim(recipe: Recipe, folder: Path) -> None:
    """Write the resolved recipe into the folder, or check it against the one found there.

    Raises:
        UsageError: the folder holds something else, or the steps of another recipe.
    """
    work = WorkingFolder(folder, recipe.model_dump(mode="json"), _RECIPE)
    if folder.is_file():
        raise NotADirectoryError(ENOTDIR, os.strerror(ENOTDIR), str(folder))
    if work.is_foreign:
        raise UsageError(
            f"{folder} is not empty, and `headfold run` did not make it.", "Choose another folder with -o."
        )
    try:
        content = work.found()
        found = None if content is None else Recipe.restored(content)
    except (KeyError, TypeError, ValueError) as problem:
        raise UsageError(
            f"{folder / _RECIPE} is damaged.", "Choose another folder with -o, or remove this one."
        ) from problem
    if found is None:
        work.adopt()
        return
    other_comparison = found.eval != recipe.eval
    if other_comparison and not (folder / "report" / "results.json").exists():  # no report yet, so it may change
        found = found.model_copy(update={"eval": recipe.eval})
    if _comparable(found) != _comparable(recipe):
        raise UsageError(
            f"{folder} belongs to another recipe (see {folder / _RECIPE}).",
            "Choose another folder with -o, or remove this one to start again.",
        )
    if other_comparison:
        work.adopt()


def _comparable(recipe: Recipe) -> dict[str, Any]:
    """Drop the settings that do not change the result."""
    return recipe.model_dump(mode="json", exclude={"uptrain": set(FREE_ON_RESUME)})
