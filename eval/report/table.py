"""Build the rows of the report's tables: one list of cells for the terminal, Markdown and the HTML page."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ...console import counted, human_bytes
from ..results import AgainstSource, Comparison, ModelResult, RecoveredShare, ReportedEstimate, TaskResult
from .format import Cell, TableRow, change, count, gain, number, percent, signed, times, whole_percent, with_interval


def table_rows(results: Comparison) -> list[TableRow]:
    """List the measures, each with a cell per model, the source first. A measure that no model has is left out."""
    models = results.models
    rows = [
        *_quality_rows(results),
        *(_retrieval_row(models, row.length) for row in results.last.needle),
        *(_task_row(models, row) for row in results.last.tasks),
        _row("Heads", "query / KV", models, _heads),
        *_cache_rows(results),
        *_capacity_rows(models),
        *(_speed_row(models, *point) for point in _shown_points(results.last)),
        _row("Parameters", "weights", models, _parameters),
    ]
    # a measure that was not made has dashes only, and a row of dashes says nothing
    return [row for row in rows if any(cell.main != "–" for cell in row.cells)]


def _quality_rows(results: Comparison) -> list[TableRow]:
    models, writes = results.models, results.of_encoder_decoders
    per_target = "nats per target token"
    return [
        _row(
            "Perplexity",
            "per target token; lower is better" if writes else "lower is better",
            models,
            lambda model: with_interval(model.perplexity, number),
        ),
        *([_row("Target loss", per_target, models, _target_loss)] if writes else []),
        _paired(
            "Perplexity change", "paired with source", models, lambda pair: with_interval(pair.perplexity_ratio, change)
        ),
        _row("Bits per byte", "any tokenizer", models, lambda model: with_interval(model.bits_per_byte, number)),
        _paired(
            "KL to the source",
            per_target if writes else "nats per token",
            models,
            lambda pair: with_interval(pair.kl_nats, number),
        ),
        _paired("Same top token", "as the source", models, lambda pair: with_interval(pair.same_top_token, percent)),
        _paired(
            "Recovered",
            "of the log-perplexity lost",
            models,
            lambda pair: _recovered(pair.recovered),
        ),
    ]


def _recovered(found: RecoveredShare | None) -> Cell:
    if found is not None and found.missing is not None:
        return Cell("not defined", "(the loss is not certain)")
    return with_interval(found, whole_percent)


def _row(label: str, note: str, models: Sequence[ModelResult], cell: Callable[[ModelResult], Cell]) -> TableRow:
    return TableRow(label, note, [cell(model) for model in models])


def _paired(label: str, note: str, models: Sequence[ModelResult], cell: Callable[[AgainstSource], Cell]) -> TableRow:
    """Build a row of numbers against the source. The source itself has a dash."""
    pairs = [model.against_source for model in models]
    return TableRow(label, note, [Cell("–") if pair is None else cell(pair) for pair in pairs])


def _target_loss(model: ModelResult) -> Cell:
    """Show the logarithm of the perplexity, which is the loss that is trained."""
    ends = (model.perplexity.value, model.perplexity.low, model.perplexity.high)
    # the logarithm keeps the order, so the ends of the interval stay its ends
    value, low, high = (None if end is None else math.log(end) for end in ends)
    return with_interval(ReportedEstimate(value=value, low=low, high=high), number)


def _retrieval_row(models: Sequence[ModelResult], length: int) -> TableRow:
    def cell(model: ModelResult) -> Cell:
        found = next((row for row in model.needle if row.length == length), None)
        return Cell("–") if found is None else with_interval(found.gain_nats, signed)

    return _row(f"Retrieval in {length:,} tokens", "nats saved per token", models, cell)


def _task_row(models: Sequence[ModelResult], like: TaskResult) -> TableRow:
    better = "higher" if like.higher_is_better else "lower"
    return _row(
        f"{like.task}: {like.measure}",
        f"± standard error; {better} is better",
        models,
        lambda model: _task_cell(model, like.task, like.measure),
    )


def _task_cell(model: ModelResult, task: str, measure: str) -> Cell:
    # models that were merged in may have answered other tasks
    found = next((row for row in model.tasks if (row.task, row.measure) == (task, measure)), None)
    if found is None:
        return Cell("–")
    changes = [] if model.against_source is None else model.against_source.tasks
    pair = next((row for row in changes if (row.task, row.measure) == (task, measure)), None)
    error = "" if found.standard_error is None else f" ± {found.standard_error:.3f}"
    difference = Cell("") if pair is None else with_interval(pair.difference, signed)
    return Cell(f"{found.mean.value:.3f}{error}", f"{difference.main} {difference.detail}".strip())


def _heads(model: ModelResult) -> Cell:
    return Cell(f"{model.query_heads or '?'} / {', '.join(map(str, model.kv_heads))}")


def _cache_rows(results: Comparison) -> list[TableRow]:
    models, note = results.models, f"measured on the cache, {results.protocol.dtype}"
    if not results.of_encoder_decoders:
        return [_row("KV cache per token", note, models, _cache)]
    return [
        _row("Self-attention cache per written token", note, models, _cache),
        _row("Cross-attention cache per read token", "measured on the cache", models, _cross_cache),
    ]


def _cache(model: ModelResult) -> Cell:
    detail = "" if model.against_source is None else _smaller(model.against_source.cache_ratio)
    measured, formula = model.cache_bytes_per_token, model.cache_formula_bytes
    # they differ for sliding windows, latent caches and remote code: then the reader must see both
    if formula is not None and formula != measured:
        detail = f"{detail} (by formula {human_bytes(formula)})".strip()
    return Cell(human_bytes(measured), detail)


def _cross_cache(model: ModelResult) -> Cell:
    if model.cross_cache_bytes_per_token is None:
        return Cell("–")
    detail = "" if model.against_source is None else _smaller(model.against_source.cross_cache_ratio)
    return Cell(human_bytes(model.cross_cache_bytes_per_token), detail)


def _smaller(ratio: float | None) -> str:
    return "" if ratio in (None, 1) else f"{times(ratio)} smaller"


def _capacity_rows(models: Sequence[ModelResult]) -> list[TableRow]:
    """Show what fits into memory. Models that were merged in may have been measured for another size of memory."""
    first = next((model.capacity for model in models if model.capacity), None)
    if first is None:
        return []

    def cell(model: ModelResult) -> Cell:
        fits = model.capacity
        if fits is None or fits.memory_bytes != first.memory_bytes:
            return Cell("–")
        tokens = "no limit" if fits.tokens is None else f"{count(fits.tokens)} tokens"
        longest = fits.batches[-1]
        return Cell(tokens, f"{counted(longest.batch, 'sequence')} of {longest.context:,}")

    # GB and not GiB, as devices are sold
    label = f"Fits into {first.memory_bytes / 1e9:,.3g} GB"
    return [_row(label, "of cache beside the weights, as stored", models, cell)]


def _shown_points(model: ModelResult) -> list[tuple[int, int]]:
    """Choose the largest context with each batch. The page shows the rest."""
    # the cache matters most with the longest context
    longest = max((row.context for row in model.decode), default=0)
    return [(row.context, row.batch) for row in model.decode if row.context == longest]


def _speed_row(models: Sequence[ModelResult], context: int, batch: int) -> TableRow:
    return _row(
        f"Decoding, batch {batch}",
        f"tokens/s after {context:,}",
        models,
        lambda model: speed_cell(model, context, batch),
    )


def speed_cell(model: ModelResult, context: int, batch: int) -> Cell:
    """Show decoded tokens per second, and below their ratio to the source's."""
    found = next((row for row in model.decode if (row.context, row.batch) == (context, batch)), None)
    if found is None:
        return Cell("–")
    speed = found.tokens_per_second
    ratios = [] if model.against_source is None else model.against_source.speedup
    # a source from a cache was not timed
    pair = next((row for row in ratios if (row.context, row.batch) == (context, batch)), None)
    if pair is None:
        return Cell(number(speed.median), f"{number(speed.min)} to {number(speed.max)}")
    return Cell(number(speed.median), gain(pair.decode).line)


def decode_grid(results: Comparison) -> list[tuple[str, str, list[list[str]]]]:
    """List every context and batch of decoding, with the lines of each model's cell, speed first."""
    models = results.models
    points = sorted({(row.context, row.batch) for model in models for row in model.decode})
    return [
        (f"{context:,} tokens", f"batch {batch:,}", [_grid_cell(model, context, batch) for model in models])
        for context, batch in points
    ]


def _grid_cell(model: ModelResult, context: int, batch: int) -> list[str]:
    found = next((row for row in model.decode if (row.context, row.batch) == (context, batch)), None)
    if found is None:
        return ["–"]
    speed = speed_cell(model, context, batch)
    wait = f"first token {1000 * found.first_token_seconds.median:,.0f} ms"
    return [f"{speed.main} tokens/s", speed.detail, wait, f"peak {human_bytes(found.peak_bytes)}"]


def _parameters(model: ModelResult) -> Cell:
    return Cell(count(model.parameters), human_bytes(model.weight_bytes))
