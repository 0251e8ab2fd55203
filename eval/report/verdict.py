"""Sum up a comparison in a sentence and a few numbers."""

from __future__ import annotations

import math
from typing import Literal

from ...console import counted, human_bytes
from ...errors import HeadfoldError, UsageError
from ..results import AgainstSource, Comparison, ModelResult, RecoveredShare
from .format import Cell, change, gain, number, percent, whole_percent, with_interval

Judge = Literal["bound", "point"]


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
        sentences.append(_recovered(pair.recovered))
    if pair.perplexity_ratio.low is None and pair.perplexity_ratio.value is not None:
        sentences.append(f"No intervals: {too_few(results)}.")
    return " ".join(sentences)


def _recovered(found: RecoveredShare) -> str:
    if found.missing is not None:
        return f"There is no recovered share: {found.missing}."
    share = with_interval(found, whole_percent)
    return (
        f"Uptraining recovered {share.main} {share.detail}".rstrip()
        + f" of the log-perplexity that {found.converted} had lost."
    )


def too_few(results: Comparison) -> str:
    """Say how many documents there are, and how many are enough for an interval."""
    made, how = results.protocol, results.protocol.interval
    effective = "" if made.effective_documents is None else f", effective number {made.effective_documents:.1f}"
    return (
        f"{counted(made.documents, 'document')}{effective}; an interval needs at least "
        f"{counted(how.fewest_documents, 'document')} and an effective number of {how.fewest_effective:g}"
    )


def _smaller(ratio: float) -> str:
    return "a KV cache of the same size" if ratio == 1 else f"a KV cache {ratio:.3g} times smaller"


def _faster(pair: AgainstSource) -> str:
    if not pair.speedup:
        return ""
    best = pair.speedup[-1]
    speed, kind = gain(best.decode), "the speed"
    if best.decode.low is not None and best.decode.high is not None and best.decode.low <= 1 <= best.decode.high:
        kind = "the speed, which may be the same"
    return f" and decoding at {speed.main} {speed.detail} {kind} (batch {best.batch})"


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
        found.append((f"decoding speed, batch {best.batch}", gain(best.decode)))
    if pair.recovered is not None and pair.recovered.missing is None:
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


def refuse_loss(results: Comparison, limit: float, by: Judge) -> None:
    """Raise if the last model named is worse than its source by more than ``limit``, e.g. 0.02.

    Args:
        by: ``bound`` judges by the upper end of the interval, ``point`` by the measured value.

    Raises:
        UsageError: there is no model beside the source.
        HeadfoldError: it is worse, or there is no interval to judge by.
    """
    pair = results.last.against_source
    if pair is None:
        raise UsageError("--fail-over judges a model against its source, but there is only the source.")
    ratio = pair.perplexity_ratio
    # None stands for a perplexity beyond any float
    loss = math.inf if ratio.value is None else ratio.value - 1
    if loss > limit:
        raise HeadfoldError(f"The perplexity is worse than the source's by {loss:.2%}, more than {limit:.2%}.")
    if by == "point":
        return
    if ratio.low is None:
        raise HeadfoldError(
            f"The perplexity was measured to differ from the source's by {loss:+.2%}, but there is no interval, so it "
            f"may be worse by more than {limit:.2%} ({too_few(results)}).",
            "Evaluate on more documents, or judge by the measured value: --fail-by point.",
        )
    bound = math.inf if ratio.high is None else ratio.high - 1
    if bound > limit:
        raise HeadfoldError(
            f"The perplexity may be worse than the source's by {bound:.2%}, more than {limit:.2%}: that is the upper "
            f"end of the interval around {loss:+.2%}.",
            "Evaluate on more documents, or judge by the measured value: --fail-by point.",
        )
