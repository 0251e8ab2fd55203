"""Check that a checkpoint's config agrees with its files, and warn where readers understand it differently."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..checkpoint.record import last_entry
from ..checkpoint.source import Checkpoint
from ..errors import CheckpointError, UnsupportedError
from .family.family import head_counts
from .family.model_type import ModelType
from .family.verify import verify

_ABSENT = "absent"


@dataclass(frozen=True)
class Check:
    """The facts about a sound checkpoint.

    Attributes:
        rows: (name, value) for a table.
        warnings: what is allowed but may surprise, one sentence each.
    """

    rows: tuple[tuple[str, str], ...]
    warnings: tuple[str, ...]


def check_checkpoint(source: str | Path, *, revision: str | None = None) -> Check:
    """Compare config.json, the headers of all weight files and the model class, without reading a weight.

    Raises:
        CheckpointError: tensors are missing, unused, or have another shape than config.json asks for.
        UnsupportedError: transformers has no class for it.
    """
    checkpoint = Checkpoint.open(source, revision=revision)
    unused = verify(checkpoint.folder)
    record = last_entry(checkpoint.folder, "convert") or {}
    unexpected = [name for name in unused.reported if name not in record.get("tensors_unused", ())]
    if unexpected:
        raise CheckpointError(
            f"{len(unexpected)} tensors are in the files, but the class does not use them, {unexpected[0]} for one.",
            "They belong to another model or to code that is not part of transformers.",
        )
    model_type = ModelType(checkpoint.config)
    seen = rope_bases(model_type)
    rows = (
        ("tensors that agree with the class", str(len(checkpoint.tensors) - len(unused.names))),
        ("tensors it does not use, as in the source", str(len(unused.reported))),
        ("tensors it ignores on loading, such as multi-token prediction", str(len(unused.ignored))),
        *_heads(model_type),
        ("RoPE base read by v4 (rope_theta)", seen["v4"]),
        ("RoPE base read by v5 (rope_parameters)", seen["v5"]),
        ("RoPE base in transformers here", seen["here"]),
    )
    return Check(rows, tuple(checkpoint.notes) + tuple(_rope_warnings(seen)))


def rope_bases(model_type: ModelType) -> dict[str, str]:
    """Find the rotary base that three kinds of readers see: ``v4`` looks for rope_theta, ``v5`` for rope_parameters.

    transformers itself (``here``) understands both; other runtimes often know one, and then take their default.
    """
    text = model_type.config.get("text_config")
    place = text if isinstance(text, dict) else model_type.config
    return {
        "v4": _shown(place.get("rope_theta")),
        "v5": _shown(_theta(place.get("rope_parameters"))),
        "here": _shown(_theta(getattr(model_type.text, "rope_parameters", None))),
    }


def _theta(parameters: object) -> object:
    """Take rope_theta from rope_parameters, or from each kind of layer where it is nested."""
    if not isinstance(parameters, dict):
        return None
    nested = {kind: inner["rope_theta"] for kind, inner in parameters.items() if _has_theta(inner)}
    return parameters.get("rope_theta", nested or None)


def _has_theta(inner: object) -> bool:
    return isinstance(inner, dict) and "rope_theta" in inner


def _shown(value: object) -> str:
    if value is None:
        return _ABSENT
    if isinstance(value, dict):
        return ", ".join(f"{kind} {_shown(base)}" for kind, base in value.items())
    return f"{value:,.10g}" if isinstance(value, (int, float)) else str(value)


def _heads(model_type: ModelType) -> tuple[tuple[str, str], ...]:
    """Show the heads in config.json. The check of shapes has shown that the rows of k and v agree with them."""
    try:
        counts = head_counts(model_type)
    except UnsupportedError:  # a type without such a setting can be sound all the same
        return ()
    return (("query heads / KV heads", f"{counts.query_heads} / {counts.kv_heads}"),)


def _rope_warnings(seen: dict[str, str]) -> list[str]:
    if seen["here"] == _ABSENT:
        return []
    found = []
    if _ABSENT not in (seen["v4"], seen["v5"]) and seen["v4"] != seen["v5"]:
        found.append(f"rope_theta says {seen['v4']}, rope_parameters says {seen['v5']}: readers will disagree")
    if seen["v4"] == _ABSENT and seen["here"] not in ("10,000", _ABSENT):
        found.append("readers that only know rope_theta will take their default, usually 10,000")
    if seen["v5"] == _ABSENT and seen["here"] not in ("10,000", _ABSENT):
        found.append("readers that only know rope_parameters will take their default, usually 10,000")
    return found
