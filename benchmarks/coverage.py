"""Count how often 95 % intervals hold the truth, at few and many documents of equal and of very unequal length.

    python benchmarks/coverage.py --replications 2000

Documents have a length and a mean of nats per token, which differs from document to document. Both are drawn anew for
each replication, and the interval of the mean over all tokens is computed as `headfold eval` does. Three laws of
length: equal, those of the standard library's held-out modules under the bundled tokenizer, and heavy-tailed (Pareto,
exponent 1.2). Perplexity: normal effects of documents, and noise of single tokens, which is larger in short documents.
Paired change: log-normal effects (skewness 3), as when few documents lose most. The former interval (BCa over
documents), the jackknife with Student's t, and CR2 with Satterthwaite's degrees of freedom are computed on the same
draws. `--results REPORT` draws whole documents of a real comparison, with their own lengths and nats, and its last
model. `--few` shows where an interval would need more documents. `--timing RUNS` times the bundled model against itself
instead, and counts how often the range of the speed ratio holds 1.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
from headfold import console
from headfold.corpus import open_corpus
from headfold.eval.measures import intervals
from headfold.eval.measures.intervals import Array, Estimate, effective_number, ratio_estimate
from headfold.eval.results import read_results
from scipy import stats

BUNDLED = Path(__file__).parent.parent / "recipes" / "bundled" / "stdlib-5m-mha"
SIZES = (5, 10, 20, 50, 100)
Draw = Callable[[np.random.Generator, int], tuple[Array, Array]]
"""Draws lengths and means of so many documents."""
Interval = tuple[float, float]


def main() -> None:
    options = _options()
    if options.timing:
        _against_itself(options.timing, options.repeats)
        return
    columns = ["what", "documents", "effective", *METHODS]
    rows = []
    for name, draw, truth in _cases(options):
        for size in options.documents:
            rows.append([name, str(size), *_measure(draw, truth, size, options.replications)])
            console.info(" | ".join(rows[-1]))
    if options.few:
        # the rule that withholds intervals must not decide here
        intervals.FEWEST_DOCUMENTS, intervals.FEWEST_EFFECTIVE = 2, 0
        rows += _few(options.replications)
    title = f"Truth held, % of {options.replications:,} replications (median width); level 95 %"
    console.table(title, columns, rows, markdown=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replications", type=int, default=2000)
    parser.add_argument("--documents", type=int, nargs="+", default=SIZES)
    parser.add_argument("--results", type=Path, help="draw from the documents of this comparison instead")
    parser.add_argument("--few", action="store_true", help="add rows with fewer documents than intervals are given for")
    parser.add_argument("--timing", type=int, default=0, metavar="RUNS", help="time the bundled model against itself")
    parser.add_argument("--repeats", type=int, default=6, help="repeats of each timing")
    return parser.parse_args()


def _cases(options: argparse.Namespace) -> list[tuple[str, Draw, float]]:
    """List the populations to draw from, each with its true mean over tokens."""
    if options.results is not None:
        return _real_cases(options.results)
    modules = _module_lengths()
    laws: dict[str, Callable[[np.random.Generator, int], Array]] = {
        "equal": lambda random, size: np.full(size, 1000.0),
        "modules": lambda random, size: random.choice(modules, size),
        "heavy": lambda random, size: np.ceil(100 * (1 - random.random(size)) ** (-1 / 1.2)),
    }
    return [
        (f"{kind}, {law} lengths", _with_effects(lengths, kind), 0.0)
        for kind in ("perplexity", "change")
        for law, lengths in laws.items()
    ]


def _with_effects(lengths: Callable[[np.random.Generator, int], Array], kind: str) -> Draw:
    def draw(random: np.random.Generator, size: int) -> tuple[Array, Array]:
        found = lengths(random, size)
        if kind == "perplexity":
            # tokens scatter by 2.5 nats, documents by 0.5
            return found, random.normal(0, np.sqrt(0.25 + 6.25 / found))
        sigma = 0.75
        effects = np.exp(random.normal(0, sigma, size)) - np.exp(sigma**2 / 2)
        return found, 0.02 * effects + random.normal(0, 0.1 / np.sqrt(found))

    return draw


def _module_lengths() -> Array:
    from headfold.checkpoint.load import load_tokenizer
    from headfold.eval.scoring.windows import tokenize_text

    text = tokenize_text(load_tokenizer(BUNDLED), open_corpus("stdlib#heldout"), max_tokens=None)
    return np.array([document.scored for document in text.documents], float)


def _real_cases(path: Path) -> list[tuple[str, Draw, float]]:
    results = read_results(path)
    tokens = np.array([document.tokens for document in results.documents], float)
    source, last = (np.array(model.nll_nats) for model in (results.source, results.last))
    found = []
    for name, nats in (("perplexity, real documents", source), ("change, real documents", last - source)):

        def draw(random: np.random.Generator, size: int, nats: Array = nats) -> tuple[Array, Array]:
            chosen = random.integers(len(tokens), size=size)
            return tokens[chosen], nats[chosen] / tokens[chosen]

        found.append((name, draw, float(nats.sum() / tokens.sum())))
    return found


def _few(replications: int) -> list[list[str]]:
    """Measure with two to four documents, and with one document that holds most of the tokens."""
    draws: list[tuple[str, int, Draw]] = [
        ("change, equal lengths", size, _with_effects(lambda random, size: np.full(size, 1000.0), "change"))
        for size in (2, 3, 4)
    ]
    for share in (0.9, 0.8, 0.7, 0.6, 0.5):

        def lengths(random: np.random.Generator, size: int, share: float = share) -> Array:
            return np.array([share, *np.full(size - 1, (1 - share) / (size - 1))]) * 20_000

        draws += [(f"change, one document has {share:.0%}", size, _with_effects(lengths, "change")) for size in (5, 20)]
    return [[name, str(size), *_measure(draw, 0.0, size, replications)] for name, size, draw in draws]


def _measure(draw: Draw, truth: float, size: int, replications: int) -> list[str]:
    """Fill a row: the median effective number, and each method's coverage and width."""
    random = np.random.default_rng(size)
    effective, ends = [], np.full((len(METHODS), replications, 2), np.nan)
    for place in range(replications):
        lengths, means = draw(random, size)
        effective.append(effective_number(lengths))
        for row, method in enumerate(METHODS.values()):
            ends[row, place] = method(lengths, means)
    return [f"{np.median(effective):.1f}", *(_cell(found, truth) for found in ends)]


def _cell(ends: Array, truth: float) -> str:
    """Write coverage and width over the replications that gave an interval, and the share of those that gave none."""
    given = ends[np.isfinite(ends).all(axis=1)]
    none = 1 - len(given) / len(ends)
    if none == 1:
        return "none"
    held = np.mean((given[:, 0] <= truth) & (truth <= given[:, 1]))
    width = np.median(given[:, 1] - given[:, 0])
    return f"{100 * held:.1f} ({width:.3g})" + (f", none in {none:.0%}" if none > 0.005 else "")


def headfold(lengths: Array, means: Array) -> Interval:
    """Compute the interval that headfold reports."""
    found = ratio_estimate(lengths * means, lengths)
    return (np.nan, np.nan) if found.low is None or found.high is None else (found.low, found.high)


def bca(lengths: Array, means: Array, draws: int = 500) -> Interval:
    """Compute the former interval: BCa over documents (Efron & Tibshirani 1993, chapter 14)."""
    size, nats, value = len(lengths), lengths * means, float(lengths @ means / lengths.sum())
    chosen = np.random.default_rng(0).integers(size, size=(draws, size))
    drawn = nats[chosen].sum(axis=1) / lengths[chosen].sum(axis=1)
    left_out = (nats.sum() - nats) / (lengths.sum() - lengths)
    deviation = left_out.mean() - left_out
    skew = (deviation**3).sum() / (6 * (deviation**2).sum() ** 1.5)
    bias = stats.norm.ppf(np.clip(np.mean(drawn < value), 1 / draws, 1 - 1 / draws))
    sums = bias + stats.norm.ppf([0.025, 0.975])
    low, high = np.quantile(drawn, stats.norm.cdf(bias + sums / (1 - skew * sums)))
    return float(low), float(high)


def jackknife(lengths: Array, means: Array) -> Interval:
    """Compute the jackknife with Student's t at documents − 1."""
    weights = lengths / lengths.sum()
    value, size = weights @ means, len(means)
    error = np.sqrt((size - 1) / size * ((weights * (means - value) / (1 - weights)) ** 2).sum())
    return _around(value, error, size - 1)


def satterthwaite(lengths: Array, means: Array) -> Interval:
    """Compute CR2 with the degrees of freedom of Bell & McCaffrey (2002)."""
    weights = lengths / lengths.sum()
    value, squares = weights @ means, weights @ weights
    expected = 1 - 2 * weights + squares
    robust = weights**2 / expected
    covariance = squares - weights[:, None] - weights[None] + np.eye(len(weights))
    freedom = squares**2 / (robust @ covariance**2 @ robust)
    return _around(value, np.sqrt(robust @ (means - value) ** 2), freedom)


def _around(value: float, error: float, freedom: float) -> Interval:
    half = float(stats.t.ppf(0.975, freedom) * error)
    return float(value - half), float(value + half)


METHODS: dict[str, Callable[[Array, Array], Interval]] = {
    "headfold": headfold,
    "BCa": bca,
    "jackknife-t": jackknife,
    "CR2, Satterthwaite": satterthwaite,
}


def _against_itself(runs: int, repeats: int) -> None:
    """Time the bundled model against itself, and count the ranges that hold 1."""
    import torch
    from headfold.checkpoint.load import load_language_model
    from headfold.eval.measures.kv_cache import measure_decoding
    from headfold.eval.results import DecodeSettings

    models = [load_language_model(BUNDLED, dtype=torch.float32).eval() for _ in range(2)]
    settings = DecodeSettings(contexts=(64,), batches=(1,), new_tokens=16, repeats=repeats)
    found: dict[str, list[Estimate]] = {"decoding": [], "first token": []}
    for run in range(runs):
        (one,), (other,) = measure_decoding(models, settings)
        found["decoding"].append(_ratio(one.decode_seconds, other.decode_seconds))
        found["first token"].append(_ratio(one.first_token_seconds, other.first_token_seconds))
        console.info(f"run {run + 1} of {runs}")
    rows = [[way, *_held(ranges)] for way, ranges in found.items()]
    title = f"The bundled model against itself, {runs:,} runs of {repeats} repeats; level 95 %"
    console.table(title, ["ratio", "ranges that hold 1", "median width"], rows, markdown=True)


def _ratio(one: list[float], other: list[float]) -> Estimate:
    return intervals.paired_ratio([before / after for before, after in zip(one, other, strict=True)])


def _held(ranges: list[Estimate]) -> list[str]:
    ends = np.array([(one.low, one.high) for one in ranges], float)
    held = np.mean((ends[:, 0] <= 1) & (ends[:, 1] >= 1))
    return [f"{100 * held:.0f} %", f"{np.median(ends[:, 1] - ends[:, 0]):.2f}"]


if __name__ == "__main__":
    main()
