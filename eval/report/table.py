"""The rows of the report's tables: one list of cells for the terminal, Markdown and the HTML page."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ...console import human_bytes
from . import format as wording
from .figure import count
from .format import (
    Cell,
    TableRow,
    change,
    interval_or_dash,
    number,
    percent,
    signed,
    times,
    whole_percent,
    with_interval,
)

Result = dict[str, Any]


def table_rows(results: Result) -> list[TableRow]:
    """The table: measures down, models across, the source first."""
    models = results["models"]
    writes = wording.of_targets(results)
    found = [
        _row(
            "Perplexity",
            "per target token; lower is better" if writes else "lower is better",
            models,
            lambda model: with_interval(model["perplexity"], number),
        ),
        *([_row("Target loss", "nats per target token", models, _target_loss)] if writes else []),
        _paired(
            "Perplexity change",
            "paired with source",
            models,
            lambda pair: interval_or_dash(pair["perplexity_ratio"], change),
        ),
        _row("Bits per byte", "any tokenizer", models, lambda model: with_interval(model["bits_per_byte"], number)),
        _paired(
            "KL to the source",
            "nats per target token" if writes else "nats per token",
            models,
            lambda pair: interval_or_dash(pair["kl_nats"], number),
        ),
        _paired(
            "Same top token", "as the source", models, lambda pair: interval_or_dash(pair["same_top_token"], percent)
        ),
        _paired(
            "Recovered",
            "of the log-perplexity lost",
            models,
            lambda pair: interval_or_dash(pair["recovered"], whole_percent),
        ),
        *(_needle_row(models, row["length"]) for row in models[-1]["needle"]),
        *(_task_row(models, row) for row in models[-1]["tasks"]),
        _row("Heads", "query / KV", models, lambda model: Cell(_heads(model))),
        _row(
            "Self-attention cache per written token" if writes else "KV cache per token",
            f"read off the cache, {results['protocol']['dtype']}",
            models,
            _cache,
        ),
        *([_row("Cross-attention cache per read token", "read off the cache", models, _cross_cache)] if writes else []),
        *_capacity_rows(models),
        *(_speed_row(models, *point) for point in _shown_points(models)),
        _row(
            "Parameters",
            "weights",
            models,
            _parameters,
        ),
    ]
    return [row for row in found if any(cell.main != "–" for cell in row.cells)]


def _row(label: str, note: str, models: Sequence[Result], cell: Callable[[Result], Cell]) -> TableRow:
    return TableRow(label, note, [cell(model) for model in models])


def _paired(label: str, note: str, models: Sequence[Result], cell: Callable[[Result], Cell]) -> TableRow:
    return TableRow(label, note, [Cell("–"), *(cell(model["against_source"]) for model in models[1:])])


def _needle_row(models: Sequence[Result], length: int) -> TableRow:
    def cell(model: Result) -> Cell:
        found = _only(model["needle"], length=length)
        return Cell("–") if found is None else with_interval(found["gain_nats"], signed)

    return _row(f"Retrieval in {length:,} tokens", "nats saved per token", models, cell)


def _task_row(models: Sequence[Result], like: Result) -> TableRow:
    key = {"task": like["task"], "measure": like["measure"]}

    def cell(model: Result) -> Cell:
        found = _only(model["tasks"], **key)
        if found is None:
            return Cell("–")
        error = "" if found["standard_error"] is None else f" ± {found['standard_error']:.3f}"
        pair = _only(model.get("against_source", {}).get("tasks", []), **key)
        change_cell = interval_or_dash(pair["difference"], signed) if pair else Cell("")
        return Cell(f"{found['mean']['value']:.3f}{error}", f"{change_cell.main} {change_cell.detail}".strip())

    better = "higher" if like["higher_is_better"] else "lower"
    return _row(f"{like['task']}: {like['measure']}", f"± standard error; {better} is better", models, cell)


def _only(rows: Sequence[Result], **key: Any) -> Result | None:
    return next((row for row in rows if all(row[name] == value for name, value in key.items())), None)


def _capacity_rows(models: Sequence[Result]) -> list[TableRow]:
    """What fits into the memory that was asked about; each model may have been asked about another one."""
    asked = next((model["capacity"] for model in models if model["capacity"]), None)
    if asked is None:
        return []

    def cell(model: Result) -> Cell:
        fits = model["capacity"]
        if fits is None or fits["memory_bytes"] != asked["memory_bytes"]:
            return Cell("–")
        tokens = "no limit" if fits["tokens"] is None else f"{count(fits['tokens'])} tokens"
        longest = fits["batches"][-1]
        return Cell(tokens, f"{longest['batch']:,} sequences of {longest['context']:,}")

    return [
        _row(f"Fits into {asked['memory_bytes'] / 1e9:,.3g} GB", "of cache beside the weights, as stored", models, cell)
    ]


def _heads(model: Result) -> str:
    return f"{model['query_heads'] or '?'} / {', '.join(map(str, model['kv_heads']))}"


def _cache(model: Result) -> Cell:
    pair = model.get("against_source")
    detail = f"{times(pair['cache_ratio'])} smaller" if pair and pair["cache_ratio"] != 1 else ""
    measured, formula = model["cache_bytes_per_token"], model["cache_formula_bytes"]
    if formula is not None and formula != measured:
        detail = f"{detail} (by formula {human_bytes(formula)})".strip()
    return Cell(human_bytes(measured), detail)


def _cross_cache(model: Result) -> Cell:
    pair = model.get("against_source")
    ratio = None if pair is None else pair["cross_cache_ratio"]
    return Cell(
        human_bytes(model["cross_cache_bytes_per_token"]), f"{times(ratio)} smaller" if ratio not in (None, 1) else ""
    )


def _target_loss(model: Result) -> Cell:
    """The logarithm of the perplexity, which is what is trained."""
    nats = {end: None if found is None else math.log(found) for end, found in model["perplexity"].items()}
    return with_interval(nats, number)


def _shown_points(models: Sequence[Result]) -> list[tuple[int, int]]:
    """Of the grid of the last model, the largest context with each batch; the page has the rest."""
    rows = models[-1]["decode"]
    longest = max((row["context"] for row in rows), default=0)
    return [(row["context"], row["batch"]) for row in rows if row["context"] == longest]


def _speed_row(models: Sequence[Result], context: int, batch: int) -> TableRow:
    return _row(
        f"Decoding, batch {batch}",
        f"tokens/s after {context:,}",
        models,
        lambda model: speed_cell(model, context, batch),
    )


def speed_cell(model: Result, context: int, batch: int) -> Cell:
    """Decoded tokens per second, and how many times the source's speed that is."""
    found = _only(model["decode"], context=context, batch=batch)
    if found is None:
        return Cell("–")
    speed = found["tokens_per_second"]
    pair = _only(model.get("against_source", {}).get("speedup", []), context=context, batch=batch)
    if pair is None:
        return Cell(number(speed["median"]), f"{number(speed['min'])} to {number(speed['max'])}")
    gain = pair["decode"]
    return Cell(number(speed["median"]), f"{times(gain['median'])} ({gain['min']:.2f} to {gain['max']:.2f})")


def grid(results: Result) -> list[tuple[str, str, list[list[str]]]]:
    """The whole grid of decoding: context, batch, and for each model the lines of its cell, speed first."""
    models = results["models"]
    points = sorted({(row["context"], row["batch"]) for model in models for row in model["decode"]})
    return [
        (f"{context:,} tokens", f"batch {batch:,}", [_grid_cell(model, context, batch) for model in models])
        for context, batch in points
    ]


def _grid_cell(model: Result, context: int, batch: int) -> list[str]:
    found = _only(model["decode"], context=context, batch=batch)
    if found is None:
        return ["–"]
    speed, first = speed_cell(model, context, batch), found["first_token_seconds"]
    wait = f"first token {1000 * first['median']:,.0f} ms"
    return [f"{speed.main} tokens/s", speed.detail, wait, f"peak {human_bytes(found['peak_bytes'])}"]


def _parameters(model: Result) -> Cell:
    return Cell(count(model["parameters"]), human_bytes(model["weight_bytes"]))
