"""The numbers of results.json in words: the same cells for the terminal, Markdown and the HTML page."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..console import human_bytes

Result = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """A number, and below it its interval or what it is relative to."""

    main: str
    detail: str = ""


@dataclass(frozen=True)
class Row:
    """One measure, with a cell per model."""

    label: str
    note: str
    cells: list[Cell]


def number(value: float | None) -> str:
    """Four significant digits below a thousand: 28.71, 244.3, 12,345; a dash for what is no number."""
    if value is None or not math.isfinite(value):
        return "–"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    digits = 3 - (math.floor(math.log10(abs(value))) if value else 0)
    return f"{value:.{min(max(digits, 1), 4)}f}"


def percent(share: float | None, digits: int = 1) -> str:
    return "–" if share is None else f"{100 * share:.{digits}f} %"


def change(ratio: float | None) -> str:
    """1.031 → '+3.1 %'."""
    return "–" if ratio is None else f"{100 * (ratio - 1):+,.1f} %".replace("-", "−")


def times(ratio: float) -> str:
    """2.0 → '2.00×'."""
    return f"{ratio:.2f}×"


def with_interval(estimate: Result, show: Callable[[float | None], str]) -> Cell:
    if estimate["low"] is None or estimate["high"] is None:
        return Cell(show(estimate["value"]))
    low, high = show(estimate["low"]), show(estimate["high"])
    if high.endswith(" %"):
        low = low.removesuffix(" %")  # one unit for both ends: [2.8, 3.4 %]
    return Cell(show(estimate["value"]), f"[{low}, {high}]")


def rows(results: Result) -> list[Row]:
    """The table: measures down, models across, the source first."""
    models = results["models"]
    found = [
        _row("Perplexity", "lower is better", models, lambda model: with_interval(model["perplexity"], number)),
        _paired(
            "Perplexity change",
            "paired with source",
            models,
            lambda pair: with_interval(pair["perplexity_ratio"], change),
        ),
        _row("Bits per byte", "any tokenizer", models, lambda model: with_interval(model["bits_per_byte"], number)),
        _paired("KL to the source", "nats per token", models, lambda pair: with_interval(pair["kl_nats"], number)),
        _paired("Same top token", "as the source", models, lambda pair: with_interval(pair["same_top_token"], percent)),
        _paired("Recovered", "of the log-perplexity lost", models, _recovered),
        _row("Heads", "query / KV", models, lambda model: Cell(_heads(model))),
        _row("KV cache per token", f"read off the cache, {results['protocol']['dtype']}", models, _cache),
        *(_speed_row(models, place) for place in range(len(models[0]["decode"]))),
        _row(
            "Parameters",
            "weights",
            models,
            lambda model: Cell(_count(model["parameters"]), human_bytes(model["weight_bytes"])),
        ),
    ]
    return [row for row in found if any(cell.main != "–" for cell in row.cells)]


def _row(label: str, note: str, models: Sequence[Result], cell: Callable[[Result], Cell]) -> Row:
    return Row(label, note, [cell(model) for model in models])


def _paired(label: str, note: str, models: Sequence[Result], cell: Callable[[Result], Cell]) -> Row:
    return Row(label, note, [Cell("–"), *(cell(model["against_source"]) for model in models[1:])])


def _recovered(pair: Result) -> Cell:
    return with_interval(pair["recovered"], lambda share: percent(share, 0)) if pair["recovered"] else Cell("–")


def _heads(model: Result) -> str:
    return f"{model['query_heads'] or '?'} / {', '.join(map(str, model['kv_heads']))}"


def _count(parameters: int) -> str:
    """4,200,000 → '4.20 M'."""
    for limit, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if parameters >= limit:
            return f"{parameters / limit:.2f} {unit}"
    return str(parameters)


def _cache(model: Result) -> Cell:
    pair = model.get("against_source")
    detail = f"{times(pair['cache_ratio'])} smaller" if pair and pair["cache_ratio"] != 1 else ""
    return Cell(human_bytes(model["cache_bytes_per_token"]), detail)


def _speed_row(models: Sequence[Result], place: int) -> Row:
    first = models[0]["decode"][place]

    def cell(model: Result) -> Cell:
        speed = model["decode"][place]["tokens_per_second"]
        pair = model.get("against_source")
        if pair is None:
            return Cell(number(speed["median"]), f"{number(speed['min'])} to {number(speed['max'])}")
        gain = pair["speedup"][place]["decode"]
        return Cell(number(speed["median"]), f"{times(gain['median'])} ({gain['min']:.2f} to {gain['max']:.2f})")

    return _row(f"Decoding, batch {first['batch']}", f"tokens/s after {first['context']}", models, cell)


def verdict(results: Result) -> str:
    """One or two sentences about the last model named, the one that would be shipped."""
    models = results["models"]
    source, last = models[0], models[-1]
    if len(models) == 1:
        cell = with_interval(source["perplexity"], number)
        return f"{source['name']} has a perplexity of {cell.main} {cell.detail}".rstrip() + "."
    pair = last["against_source"]
    ratio = with_interval(pair["perplexity_ratio"], change)
    sentences = [
        f"{last['name']}: perplexity {ratio.main} {ratio.detail}".rstrip()
        + f" against the source, with {_smaller(pair['cache_ratio'])}{_faster(pair)}."
    ]
    if pair["recovered"]:
        share = with_interval(pair["recovered"], lambda value: percent(value, 0))
        sentences.append(
            f"Uptraining won back {share.main} {share.detail}".rstrip()
            + f" of the log-perplexity that {pair['recovered']['converted']} had lost."
        )
    return " ".join(sentences)


def _smaller(ratio: float) -> str:
    return "a KV cache of the same size" if ratio == 1 else f"a KV cache {ratio:.3g} times smaller"


def _faster(pair: Result) -> str:
    if not pair["speedup"]:
        return ""
    best = pair["speedup"][-1]
    return f" and decoding at {times(best['decode']['median'])} the speed (batch {best['batch']})"


def tiles(results: Result) -> list[tuple[str, Cell]]:
    """The few numbers that decide, about the last model named."""
    last = results["models"][-1]
    pair = last.get("against_source")
    if pair is None:
        return [
            ("perplexity", with_interval(last["perplexity"], number)),
            ("bits per byte", with_interval(last["bits_per_byte"], number)),
            ("KV cache per token", Cell(human_bytes(last["cache_bytes_per_token"]))),
        ]
    found = [
        ("perplexity against the source", with_interval(pair["perplexity_ratio"], change)),
        (
            "smaller KV cache",
            Cell(f"{pair['cache_ratio']:.3g}×", f"{human_bytes(last['cache_bytes_per_token'])} per token"),
        ),
    ]
    if pair["speedup"]:
        best = pair["speedup"][-1]
        gain = best["decode"]
        found.append(
            (
                f"decoding speed, batch {best['batch']}",
                Cell(times(gain["median"]), f"{gain['min']:.2f} to {gain['max']:.2f}"),
            )
        )
    if pair["recovered"]:
        found.append(("of the loss won back", _recovered(pair)))
    else:
        found.append(("same top token", with_interval(pair["same_top_token"], percent)))
    return found


def protocol(results: Result) -> list[tuple[str, str]]:
    """What somebody needs to measure the same again, as pairs of word and value."""
    made = results["protocol"]
    text = f"{made['corpus']} ({made['revision']}), sha256 {made['text_sha256'][:16]}"
    amount = f"{made['tokens']:,} tokens, {made['utf8_bytes']:,} bytes, {made['documents']:,} documents"
    if made["skipped"]:
        amount += f", {made['skipped']:,} empty ones skipped"
    if made["truncated"]:
        amount += "; the last document is cut there"
    guess = f"a model that knows nothing has a perplexity of {made['uniform_perplexity']:,.0f}, the vocabulary's size"
    return [
        ("Text", text),
        ("Scored", amount),
        ("Windows", f"{made['window']} tokens, stride {made['stride']}, each token scored once; {_bos(made)}"),
        ("Run", f"{made['dtype']} on {made['device']}, batches of {made['batch_size']}, attention {made['attention']}"),
        ("Intervals", interval_note(results)),
        ("Decoding", _decoding(made["decode"])),
        ("Guessing", guess),
        ("Versions", ", ".join(f"{name} {found}" for name, found in results["versions"].items())),
        ("Measured", results["created"]),
    ]


def _decoding(made: Result) -> str:
    return (
        f"greedy, prompt of {made['context']} tokens, {made['new_tokens']} new ones, {made['repeats']} repeats in turn "
        "with the source; median, smallest to largest"
    )


def _bos(made: Result) -> str:
    return "each window starts with BOS" if made["bos"] else "no BOS token"


def interval_note(results: Result) -> str:
    made = results["protocol"]
    if made["documents"] < 2:
        return "none: one document leaves nothing to resample; give a text of several documents"
    how = made["interval"]
    note = f"{100 * how['level']:.0f} %, {how['method']}, {how['resamples']:,} draws, paired"
    return note + ("; with so few documents they are rough" if made["documents"] < 10 else "")
