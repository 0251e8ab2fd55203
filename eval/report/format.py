"""The numbers of results.json in words: the same cells for the terminal, Markdown and the HTML page."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...console import human_bytes

Result = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """A number, and below it its interval or what it is relative to."""

    main: str
    detail: str = ""

    @property
    def line(self) -> str:
        """Both on one line: '28.71 [25.84, 31.58]', '2.00 KiB, 4.00× smaller'."""
        joint = " " if not self.detail or self.detail.startswith(("[", "(")) else ", "
        return f"{self.main}{joint}{self.detail}".strip()


@dataclass(frozen=True)
class TableRow:
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


def probability(share: float) -> str:
    """0.4231 → '42.3 %', 0.00002 → '0.002 %', less than a millionth of a percent → '~0 %'."""
    value = 100 * share
    if value < 1e-6:
        return "~0 %"
    digits = 1 if value >= 1 else 2 - math.floor(math.log10(value)) - 1
    return f"{value:.{digits}f} %"


def change(ratio: float | None) -> str:
    """1.031 → '+3.1 %'; tenfold and more is said as such: '1,278×'."""
    if ratio is None:
        return "–"
    return f"{ratio:,.0f}×" if ratio >= 10 else f"{100 * (ratio - 1):+,.1f} %".replace("-", "−")


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


def signed(value: float | None) -> str:
    """0.5 → '+0.5000'."""
    return "–" if value is None else ("−" if value < 0 else "+") + number(abs(value))


def interval_or_dash(estimate: Result | None, show: Callable[[float | None], str]) -> Cell:
    return Cell("–") if estimate is None else with_interval(estimate, show)


def whole_percent(share: float | None) -> str:
    return percent(share, 0)


def of_targets(results: Result) -> bool:
    """The models are encoder-decoders, and what is scored are tokens that they write."""
    return results["protocol"].get("targets") is not None


def perplexity_name(results: Result) -> str:
    return "perplexity per target token" if of_targets(results) else "perplexity"


def verdict(results: Result) -> str:
    """One or two sentences about the last model named, the one that would be shipped."""
    models = results["models"]
    source, last = models[0], models[-1]
    if len(models) == 1:
        cell = with_interval(source["perplexity"], number)
        return f"{source['name']} has a {perplexity_name(results)} of {cell.main} {cell.detail}".rstrip() + "."
    pair = last["against_source"]
    ratio = with_interval(pair["perplexity_ratio"], change)
    sentences = [
        f"{last['name']}: {perplexity_name(results)} {ratio.main} {ratio.detail}".rstrip()
        + f" against the source, with {_smaller(pair['cache_ratio'])}{_faster(pair)}."
    ]
    if pair["recovered"]:
        share = with_interval(pair["recovered"], whole_percent)
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
        bits = [] if of_targets(results) else [("bits per byte", with_interval(last["bits_per_byte"], number))]
        return [
            (perplexity_name(results), with_interval(last["perplexity"], number)),
            *bits,
            ("KV cache per token", Cell(human_bytes(last["cache_bytes_per_token"]))),
        ]
    found = [
        (f"{perplexity_name(results)} against the source", with_interval(pair["perplexity_ratio"], change)),
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
        found.append(("of the loss won back", interval_or_dash(pair["recovered"], whole_percent)))
    else:
        found.append(("same top token", with_interval(pair["same_top_token"], percent)))
    return found


def protocol(results: Result) -> list[tuple[str, str]]:
    """What somebody needs to measure the same again, as pairs of word and value."""
    made = results["protocol"]
    text = f"{made['corpus']} ({made['revision']}), sha256 {made['text_sha256'][:16]}"
    size = "target tokens" if of_targets(results) else f"tokens, {made['utf8_bytes']:,} bytes"
    amount = f"{made['tokens']:,} {size}, {made['documents']:,} documents"
    if made["skipped"]:
        amount += f", {made['skipped']:,} empty ones skipped"
    if made["truncated"]:
        amount += "; the last document is cut there"
    guess = f"a model that knows nothing has a perplexity of {made['uniform_perplexity']:,.0f}, the vocabulary's size"
    return [
        ("Text", text),
        ("Scored", amount),
        *(_targets(made["targets"]) if of_targets(results) else [("Windows", _windows(made))]),
        ("Run", _run(made)),
        ("Intervals", interval_note(results)),
        *([("Decoding", _decoding(made["decode"]))] if results["models"][-1]["decode"] else []),
        *([("Retrieval", _retrieval(made["needle"]))] if results["models"][-1]["needle"] else []),
        *([("Memory", _MEMORY)] if results["models"][-1]["capacity"] else []),
        *([("Source", _FROM_CACHE)] if made["source_from_cache"] else []),
        ("Guessing", guess),
        ("Versions", ", ".join(f"{name} {found}" for name, found in results["versions"].items())),
        ("Measured", results["created"]),
    ]


def _windows(made: Result) -> str:
    return f"{made['window']} tokens, stride {made['stride']}, each token scored once; {_bos(made)}"


def _targets(asked: Result) -> list[tuple[str, str]]:
    if asked["kind"] == "column":
        targets = f"column {asked['target_column']}, written from column {asked['source_column']}"
        how = f"{targets}; sides of more than {asked['longest']:,} tokens are cut there"
    else:
        how = (
            f"span corruption: {percent(asked['noise_density'], 0)} of the tokens cut out in spans of "
            f"{asked['mean_span']:g} on average, sources of at most {asked['longest']:,} tokens, seed {asked['seed']}; "
            "the same spans for every model, sentinels and EOS scored, too"
        )
    return [("Targets", how), ("Left out", _LEFT_OUT)]


_LEFT_OUT = (
    "sliding windows, retrieval from long context, bits per byte, tasks of lm-eval and what fits into a memory: "
    "they are for models without an encoder"
)
_FROM_CACHE = "its scores are those of an earlier run (--source-cache), so there is no KL and no speed against it"
_MEMORY = "weights + batch × KV cache ≤ 90 % of the memory, both in the dtype the checkpoint is stored in"


def _run(made: Result) -> str:
    several = f", {made['processes']} processes" if made["processes"] > 1 else ""
    return (
        f"{made['dtype']} on {made['device']}{several}, batches of {made['batch_size']}, attention {made['attention']}"
    )


def _decoding(made: Result) -> str:
    return (
        f"greedy, {made['new_tokens']} new tokens, {made['repeats']} repeats, the models in turn; "
        "median, smallest to largest"
    )


def _retrieval(made: Result) -> str:
    return (
        f"{made['passages']} passages of 32 tokens per length, each hidden at {len(made['depths'])} depths; "
        "the last 16 tokens of its repetition scored with and without it"
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
