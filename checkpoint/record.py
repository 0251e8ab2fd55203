"""Keep the record of a checkpoint: ``headfold.json`` beside the weights says how they were made."""

from __future__ import annotations

import json
import platform
import shlex
import sys
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RECORD_NAME = "headfold.json"
METRICS_NAME = "headfold_metrics.jsonl"
_SCHEMA = 1
_PACKAGES = ("headfold", "torch", "transformers", "accelerate", "safetensors", "tokenizers")


def read_record(folder: Path) -> dict[str, Any]:
    """Read the record of a checkpoint folder. Its history is empty if none can be read."""
    try:
        record = json.loads((folder / RECORD_NAME).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError, UnicodeDecodeError):
        return {"schema": _SCHEMA, "history": []}
    if not isinstance(record, dict) or not isinstance(record.get("history"), list):
        return {"schema": _SCHEMA, "history": []}
    return {**record, "history": [entry for entry in record["history"] if isinstance(entry, dict)]}


def write_record(folder: Path, source: Path, entry: dict[str, Any]) -> None:
    """Write ``folder``'s record: the history of ``source`` and one more entry."""
    history = read_record(source)["history"]
    record = {"schema": _SCHEMA, "history": [*history, {**entry, **_circumstances()}]}
    (folder / RECORD_NAME).write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def last_entry(folder: Path, step: str) -> dict[str, Any] | None:
    """Find the newest entry of a ``step``: ``convert``, ``uptrain``, …"""
    return next((entry for entry in reversed(read_record(folder)["history"]) if entry.get("step") == step), None)


def _circumstances() -> dict[str, Any]:
    return {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # headfold itself, when it runs from a checkout that is not installed
        return "unknown"
