"""The report's plots, each a function of the results; None where there is nothing to draw."""

from __future__ import annotations

from typing import Any

from ..scoring.perplexity import exponential
from .figure import (
    DASHED,
    INK,
    LINE,
    Plot,
    count,
    label_of,
    name_axes,
    new_figure,
    perplexity_scale,
    plain_ticks,
    styles,
    svg_of,
)
from .format import number, perplexity_name
from .sweep import SweepRow, tradeoff_plot

Result = dict[str, Any]
_MOST_NATS = 20.0
"""Differences beyond this are drawn as this: a model so broken is off every scale."""


def report_plots(results: Result) -> list[Plot]:
    """All plots that these results have something for, in the order of the page."""
    return [plot for draw in _PLOTS if (plot := draw(results)) is not None]


def perplexity_plot(results: Result) -> Plot:
    """Perplexity of each model with its interval."""
    models = results["models"]
    figure, axes = new_figure(0.62 * len(models) + 0.75)
    for place, (model, style) in enumerate(zip(models, styles(models), strict=True)):
        estimate = model["perplexity"]
        value = estimate["value"]
        if value is None:
            continue  # beyond any number
        if estimate["low"] is not None and estimate["high"] is not None:
            ends = [estimate["low"], estimate["high"]]
            axes.plot(ends, [place, place], color=style["color"], linewidth=2, solid_capstyle="butt")
        axes.plot([value], [place], marker=style["marker"], color=style["color"], markersize=7)
        above: Result = {"textcoords": "offset points", "ha": "center", "color": INK, "fontweight": "bold"}
        axes.annotate(number(value), (value, place), (0, 8), **above)
    axes.set_yticks(range(len(models)), [label_of(model["name"], 26) for model in models])
    axes.set_ylim(len(models) - 0.5, -0.7)
    axes.grid(axis="x", color=LINE)
    perplexity_scale(axes, "x", [bound for model in models for bound in model["perplexity"].values() if bound])
    axes.set_xlabel(perplexity_name(results))
    spoken = "; ".join(f"{model['name']} {number(model['perplexity']['value'])}" for model in models)
    single = results["protocol"]["documents"] < 2
    interval = "One document: no interval is possible." if single else "Bars: 95 % interval over documents."
    return Plot(
        "Perplexity",
        f"Lower is better. {interval}",
        svg_of(figure, "perplexity"),
        f"Perplexity by model: {spoken}.",
    )


def recovery_plot(results: Result) -> Plot | None:
    """Held-out perplexity over uptraining tokens, between what was converted and the source."""
    models = results["models"]
    if not any(len(model["recovery"]) > 1 for model in models):
        return None
    figure, axes = new_figure(3.6)
    values: list[float] = []
    spoken = []
    for model, style in zip(models, styles(models), strict=True):
        points = model["recovery"]
        if len(points) > 1:
            held = [point["perplexity"] for point in points]
            axes.plot([point["tokens"] for point in points], held, label=label_of(model["name"]), **style)
            values += held
            spoken.append(
                f"{model['name']} from {number(held[0])} to {number(held[-1])} "
                f"after {count(points[-1]['tokens'])} tokens"
            )
        else:
            value = model["perplexity"]["value"]
            if value is None:
                continue
            label = label_of(f"{model['name']}, {number(value)}")
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
        f"Held-out perplexity during uptraining: {'; '.join(spoken)}.",
    )


def context_plot(results: Result) -> Plot | None:
    """Perplexity against the source by the tokens of context that were seen; None where windows are too short."""
    models = results["models"]
    if len(models) < 2 or len(models[1]["against_source"]["by_context"]) < 3:
        return None
    figure, axes = new_figure(3.6)
    spoken, values = [], [1.0]
    for model, style in list(zip(models, styles(models), strict=True))[1:]:
        bins = model["against_source"]["by_context"]
        ratios = [exponential(min(found["nats"] - found["source_nats"], _MOST_NATS)) for found in bins]
        axes.plot([found["from"] for found in bins], ratios, label=label_of(model["name"]), **style)
        values += ratios
        spoken.append(f"{model['name']} {ratios[0]:.2f} with little context, {ratios[-1]:.2f} with the most")
    axes.axhline(
        1, color=styles(models)[0]["color"], linestyle=DASHED, linewidth=1.5, label=label_of(models[0]["name"])
    )
    plain_ticks(axes, "x", [found["from"] for found in models[1]["against_source"]["by_context"]], count)
    perplexity_scale(axes, "y", values)
    name_axes(figure, axes, "tokens of context, from", "perplexity ÷ source")
    return Plot(
        "Does long context suffer more?",
        "Perplexity divided by the source's, by how many tokens before it a token could see.",
        svg_of(figure, "context"),
        f"Perplexity divided by the source's, by tokens of context: {'; '.join(spoken)}.",
    )


def needle_plot(results: Result) -> Plot | None:
    """What each model fetches from the longest text, by depth."""
    models = [model for model in results["models"] if model["needle"]]
    if not models:
        return None
    length = max(row["length"] for row in models[0]["needle"])
    depths = [100 * depth for depth in results["protocol"]["needle"]["depths"]]
    figure, axes = new_figure(3.6)
    spoken = []
    for model, style in zip(models, styles(models), strict=True):
        gain = next((row["gain_by_depth"] for row in model["needle"] if row["length"] == length), None)
        if gain is None or len(gain) != len(depths):
            continue
        axes.plot(depths, gain, label=label_of(model["name"]), **style)
        spoken.append(f"{model['name']} from {gain[0]:.2f} nats at the beginning to {gain[-1]:.2f} at the end")
    axes.axhline(0, color=LINE, linewidth=1)
    axes.set_xticks(depths, [f"{depth:.0f} %" for depth in depths])
    name_axes(figure, axes, f"depth in {length:,} tokens; 100 %: right before the question", "nats saved per token")
    return Plot(
        "Retrieval from long context",
        "How much a passage seen before helps to continue it, by where it stood. Zero: nothing was fetched.",
        svg_of(figure, "needle"),
        f"Nats per token that a hidden passage saves: {'; '.join(spoken)}.",
    )


def kl_plot(results: Result) -> Plot | None:
    """How the tokens' KL to the source is distributed."""
    models = results["models"]
    drawn = [
        (model, style)
        for model, style in zip(models, styles(models), strict=True)
        if model.get("against_source", {}).get("kl_histogram")
    ]
    if not drawn:
        return None
    figure, axes = new_figure(3.6)
    spoken = []
    for model, style in drawn:
        found = model["against_source"]["kl_histogram"]
        shares = [100 * share for share in found["shares"]]
        line = {key: style[key] for key in ("color", "linestyle", "linewidth")}
        axes.stairs(shares, found["edges"], label=label_of(model["name"]), **line)
        middle = model["against_source"]["kl_percentiles"]
        spoken.append(
            f"{model['name']} has a median of {number(middle['50'])} and a 99th percentile of {number(middle['99'])}"
        )
    axes.set_xscale("log", subs=[])  # no ticks but these
    axes.set_xticks([1e-6, 1e-4, 1e-2, 1], ["10⁻⁶", "10⁻⁴", "10⁻²", "1"])
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:g} %")
    name_axes(figure, axes, "KL to the source, nats", "share of tokens")
    return Plot(
        "How far are single predictions off?",
        "Tokens by the KL divergence of the whole next-token distribution. The right tail is what users notice.",
        svg_of(figure, "kl"),
        f"KL to the source in nats by token: {'; '.join(spoken)}.",
    )


def _grid(model: Result, batch: int) -> list[Result]:
    return [row for row in model["decode"] if row["batch"] == batch]


def _largest_batch(results: Result) -> int:
    return max((row["batch"] for model in results["models"] for row in model["decode"]), default=0)


def speed_plot(results: Result) -> Plot | None:
    """Decoding speed over context."""
    models, batch = results["models"], _largest_batch(results)
    drawn = [pair for pair in zip(models, styles(models), strict=True) if len(_grid(pair[0], batch)) > 1]
    if not drawn:
        return None
    figure, axes = new_figure(3.6)
    spoken = []
    for model, style in drawn:
        rows = _grid(model, batch)
        speeds = [row["tokens_per_second"] for row in rows]
        middle = [speed["median"] for speed in speeds]
        spread = [
            [speed["median"] - speed["min"] for speed in speeds],
            [speed["max"] - speed["median"] for speed in speeds],
        ]
        contexts = [row["context"] for row in rows]
        axes.errorbar(contexts, middle, yerr=spread, capsize=3, label=label_of(model["name"]), **style)
        spoken.append(
            f"{model['name']} {number(middle[0])} at {contexts[0]} tokens, {number(middle[-1])} at {contexts[-1]}"
        )
    plain_ticks(axes, "x", [row["context"] for row in _grid(drawn[0][0], batch)], count)
    axes.set_ylim(bottom=0)
    name_axes(figure, axes, "tokens in the context", f"tokens per second, batch {batch}")
    return Plot(
        "Decoding speed",
        "Higher is better. Median of the repeats, bars from the smallest to the largest; the models took turns.",
        svg_of(figure, "speed"),
        f"Tokens per second at batch {batch}: {'; '.join(spoken)}.",
    )


def memory_plot(results: Result) -> Plot | None:
    """Peak memory over context."""
    models, batch = results["models"], _largest_batch(results)
    drawn = [pair for pair in zip(models, styles(models), strict=True) if len(_grid(pair[0], batch)) > 1]
    if not drawn:
        return None
    figure, axes = new_figure(3.6)
    spoken = []
    for model, style in drawn:
        rows = _grid(model, batch)
        sizes = [row["peak_bytes"] / 2**20 for row in rows]
        axes.plot([row["context"] for row in rows], sizes, label=label_of(model["name"]), **style)
        spoken.append(f"{model['name']} {number(sizes[0])} MiB to {number(sizes[-1])} MiB")
    plain_ticks(axes, "x", [row["context"] for row in _grid(drawn[0][0], batch)], count)
    axes.set_ylim(bottom=0)
    name_axes(figure, axes, "tokens in the context", f"peak MiB, batch {batch}")
    return Plot(
        "Memory while decoding",
        "Lower is better. The most that weights, cache and activations take together.",
        svg_of(figure, "memory"),
        f"Peak memory at batch {batch}: {'; '.join(spoken)}.",
    )


def groups_plot(results: Result) -> Plot | None:
    """Time per token against the number of KV heads (Ainslie et al. 2023, figure 6); None below three numbers."""
    models = [model for model in results["models"] if model["decode"]]
    last = [(max(model["kv_heads"]), model["decode"][-1]) for model in models]
    by_heads = dict(sorted(last, key=lambda pair: pair[0]))
    if len(by_heads) < 3:
        return None
    figure, axes = new_figure(3.2)
    times = {heads: 1000 / row["tokens_per_second"]["median"] for heads, row in by_heads.items()}
    axes.plot(list(times), list(times.values()), color=INK, marker="o", linewidth=2, markersize=5)
    plain_ticks(axes, "x", list(times), lambda heads: f"{heads:.0f}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("KV heads (groups)")
    point = last[-1][1]
    axes.set_ylabel("ms per token")
    axes.grid(color=LINE)
    spoken = "; ".join(f"{heads} heads {number(time)} ms" for heads, time in times.items())
    return Plot(
        "Time per token against groups",
        f"WindowBatch {point['batch']}, {point['context']:,} tokens of context, median. The paper’s figure 6, here.",
        svg_of(figure, "groups"),
        f"Milliseconds per decoded token: {spoken}.",
    )


def sweep_plot(results: Result) -> Plot | None:
    """The trade-off curve of a sweep that was merged in."""
    found = results.get("sweep")
    return None if found is None else tradeoff_plot([SweepRow(**row) for row in found["rows"]])


_PLOTS = (
    perplexity_plot,
    recovery_plot,
    context_plot,
    needle_plot,
    kl_plot,
    speed_plot,
    memory_plot,
    groups_plot,
    sweep_plot,
)
