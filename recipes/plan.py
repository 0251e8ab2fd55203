"""Show the plans of conversion and comparison in `headfold run --dry-run`."""

from __future__ import annotations

from ..console import counted, info
from ..convert.inspect import inspect_checkpoint
from ..convert.refinement.fit import RefineSettings
from ..convert.run import plan_conversion
from ..errors import CheckpointError, HeadfoldError, UsageError
from .schema import Recipe


def conversion_rows(recipe: Recipe) -> list[tuple[str, str, str]]:
    """List (what, source, result) of the conversion: its very plan if weights are at hand, else what config.json says.

    Raises:
        HeadfoldError: the checkpoint is at hand and cannot be converted as the recipe says.
    """
    try:
        rows = plan_conversion(recipe.checkpoint, recipe.convert).describe()
    except (CheckpointError, UsageError) as problem:  # no weights here, or no checkpoint at all
        rows = _rows_of_config(recipe, problem)
    return [*rows, *_text_rows(recipe)]


def _rows_of_config(recipe: Recipe, problem: HeadfoldError) -> list[tuple[str, str, str]]:
    wanted = recipe.convert
    try:
        found = inspect_checkpoint(recipe.checkpoint)
    except HeadfoldError:
        # a recipe can be looked at before its checkpoint is downloaded
        info(f"{recipe.checkpoint} is not at hand, so its tensors are not listed: {problem.message}")
        return [("KV heads", "", str(wanted.groups)), ("method", "", wanted.resolved_method)]
    sizes = {row.groups: row.bytes_per_token for row in found.cache}
    # the first refusal says why this number of groups is impossible
    if wanted.groups not in sizes:
        raise problem
    return [
        ("model type", found.model_type, ""),
        (f"KV heads of {counted(found.query_heads, 'query head')}", str(found.kv_heads), str(wanted.groups)),
        ("KV cache per token, bytes", f"{sizes[max(sizes)]:,}", f"{sizes[wanted.groups]:,}"),
        ("method", "", wanted.resolved_method),
    ]


def _text_rows(recipe: Recipe) -> list[tuple[str, str, str]]:
    wanted = recipe.convert
    if wanted.calibration is None:
        return [("calibration text", "", "none")]
    text = f"{wanted.calibration_tokens:,} tokens of {wanted.calibration}, {wanted.sequence_length} at once"
    steps = str(wanted.refine or RefineSettings.steps) if wanted.may_be_refined else "none"
    return [("calibration text", "", text), ("refinement steps per layer", "", steps)]


def evaluation_rows(recipe: Recipe) -> list[list[str]]:
    """Rows (what, value) of the comparison."""
    wanted = recipe.eval
    window = "512, or the model's own limit" if wanted.window is None else str(wanted.window)
    tasks = ", ".join(wanted.tasks) or "none"
    return [
        ["models", "source, converted, uptrained"],
        ["text", f"{'all' if wanted.tokens is None else f'{wanted.tokens:,}'} tokens of {wanted.data}"],
        ["window", window],
        ["decoding timings of each point", str(wanted.repeats)],
        ["retrieval passages per length", str(wanted.needles)],
        ["tasks of lm-eval", tasks],
    ]
