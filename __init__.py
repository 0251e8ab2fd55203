"""headfold: turn a multi-head-attention checkpoint into a grouped-query one, and show the quality it costs.

The public Python API is what ``__all__`` lists. docs/python.md shows it at work.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

try:
    __version__ = version("headfold")
except PackageNotFoundError:  # run from a checkout that was never installed
    __version__ = "0+unknown"

# Type checkers and editors read these imports. At run time a name is imported when it is first used, so that
# `import headfold` and `headfold --help` need no torch.
if TYPE_CHECKING:
    from .checkpoint.source import Checkpoint
    from .convert.check import check_checkpoint
    from .convert.inspect import inspect_checkpoint
    from .convert.run import convert_checkpoint, plan_conversion
    from .convert.settings import ConvertSettings
    from .errors import HeadfoldError
    from .eval.compare import compare
    from .eval.results import Comparison, read_results
    from .eval.settings import EvalSettings
    from .recipes.run import run_recipe
    from .recipes.schema import Recipe, load_recipe
    from .recipes.settings import SweepSettings
    from .recipes.sweep import sweep
    from .uptrain.run import uptrain_checkpoint
    from .uptrain.settings import UptrainSettings

_MODULES = {
    "Checkpoint": ".checkpoint.source",
    "Comparison": ".eval.results",
    "ConvertSettings": ".convert.settings",
    "EvalSettings": ".eval.settings",
    "HeadfoldError": ".errors",
    "Recipe": ".recipes.schema",
    "SweepSettings": ".recipes.settings",
    "UptrainSettings": ".uptrain.settings",
    "check_checkpoint": ".convert.check",
    "compare": ".eval.compare",
    "convert_checkpoint": ".convert.run",
    "inspect_checkpoint": ".convert.inspect",
    "load_recipe": ".recipes.schema",
    "plan_conversion": ".convert.run",
    "read_results": ".eval.results",
    "run_recipe": ".recipes.run",
    "sweep": ".recipes.sweep",
    "uptrain_checkpoint": ".uptrain.run",
}

__all__ = [
    "Checkpoint",
    "Comparison",
    "ConvertSettings",
    "EvalSettings",
    "HeadfoldError",
    "Recipe",
    "SweepSettings",
    "UptrainSettings",
    "__version__",
    "check_checkpoint",
    "compare",
    "convert_checkpoint",
    "inspect_checkpoint",
    "load_recipe",
    "plan_conversion",
    "read_results",
    "run_recipe",
    "sweep",
    "uptrain_checkpoint",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'headfold' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
