"""Read and validate recipes. An error names an unknown key and the nearest known one."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from ..convert.settings import ConvertSettings
from ..errors import UsageError
from ..eval.settings import EvalSettings
from ..local_paths import expanded
from ..settings import Settings
from ..uptrain.settings import UptrainSettings

_SHIPPED = Path(__file__).parent


class Recipe(Settings):
    """The settings of the three steps: convert, uptrain, compare."""

    checkpoint: str = Field(description="source: a folder (relative to the recipe), or a hub id")
    convert: ConvertSettings
    uptrain: UptrainSettings
    eval: EvalSettings = EvalSettings()

    @model_validator(mode="after")
    def _calibrate_as_it_trains(self) -> Any:
        """Calibrate at the length that the model trains at, unless the recipe says otherwise."""
        convert, said = self.convert, "sequence_length" in self.convert.model_fields_set
        if convert.calibration is not None and not said:
            followed = convert.model_copy(update={"sequence_length": self.uptrain.sequence_length})
            object.__setattr__(self, "convert", followed)  # the model is frozen for everybody else
        return self


def load_recipe(path: str | Path) -> Recipe:
    """Read and validate a recipe.

    Args:
        path: a YAML file, or the name of a shipped recipe such as ``demo``.

    Returns:
        the recipe, ``checkpoint`` resolved against the recipe's folder where such a folder exists.

    Raises:
        UsageError: the file is missing or not YAML, a key is unknown, or a value does not fit.
    """
    file = _find(expanded(path))
    try:
        # safe_load, since a recipe may come from a stranger and must not run code
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as problem:  # ValueError: no UTF-8, or a number of 5,000 digits
        raise UsageError(f"{file} is not a readable YAML file: {problem}") from problem
    if not isinstance(content, dict):
        raise UsageError(
            f"{file} does not hold a recipe.", "A recipe has the keys checkpoint, convert, uptrain and eval."
        )
    try:
        recipe = Recipe.model_validate(content)
    except ValidationError as problem:
        raise UsageError(f"{file}: {_explain(problem)}", "See recipes/demo.yaml for a complete example.") from problem
    beside = file.parent / recipe.checkpoint
    return recipe.model_copy(update={"checkpoint": str(beside)}) if beside.is_dir() else recipe


def _find(path: Path) -> Path:
    if path.is_file():
        return path
    shipped = _SHIPPED / f"{path.name}.yaml"
    # only a bare name means a shipped recipe: a path with a typing error must not find one
    if path.parent == Path() and shipped.is_file():
        return shipped
    names = ", ".join(sorted(file.stem for file in _SHIPPED.glob("*.yaml")))
    raise UsageError(
        f"There is no recipe {path}.", f"Give the path of a YAML file, or one of the shipped recipes: {names}."
    )


def _explain(problem: ValidationError) -> str:
    """Say one fault in words: where it is, and for an unknown key the nearest known one."""
    # A misspelt key is also a missing one, so unknown keys come first.
    fault = min(problem.errors(), key=lambda fault: fault["type"] != "extra_forbidden")
    where = ".".join(str(part) for part in fault["loc"])
    if fault["type"] != "extra_forbidden":
        missing = fault["type"] == "missing"
        return f"{where} is missing." if missing else f"{where}: {fault['msg']} (found {fault['input']!r})."
    known = list(_section(fault["loc"][:-1]).model_fields)
    # below the default of 0.6, because keys are short
    near = difflib.get_close_matches(str(fault["loc"][-1]), known, n=1, cutoff=0.5)
    return f"unknown key {where}; " + (f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}.")


def _section(location: tuple[Any, ...]) -> type[BaseModel]:
    """Find the model class that a path of keys leads to."""
    section: type[BaseModel] = Recipe
    for part in location:
        annotation = section.model_fields[str(part)].annotation
        assert isinstance(annotation, type)
        section = annotation
    return section
