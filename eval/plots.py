"""The report's plots as inline SVG whose colours and fonts are the page's own, so that both themes suit them."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .wording import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Result = dict[str, Any]

# Stand-ins that matplotlib draws with; the page's style sheet gives each variable a value per theme.
_VARIABLES = {
    "#010101": "--ink",
    "#020202": "--muted",
    "#030303": "--line",
    "#040404": "--source",
    "#050505": "--converted",
    "#060606": "--uptrained",
    "#070707": "--other",
}
_INK, _MUTED, _LINE = "#010101", "#020202", "#030303"
_ROLE = {"source": "#040404", "converted": "#050505", "uptrained": "#060606", "other": "#070707"}
_MARKERS = {"source": "s", "converted": "o", "uptrained": "D", "other": "^"}
_DASHED = (0, (4, 3))
_WIDTH_INCHES = 5.0


def perplexity_plot(results: Result) -> tuple[str, str]:
    """Perplexity of each model with its interval: SVG and its description in words."""
    models = results["models"]
    figure, axes = _figure(0.62 * len(models) + 0.75)
    for place, model in enumerate(models):
        estimate, colour = model["perplexity"], _ROLE[model["role"]]
        value = estimate["value"]
        if estimate["low"] is not None:
            axes.plot(
                [estimate["low"], estimate["high"]], [place, place], color=colour, linewidth=2, solid_capstyle="butt"
            )
        axes.plot([value], [place], marker=_MARKERS[model["role"]], color=colour, markersize=7)
        axes.annotate(
            number(value),
            (value, place),
            (0, 8),
            textcoords="offset points",
            ha="center",
            color=_INK,
            fontweight="bold",
        )
    axes.set_yticks(range(len(models)), [_shortened(model["name"]) for model in models])
    axes.set_ylim(len(models) - 0.5, -0.7)
    axes.grid(axis="x", color=_LINE)
    _perplexity_scale(axes, "x", [bound for model in models for bound in model["perplexity"].values() if bound])
    axes.set_xlabel("perplexity")
    spoken = "; ".join(f"{model['name']} {number(model['perplexity']['value'])}" for model in models)
    return _svg(figure, "perplexity"), f"Perplexity by model: {spoken}."


def recovery_plot(results: Result) -> tuple[str, str] | None:
    """Held-out perplexity over uptraining tokens, between what was converted and the source; None without records."""
    trained = [model for model in results["models"] if len(model["recovery"]) > 1]
    if not trained:
        return None
    figure, axes = _figure(3.6)
    values: list[float] = []
    for model in trained:
        tokens, held = ([point[key] for point in model["recovery"]] for key in ("tokens", "perplexity"))
        axes.plot(tokens, held, color=_ROLE[model["role"]], marker="o", markersize=4, linewidth=2, label=model["name"])
        values += held
    for model in results["models"]:
        if not model["recovery"]:
            value = model["perplexity"]["value"]
            label = f"{model['name']}, {number(value)}"
            axes.axhline(value, color=_ROLE[model["role"]], linestyle=_DASHED, linewidth=1.5, label=label)
            values.append(value)
    _perplexity_scale(axes, "y", values)
    axes.xaxis.set_major_formatter(lambda tokens, _: _tokens(tokens))
    _name_axes(figure, axes, "uptraining tokens", "held-out perplexity")
    spoken = "; ".join(
        f"{model['name']} from {number(first['perplexity'])} to {number(last['perplexity'])} "
        f"after {_tokens(last['tokens'])} tokens"
        for model in trained
        for first, last in [(model["recovery"][0], model["recovery"][-1])]
    )
    return _svg(figure, "recovery"), f"Held-out perplexity during uptraining: {spoken}."


def context_plot(results: Result) -> tuple[str, str] | None:
    """Perplexity against the source by the tokens of context that were seen; None where windows are too short."""
    pairs = [model for model in results["models"] if "against_source" in model]
    if not pairs or len(pairs[0]["against_source"]["by_context"]) < 3:
        return None
    figure, axes = _figure(3.6)
    spoken = []
    for model in pairs:
        bins = model["against_source"]["by_context"]
        ratios = [math.exp(found["nats"] - found["source_nats"]) for found in bins]
        style: Result = {
            "color": _ROLE[model["role"]],
            "marker": _MARKERS[model["role"]],
            "markersize": 4,
            "linewidth": 2,
        }
        axes.plot([found["from"] for found in bins], ratios, label=model["name"], **style)
        spoken.append(f"{model['name']} {ratios[0]:.2f} with little context, {ratios[-1]:.2f} with the most")
    axes.axhline(1, color=_ROLE["source"], linestyle=_DASHED, linewidth=1.5, label=results["models"][0]["name"])
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda tokens, _: f"{tokens:.0f}")
    _name_axes(figure, axes, "tokens of context, from", "perplexity ÷ source")
    return _svg(figure, "context"), f"Perplexity divided by the source's, by tokens of context: {'; '.join(spoken)}."


def _name_axes(figure: Figure, axes: Axes, across: str, up: str) -> None:
    """Labels, grid, and the names of the curves above the plot, where no curve runs through them."""
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.grid(color=_LINE)
    figure.legend(loc="outside upper left", frameon=False, labelcolor=_INK, handlelength=2.2)


def _figure(height_inches: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH_INCHES, height_inches), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.add_subplot()
    axes.patch.set_alpha(0)
    axes.tick_params(which="both", colors=_INK, length=0, labelsize=10)
    axes.xaxis.label.set_color(_MUTED)
    axes.yaxis.label.set_color(_MUTED)
    axes.set_axisbelow(True)
    for name, spine in axes.spines.items():
        spine.set_visible(name == "bottom")
        spine.set_color(_MUTED)
    return figure, axes


def _perplexity_scale(axes: Axes, which: str, values: Sequence[float]) -> None:
    """Logarithmic where the models lie far apart, with plain numbers on the ticks."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = min(values), max(values)
    if high > 3 * low:
        (axes.set_xscale if which == "x" else axes.set_yscale)("log")
        axis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
        axis.set_minor_formatter(NullFormatter())
        pad = (high / low) ** 0.15
        limits = low / pad, high * pad
    else:
        axis.set_major_locator(MaxNLocator(5))
        pad = max(0.2 * (high - low), 0.005 * high)
        limits = low - pad, high + pad
    (axes.set_xlim if which == "x" else axes.set_ylim)(*limits)
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))


def _shortened(name: str, longest: int = 26) -> str:
    return name if len(name) <= longest else "…" + name[1 - longest :]


def _tokens(count: float) -> str:
    for limit, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= limit:
            return f"{count / limit:.3g} {unit}"
    return f"{count:.0f}"


def _svg(figure: Figure, name: str) -> str:
    """The figure as an SVG element for the body of a page: no outside reference, ids of its own."""
    import matplotlib as mpl

    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 10}):
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\s+xmlns(:xlink)?="[^"]*"', "", text)
    text = re.sub(r'(<svg\b[^>]*?)\swidth="[^"]*"', r"\1", text)
    text = re.sub(r'(<svg\b[^>]*?)\sheight="[^"]*"', r"\1", text)
    text = text.replace("<svg ", '<svg aria-hidden="true" focusable="false" ', 1).replace("xlink:href", "href")
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'href="#', f'href="#{name}-', text)
    text = re.sub(r"url\(#", f"url(#{name}-", text)
    text = re.sub(r"font: ((?:\d+ )?)([\d.]+px)[^;\"]*", r"font: \1\2 var(--sans)", text)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    return text
