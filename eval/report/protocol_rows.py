"""List the settings needed to reproduce the numbers."""

from __future__ import annotations

from ...console import counted
from ..results import Comparison, MeasurementProtocol, TargetProtocol
from .format import percent
from .verdict import too_few

_LEFT_OUT = (
    "sliding windows, retrieval from long context, bits per byte, tasks of lm-eval and what fits into a memory: "
    "they are for models without an encoder"
)
_FROM_CACHE = "its scores come from an earlier run (--source-cache), so there is no KL and no speed against it"
_MEMORY = "weights + batch × KV cache ≤ 90 % of the memory, both in the dtype the checkpoint is stored in"


def protocol_rows(results: Comparison) -> list[tuple[str, str]]:
    """List the protocol as pairs of word and value."""
    made, last = results.protocol, results.last
    guess = f"a model that guesses has a perplexity of {made.uniform_perplexity:,.0f}, the vocabulary's size"
    return [
        ("Text", f"{made.corpus} ({made.revision}), sha256 {made.text_sha256[:16]}"),
        ("Scored", _amount(made)),
        *([("Windows", _windows(made))] if made.targets is None else _targets(made.targets)),
        ("Run", _run(made)),
        ("Intervals", interval_note(results)),
        # the last model stands for all: every model of a comparison is measured alike
        *([("Decoding", _decoding(made))] if last.decode else []),
        *([("Retrieval", _retrieval(made))] if last.needle else []),
        *([("Memory", _MEMORY)] if last.capacity else []),
        *([("Source", _FROM_CACHE)] if made.source_from_cache else []),
        ("Guessing", guess),
        ("Versions", ", ".join(f"{name} {found}" for name, found in results.versions.items())),
        ("Measured", results.created),
    ]


def _amount(made: MeasurementProtocol) -> str:
    size = "target tokens" if made.targets is not None else f"tokens, {made.utf8_bytes:,} bytes"
    amount = f"{made.tokens:,} {size}, {counted(made.documents, 'document')}"
    if made.effective_documents is not None:
        amount += (
            f" of unequal length that tell as much as {made.effective_documents:.1f} equal ones (effective number)"
        )
    if made.skipped:
        amount += f", {counted(made.skipped, 'empty one')} skipped"
    return amount + (", the last document cut" if made.truncated else "")


def _windows(made: MeasurementProtocol) -> str:
    bos = "each window starts with BOS" if made.bos else "no BOS token"
    return f"{counted(made.window, 'token')}, stride {made.stride}, each token scored once; {bos}"


def _targets(targets: TargetProtocol) -> list[tuple[str, str]]:
    if targets.kind == "column":
        columns = f"column {targets.target_column}, written from column {targets.source_column}"
        # a cut target is easier or harder than the whole one, so the reader has to know
        how = f"{columns}; sides of more than {targets.longest:,} tokens are cut there"
    else:
        how = (
            f"span corruption: {percent(targets.noise_density, 0)} of the tokens cut out in spans of "
            f"{targets.mean_span:g} on average, sources of at most {targets.longest:,} tokens, seed {targets.seed}; "
            "the same spans for every model, sentinels and EOS scored, too"
        )
    return [("Targets", how), ("Left out", _LEFT_OUT)]


def _run(made: MeasurementProtocol) -> str:
    several = f", {made.processes} processes" if made.processes > 1 else ""
    return f"{made.dtype} on {made.device}{several}, batches of {made.batch_size}, attention {made.attention}"


def _decoding(made: MeasurementProtocol) -> str:
    return (
        f"greedy, {counted(made.decode.new_tokens, 'new token')}, {counted(made.decode.repeats, 'repeat')}, the models "
        "in turn, who goes first alternates; speeds are the median, smallest to largest; ratios are paired by repeat, "
        "with a 95 % interval (Student's t on logarithms)"
    )


def _retrieval(made: MeasurementProtocol) -> str:
    return (
        f"{counted(made.needle.passages, 'passage')} of 32 tokens per length, from different documents as far as there "
        f"are, each hidden at {counted(len(made.needle.depths), 'depth')}; "
        "the last 16 tokens of its repetition scored with and without it"
    )


def interval_note(results: Comparison) -> str:
    """Say how intervals were computed, or why there are none."""
    made = results.protocol
    how = made.interval
    effective = made.documents if made.effective_documents is None else made.effective_documents
    if made.documents < how.fewest_documents or effective < how.fewest_effective:
        return f"none: {too_few(results)}"
    return f"{100 * how.level:.0f} %, {how.method}, {how.resamples:,} draws, paired"
