"""Keep the record of a checkpoint: ``headfold.json`` beside the weights says how they were made."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..local_paths import command_line, public, public_sentence

RECORD_NAME = "headfold.json"
METRICS_NAME = "headfold_metrics.jsonl"
_LOCAL = Path(".cache", "huggingface")
"""The hub's own folder for what is local: its uploads leave it out."""
_SNAPSHOT = re.compile(r"models--(?:([\w.-]+?)--)?([\w.-]+)[/\\]snapshots[/\\]")
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


def write_record(folder: Path, source: Path, entry: dict[str, Any], places: Mapping[str, Path] | None = None) -> None:
    """Write ``folder``'s record: the history of ``source`` and one more entry.

    The record is published with the checkpoint, so absolute paths in it are shortened to their last part.

    Args:
        places: digest of a source → its folder on this machine. They are kept apart, see :func:`known_places`.
    """
    history = read_record(source)["history"]
    known = {**known_places(source), **{digest: str(place.resolve()) for digest, place in (places or {}).items()}}
    if known:
        _write_places(folder, known)
    record = {"schema": _SCHEMA, "history": [*map(_published, history), _published({**entry, **_circumstances()})]}
    (folder / RECORD_NAME).write_bytes(_json_bytes(record))


def known_places(folder: Path) -> dict[str, str]:
    """Read where the sources of a checkpoint are on this machine, by their digest."""
    try:
        content = json.loads((folder / _LOCAL / RECORD_NAME).read_text(encoding="utf-8"))
        known = {str(digest): str(place) for digest, place in content["sources"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        known = {}
    # earlier versions named the folder in the record itself
    named = [one for one in read_record(folder)["history"] if one.get("source_folder") and one.get("source_digest")]
    return {**{str(one["source_digest"]): str(one["source_folder"]) for one in named}, **known}


def _write_places(folder: Path, known: dict[str, str]) -> None:
    """Write the places into a folder that neither git nor the hub's tools upload."""
    local = folder / _LOCAL
    local.mkdir(parents=True, exist_ok=True)
    (local / ".gitignore").write_text("*\n", encoding="utf-8")
    (local / RECORD_NAME).write_bytes(_json_bytes({"sources": known}))


def _published(entry: dict[str, Any]) -> dict[str, Any]:
    """Leave out of an entry what only this machine may know."""
    named = hub_id(str(entry.get("source_folder", "")))
    cleaned: dict[str, Any] = public({key: value for key, value in entry.items() if key != "source_folder"})
    if isinstance(entry.get("notes"), list):
        cleaned["notes"] = [public_sentence(str(note)) for note in entry["notes"]]
    return {**cleaned, "source": named} if named else cleaned


def named_source(folder: Path) -> dict[str, Any]:
    """Name a source for the record: by its hub id, or by the name of its folder, never by a path."""
    place = folder.resolve()
    named = hub_id(f"{place}/")
    return {"source": named or place.name, "source_hub_id": named}


def hub_id(place: str) -> str | None:
    """Read the id of a checkpoint from its folder in the hub's cache."""
    found = _SNAPSHOT.search(place)
    return found and "/".join(part for part in found.groups() if part)


def _json_bytes(content: Any) -> bytes:
    # what no encoding has becomes the escape that JSON has for it
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def last_entry(folder: Path, step: str) -> dict[str, Any] | None:
    """Find the newest entry of a ``step``: ``convert``, ``uptrain``, …"""
    return next((entry for entry in reversed(read_record(folder)["history"]) if entry.get("step") == step), None)


def _circumstances() -> dict[str, Any]:
    return {
        "command": command_line(),
        "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # headfold itself, when it runs from a checkout that is not installed
        return "unknown"
