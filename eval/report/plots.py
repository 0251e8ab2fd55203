"""Draw the report's plots. Each function takes the results and returns None where there is nothing to draw."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ...console import counted
from ..results import Comparison, DecodeResult, ModelResult
from ..scoring.perplexity import exponential
from .figure import (
    DASHED,
    INK,
    LINE,
    Plot,
    label_of,
    name_axes,
    new_figure,
    perplexity_scale,
    plain_ticks,
    styles,
    svg_of,
)
from .format import count, number
from .sweep import tradeoff_plot
from .verdict import perplexity_name, too_few

_MOST_NATS = 20.0
"""Larger differences are drawn as this, since a model that broken is off every scale."""


def report_plots(results: Comparison) -> list[Plot]:
    """Draw all plots that these results have numbers for, in the order of the page."""
    return [plot for draw in _PLOTS if (plot := draw(results)) is not None]


def _styled(results: Comparison) -> Iterator[tuple[ModelResult, dict[str, Any]]]:
    return zip(results.models, styles(results.models), strict=True)


def perplexity_plot(results: Comparison) -> Plot:
    """Draw the perplexity of each model with its interval."""
    models = results.models
    # one line of the plot for each model, and room for the axis below
    figure, axes = new_figure(0.62 * len(models) + 0.75)
    bounds: list[float] = []
    for place, (model, style) in enumerate(_styled(results)):
        estimate = model.perplexity
        # an end that does not exist or is beyond any float sets no bound
        bounds += [bound for bound in (estimate.value, estimate.low, estimate.high) if bound]
        if estimate.value is None:
            continue  # beyond any float
        if estimate.low is not None and estimate.high is not None:
            ends = [estimate.low, estimate.high]
            axes.plot(ends, [place, place], color=style["color"], linewidth=2, solid_capstyle="butt")
        axes.plot([estimate.value], [place], marker=style["marker"], color=style["color"], markersize=7)
        above: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "color": INK, "fontweight": "bold"}
        axes.annotate(number(estimate.value), (estimate.value, place), (0, 8), **above)
    axes.set_yticks(range(len(models)), [label_of(model.name, 26) for model in models])
    # upside down, so that the first model is on top as in the table
    axes.set_ylim(len(models) - 0.5, -0.7)
    axes.grid(axis="x", color=LINE)
    perplexity_scale(axes, "x", bounds)
    axes.set_xlabel(perplexity_name(results))
    alt_text = "; ".join(f"{model.name} {number(model.perplexity.value)}" for model in models)
    bars = any(model.perplexity.low is not None for model in models)
    interval = "Bars: 95 % interval over documents." if bars else f"No intervals: {too_few(results)}."
    return Plot(
        "Perplexity",
        f"Lower is better. {interval}",
        svg_of(figure, "perplexity"),
        f"Perplexity by model: {alt_text}.",
    )


def recovery_plot(results: Comparison) -> Plot | None:
    """Draw held-out perplexity over uptraining tokens, between the converted models and the source."""
    # a single point is the start alone and makes no curve
    if not any(len(model.recovery) > 1 for model in results.models):
        return None
    figure, axes = new_figure(3.6)
    values: list[float] = []
    alt_text = []
    for model, style in _styled(results):
        points = model.recovery
        if len(points) > 1:
            held = [point.perplexity for point in points]
            axes.plot([point.tokens for point in points], held, label=label_of(model.name), **style)
            values += held
            after = count(points[-1].tokens)
            alt_text.append(f"{model.name} from {number(held[0])} to {number(held[-1])} after {after} tokens")
        elif model.perplexity.value is not None:
            value = model.perplexity.value
            label = label_of(f"{model.name}, {number(value)}")
            axes.axhline(value, color=style["color"], linestyle=DASHED, linewidth=1.5, label=label)
            values.append(value)
    perplexity_scale(axes, "y", values)
    axes.xaxis.set_major_formatter(lambda tokens, _: count(tokens))
    name_axes(figure, axes, "uptraining tokens", "held-out perplexity")
    return Plot(
        "Recovery during uptraining",
        "Solid: measured by the trainer on its own held-out text as it went. "
        "Dashed: measured here. Where text or window differ, the levels may differ a little.",
        svg_of(figure, "recovery"),
        f"Held-out perplexity during uptraining: {'; '.join(alt_text)}.",
    )


def context_plot(results: Comparison) -> Plot | None:
    """Draw perplexity against the source by tokens of context (None where windows are too short)."""
    pairs = [
        (model, style, model.against_source.by_context) for model, style in _styled(results) if model.against_source
    ]
    # all models were scored with the same windows, so the first stands for all
    if not pairs or len(pairs[0][2]) < 3:
        return None
    figure, axes = new_figure(3.6)
    # 1 is the line of the source, which must be in view
    alt_text, values = [], [1.0]
    for model, style, bins in pairs:
        ratios = [exponential(min(found.nats - found.source_nats, _MOST_NATS)) for found in bins]
        axes.plot([found.context_from for found in bins], ratios, label=label_of(model.name), **style)
        values += ratios
        alt_text.append(f"{model.name} {ratios[0]:.2f} with little context, {ratios[-1]:.2f} with the most")
    source, source_style = next(_styled(results))
    axes.axhline(1, color=source_style["color"], linestyle=DASHED, linewidth=1.5, label=label_of(source.name))
    plain_ticks(axes, [found.context_from for found in pairs[0][2]], count)
    perplexity_scale(axes, "y", values)
    name_axes(figure, axes, "tokens of context, from", "perplexity ÷ source")
    return Plot(
        "Does long context suffer more?",
        "Perplexity divided by the source's, by how many tokens before it a token could see.",
        svg_of(figure, "context"),
        f"Perplexity divided by the source's, by tokens of context: {'; '.join(alt_text)}.",
    )


def retrieval_plot(results: Comparison) -> Plot | None:
    """Draw retrieval from the longest text by depth."""
    drawn = [(model, style) for model, style in _styled(results) if model.needle]
    if not drawn:
        return None
    length = max(row.length for row in drawn[0][0].needle)
    depths = [100 * depth for depth in results.protocol.needle.depths]
    figure, axes = new_figure(3.6)
    alt_text = []
    for model, style in drawn:
        gain = next((row.gain_by_depth for row in model.needle if row.length == length), None)
        if gain is None or len(gain) != len(depths):
            continue
        axes.plot(depths, gain, label=label_of(model.name), **style)
        alt_text.append(f"{model.name} from {gain[0]:.2f} nats at the beginning to {gain[-1]:.2f} at the end")
    axes.axhline(0, color=LINE, linewidth=1)
    axes.set_xticks(depths, [f"{depth:.0f} %" for depth in depths])
    name_axes(figure, axes, f"depth in {length:,} tokens; 100 %: right before the question", "nats saved per token")
    return Plot(
        "Retrieval from long context",
        "Nats saved per token: how much a passage seen before helps to continue it, by where it stood. "
        "Zero: nothing was retrieved.",
        svg_of(figure, "needle"),
        f"Nats per token that a hidden passage saves: {'; '.join(alt_text)}.",
    )


def kl_plot(results: Comparison) -> Plot | None:
    """Draw the distribution of the tokens' KL to the source."""
    drawn = [
        (model, style, model.against_source.kl_histogram, model.against_source.kl_percentiles)
        for model, style in _styled(results)
        if model.against_source
    ]
    figure, axes = new_figure(3.6)
    alt_text = []
    for model, style, histogram, percentiles in drawn:
        # a source from a cache has no logits, so there is no KL to it
        if histogram is None or percentiles is None:
            continue
        shares = [100 * share for share in histogram.shares]
        line = {key: style[key] for key in ("color", "linestyle", "linewidth")}
        axes.stairs(shares, histogram.edges, label=label_of(model.name), **line)
        median, high = number(percentiles["50"]), number(percentiles["99"])
        alt_text.append(f"{model.name} has a median of {median} and a 99th percentile of {high}")
    if not alt_text:
        return None
    axes.set_xscale("log", subs=[])  # no minor ticks
    axes.set_xticks([1e-6, 1e-4, 1e-2, 1], ["10⁻⁶", "10⁻⁴", "10⁻²", "1"])
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:g} %")
    name_axes(figure, axes, "KL to the source, nats", "share of tokens")
    return Plot(
        "How far are single predictions off?",
        "Tokens by the KL divergence of the whole next-token distribution. The right tail is what users notice.",
        svg_of(figure, "kl"),
        f"KL to the source in nats by token: {'; '.join(alt_text)}.",
    )


def _over_contexts(
    results: Comparison,
    draw: Callable[[Any, ModelResult, Sequence[DecodeResult], dict[str, Any]], str],
    *,
    name: str,
    title: str,
    caption: str,
    axis: str,
    quantity: str,
) -> Plot | None:
    """Draw a quantity of decoding at the largest batch over the context (None with fewer than two contexts).

    Args:
        draw: draws one model on the axes it is given, and describes the curve in words.
        axis, quantity: name the quantity beside the vertical axis, and in words.
    """
    batch = max((row.batch for model in results.models for row in model.decode), default=0)
    drawn = [
        (model, rows, style)
        for model, style in _styled(results)
        if len(rows := [row for row in model.decode if row.batch == batch]) > 1
    ]
    if not drawn:
        return None
    figure, axes = new_figure(3.6)
    alt_text = [draw(axes, *one) for one in drawn]
    # all models were timed at the same contexts
    plain_ticks(axes, [row.context for row in drawn[0][1]], count)
    axes.set_ylim(bottom=0)
    name_axes(figure, axes, "tokens in the context", f"{axis}, batch {batch}")
    return Plot(title, caption, svg_of(figure, name), f"{quantity} at batch {batch}: {'; '.join(alt_text)}.")


def speed_plot(results: Comparison) -> Plot | None:
    """Draw decoding speed over context."""

    def draw(axes: Any, model: ModelResult, rows: Sequence[DecodeResult], style: dict[str, Any]) -> str:
        speeds, contexts = [row.tokens_per_second for row in rows], [row.context for row in rows]
        middle = [speed.median for speed in speeds]
        bars = [[speed.median - speed.min for speed in speeds], [speed.max - speed.median for speed in speeds]]
        axes.errorbar(contexts, middle, yerr=bars, capsize=3, label=label_of(model.name), **style)
        return f"{model.name} {number(middle[0])} at {contexts[0]} tokens, {number(middle[-1])} at {contexts[-1]}"

    return _over_contexts(
        results,
        draw,
        name="speed",
        title="Decoding speed",
        caption="Higher is better. Median of the repeats, bars from smallest to largest; the models took turns.",
        axis="tokens per second",
        quantity="Tokens per second",
    )


def memory_plot(results: Comparison) -> Plot | None:
    """Draw peak memory over context."""

    def draw(axes: Any, model: ModelResult, rows: Sequence[DecodeResult], style: dict[str, Any]) -> str:
        sizes = [row.peak_bytes / 2**20 for row in rows]
        axes.plot([row.context for row in rows], sizes, label=label_of(model.name), **style)
        return f"{model.name} {number(sizes[0])} MiB to {number(sizes[-1])} MiB"

    return _over_contexts(
        results,
        draw,
        name="memory",
        title="Memory while decoding",
        caption="Lower is better. The most that weights, cache and activations take together.",
        axis="peak MiB",
        quantity="Peak memory",
    )


def groups_plot(results: Comparison) -> Plot | None:
    """Draw time per token against the number of KV heads (Ainslie et al. 2023, figure 6), if three models differ."""
    # the last point is the most demanding one, where the cache matters most
    last = [(max(model.kv_heads), model.decode[-1]) for model in results.models if model.decode]
    # of several models with the same number of heads, the last one counts
    by_heads = dict(sorted(last, key=lambda pair: pair[0]))
    if len(by_heads) < 3:
        return None
    figure, axes = new_figure(3.2)
    times = {heads: 1000 / row.tokens_per_second.median for heads, row in by_heads.items()}
    axes.plot(list(times), list(times.values()), color=INK, marker="o", linewidth=2, markersize=5)
    plain_ticks(axes, list(times), lambda heads: f"{heads:.0f}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("KV heads (groups)")
    axes.set_ylabel("ms per token")
    axes.grid(color=LINE)
    point = last[-1][1]
    alt_text = "; ".join(f"{counted(round(heads), 'head')} {number(time)} ms" for heads, time in times.items())
    return Plot(
        "Time per token against groups",
        f"Batch {point.batch}, {point.context:,} tokens of context, median. The paper’s figure 6, measured here.",
        svg_of(figure, "groups"),
        f"Milliseconds per decoded token: {alt_text}.",
    )


def sweep_plot(results: Comparison) -> Plot | None:
    """Draw the trade-off curve of a sweep that was merged in."""
    return None if results.sweep is None else tradeoff_plot(results.sweep.rows)


_PLOTS = (
    perplexity_plot,
    recovery_plot,
    context_plot,
    retrieval_plot,
    kl_plot,
    speed_plot,
    memory_plot,
    groups_plot,
    sweep_plot,
)
