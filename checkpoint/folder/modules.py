"""Find the modules of an embedding model: folders of their own beside the weights, which belong to the model.

https://sbert.net/docs/sentence_transformer/usage/custom_models.html
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def module_folders(folder: Path) -> set[Path]:
    """List the folders that modules.json names and that are there, relative to ``folder``."""
    return {Path(path) for path in module_paths(folder) if (folder / path).is_dir()}


def module_paths(folder: Path) -> list[str]:
    """List the paths that modules.json names, without the module at the top. Empty where there is no such file."""
    try:
        modules: Any = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    named = [one.get("path") for one in modules if isinstance(one, dict)] if isinstance(modules, list) else []
    # a file that is not trusted must not lead out of the folder
    return [path.rstrip("/") for path in named if isinstance(path, str) and _is_below(path)]


def _is_below(path: str) -> bool:
    parts = Path(path).parts
    return bool(parts) and not Path(path).is_absolute() and ".." not in parts
