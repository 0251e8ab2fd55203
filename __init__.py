"""headfold: turn a pretrained multi-head-attention checkpoint into a grouped-query one, and show what it cost."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

try:
    __version__ = version("headfold")
except PackageNotFoundError:  # run from a checkout that was never installed
    __version__ = "0+unknown"

# The public Python API; imported on first use, so that `import headfold` and `headfold --help` need no torch.
_API = {
    "Checkpoint": ".checkpoint.source",
    "convert_checkpoint": ".convert.run",
    "convert_calibrated": ".convert.calibrated",
    "inspect_checkpoint": ".convert.inspect",
    "plan_conversion": ".convert.run",
    "uptrain_checkpoint": ".uptrain.loop",
    "UptrainSettings": ".uptrain.settings",
    "compare": ".eval.compare",
    "EvalSettings": ".eval.settings",
    "load_recipe": ".recipes.schema",
    "run_recipe": ".recipes.run",
    "HeadfoldError": ".errors",
}
__all__ = ["__version__", *_API]


def __getattr__(name: str) -> Any:
    if name not in _API:
        raise AttributeError(f"module 'headfold' has no attribute {name!r}")
    return getattr(import_module(_API[name], __name__), name)
