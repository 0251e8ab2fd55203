"""Sum up a comparison in a sentence and a few numbers."""

from __future__ import annotations

import math

from ...console import human_bytes
from ..results import AgainstSource, Comparison, ModelResult
from .format import Cell, change, number, percent, times, whole_percent, with_interval


def perplexity_name(results: Comparison) -> str:
    """Name the perplexity by the tokens that it is over."""
    return "perplexity per target token" if results.of_encoder_decoders else "perplexity"


def verdict(results: Comparison) -> str:
    """Judge in one or two sentences the last model named, which is the one to be shipped."""
    source, last, pair = results.source, results.last, results.last.against_source
    if pair is None:
        cell = with_interval(source.perplexity, number)
        # a single document has no interval, and then a space would remain
        return f"{source.name} has a {perplexity_name(results)} of {cell.main} {cell.detail}".rstrip() + "."
    ratio = with_interval(pair.perplexity_ratio, change)
    sentences = [
        f"{last.name}: {perplexity_name(results)} {ratio.main} {ratio.detail}".rstrip()
        + f" against the source, with {_smaller(pair.cache_ratio)}{_faster(pair)}."
    ]
    if pair.recovered is not None:
        share = with_interval(pair.recovered, whole_percent)
        sentences.append(
            f"Uptraining recovered {share.main} {share.detail}".rstrip()
            + f" of the log-perplexity that {pair.recovered.converted} had lost."
        )
    return " ".join(sentences)


def _smaller(ratio: float) -> str:
    return "a KV cache of the same size" if ratio == 1 else f"a KV cache {ratio:.3g} times smaller"


def _faster(pair: AgainstSource) -> str:
    if not pair.speedup:
        return ""
    best = pair.speedup[-1]
    return f" and decoding at {times(best.decode.median)} the speed (batch {best.batch})"


def tiles(results: Comparison) -> list[tuple[str, Cell]]:
    """Choose the few numbers that decide about the last model named."""
    last = results.last
    if last.against_source is None:
        return _tiles_of_source(results)
    pair = last.against_source
    found = [
        (f"{perplexity_name(results)} against the source", with_interval(pair.perplexity_ratio, change)),
        ("smaller KV cache", _cache_tile(last, pair)),
    ]
    if pair.speedup:
        best = pair.speedup[-1]
        gain = Cell(times(best.decode.median), f"{best.decode.min:.2f} to {best.decode.max:.2f}")
        found.append((f"decoding speed, batch {best.batch}", gain))
    if pair.recovered is not None:
        found.append(("of the loss recovered", with_interval(pair.recovered, whole_percent)))
    else:
        found.append(("same top token", with_interval(pair.same_top_token, percent)))
    return found


def _cache_tile(model: ModelResult, pair: AgainstSource) -> Cell:
    return Cell(f"{pair.cache_ratio:.3g}×", f"{human_bytes(model.cache_bytes_per_token)} per token")


def _tiles_of_source(results: Comparison) -> list[tuple[str, Cell]]:
    source = results.source
    # text behind sentinels does not exist, so encoder-decoders have no bits per byte
    bits = [] if results.of_encoder_decoders else [("bits per byte", with_interval(source.bits_per_byte, number))]
    return [
        (perplexity_name(results), with_interval(source.perplexity, number)),
        *bits,
        ("KV cache per token", Cell(human_bytes(source.cache_bytes_per_token))),
    ]


def final_loss(results: Comparison) -> float:
    """Compute the relative growth of perplexity over the source of the last model named, e.g. 0.03."""
    pair = results.last.against_source
    if pair is None:
        return 0.0
    ratio = pair.perplexity_ratio.value
    return math.inf if ratio is None else ratio - 1  # None stands for a perplexity beyond any float
