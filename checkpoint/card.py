"""Write the model card of a result: README.md, in the form that the Hugging Face hub reads."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import HeadfoldError
from .modelling import OWN_TYPES
from .record import RECORD_NAME, hub_id, read_record

CARD_NAME = "README.md"
SOURCE_CARD_NAME = "README.source.md"
_KEPT = ("license", "license_name", "license_link", "language", "pipeline_tag", "datasets")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def write_card(folder: Path, results: Sequence[Sequence[str]] | None = None) -> None:
    """Write ``folder``'s README.md from its record, and from an evaluation where there is one.

    The card that came with the source is kept beside it as README.source.md, and its licence and language are carried
    over.

    Args:
        folder: holds headfold.json, and the source's README.md where that had one.
        results: rows of the evaluation's table, the first of them the header.

    Raises:
        HeadfoldError: the folder has no record of headfold.
    """
    from huggingface_hub import ModelCard, ModelCardData

    history = read_record(folder)["history"]
    if not history:
        raise HeadfoldError(f"{folder} has no {RECORD_NAME}, and the model card is written from it.")
    inherited = _inherited(folder)
    tags = [tag for tag in inherited.get("tags") or [] if isinstance(tag, str) and tag not in _TAGS]
    base = _base_model(history) or inherited.get("base_model")
    metadata: dict[str, Any] = {key: inherited[key] for key in _KEPT if inherited.get(key)}
    metadata.update(library_name="transformers", tags=[*_TAGS, *tags], base_model=base)
    data = ModelCardData(**metadata)
    text = _text(history, base, results, (folder / SOURCE_CARD_NAME).exists())
    # a name that is not UTF-8 is written with escapes
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}").save(folder / CARD_NAME)


_TAGS = ("headfold", "grouped-query-attention")


def _inherited(folder: Path) -> dict[str, Any]:
    """Read the metadata of the card that is there. Rename the card first if headfold did not write it."""
    card, source_card = folder / CARD_NAME, folder / SOURCE_CARD_NAME
    if not card.exists():
        return {}
    metadata = _metadata(card)
    if "headfold" not in (metadata.get("tags") or []) and not source_card.exists():
        card.rename(source_card)
    return metadata


def _metadata(card: Path) -> dict[str, Any]:
    from huggingface_hub import ModelCard

    try:
        return dict(ModelCard.load(card, ignore_metadata_errors=True).data.to_dict())
    except Exception:  # a card may hold anything; a result must not fail because of it
        return {}


def _base_model(history: list[dict[str, Any]]) -> str | None:
    """Find the hub id of the first source, also if it was given as a folder of the hub's cache."""
    first = history[0]
    named = first.get("source_hub_id") or hub_id(str(first.get("source_folder", "")))
    if named or "source_hub_id" in first:
        return named
    # an earlier version does not say; a relative path such as models/llama looks like a hub id
    spec = str(first.get("source", ""))
    return spec if _HUB_ID.fullmatch(spec) and not Path(spec).exists() else None


def _text(
    history: list[dict[str, Any]], base: str | None, results: Sequence[Sequence[str]] | None, has_source_card: bool
) -> str:
    converted: dict[str, Any] = next((entry for entry in reversed(history) if entry.get("step") == "convert"), {})
    source = f"[{base}](https://huggingface.co/{base})" if base else "its source checkpoint"
    lines = [
        f"# {converted.get('model_type', 'Model')}, KV heads: {converted.get('kv_heads', 'as in its source')}",
        "",
        f"Made from {source} by headfold: KV heads that several query heads share "
        "([Ainslie et al. 2023](https://arxiv.org/abs/2305.13245)), so that the KV cache is smaller. "
        + _how_it_loads(str(converted.get("model_type"))),
        "",
        *_rewritten(history),
        "## How it was made",
        "",
        *(line for entry in history for line in _step(entry)),
        f"`{RECORD_NAME}` beside the weights has all settings, versions and hashes.",
    ]
    if results:
        lines += ["", "## Evaluation", "", *_table(results)]
    if has_source_card:
        lines += ["", f"The card of the source is kept in [{SOURCE_CARD_NAME}]({SOURCE_CARD_NAME})."]
    return "\n".join(lines) + "\n"


def _how_it_loads(model_type: str) -> str:
    own = OWN_TYPES.get(model_type)
    if own is None:
        return "It loads like any checkpoint of its type; nothing else needs to be installed."
    return (
        "Its model class is in a file beside the weights, which `auto_map` in config.json names. Load it with "
        f"`{own.auto_class}.from_pretrained(…, trust_remote_code=True)`; nothing else needs to be installed."
    )


def _rewritten(history: list[dict[str, Any]]) -> list[str]:
    """Say that the source was of another type, and where the result runs."""
    found = next((entry["rewrite"] for entry in reversed(history) if entry.get("rewrite")), None)
    if found is None:
        return []
    return [
        f"The class of its source, `{found['from']}`, cannot hold fewer KV heads than query heads, so it is written as "
        f"`{found['to']}` (`{found['class']}`), which computes the same. {found['runs']} {found['fails']}",
        "",
    ]


_SHOWN = (
    ("method", "method"),
    ("grouping", "grouping"),
    ("kv_heads_before", "KV heads before"),
    ("kv_heads", "KV heads"),
    ("kv_bytes_per_token_before", "KV bytes per token before"),
    ("kv_bytes_per_token", "KV bytes per token"),
    ("tokens", "tokens"),
)


def _step(entry: dict[str, Any]) -> list[str]:
    """Describe one entry of the record."""
    rows = [[title, _number(entry[key])] for key, title in _SHOWN if entry.get(key) is not None]
    lines = [f"### {str(entry.get('step', 'step')).capitalize()}", "", "```", str(entry.get("command", "")), "```", ""]
    lines += [*_table([["", ""], *rows]), ""] if rows else []
    notes = entry.get("notes")
    return lines + ([*(f"- {note}" for note in notes), ""] if isinstance(notes, list) and notes else [])


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    header, *body = ([cell.replace("|", "\\|") for cell in row] for row in rows)
    rule = ["---", *["--:"] * (len(header) - 1)]
    return [f"| {' | '.join(row)} |" for row in (header, rule, *body)]
