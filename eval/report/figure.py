"""Draw plots as inline SVG with the page's own colours and fonts, so that they suit both of its themes."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..results import ModelResult
from .page import PALETTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# matplotlib knows no CSS variables, so it draws with a stand-in for each colour, which svg_of replaces by the variable.
# The stand-ins are all but black, and a real colour never is.
_STAND_INS = {name: f"#{number:02}{number:02}{number:02}" for number, name in enumerate(PALETTE, start=1)}
INK, MUTED, LINE = (_STAND_INS[name] for name in ("ink", "muted", "line"))
SERIES = tuple(_STAND_INS[name] for name in ("converted", "uptrained", "other", "source"))
"""Colours of curves that do not belong to a model."""
_MARKERS = {"source": "s", "converted": "o", "uptrained": "D", "other": "^"}
_DASHES: tuple[Any, ...] = ("solid", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)))
DASHED = (0, (4, 3))
_WIDTH_INCHES = 5.0


@dataclass(frozen=True)
class Plot:
    """A drawing for the page.

    Attributes:
        svg: the element, which loads nothing.
        alt_text: describes the drawing in words, for people who cannot see it.
    """

    title: str
    caption: str
    svg: str
    alt_text: str


def styles(models: Sequence[ModelResult]) -> list[dict[str, Any]]:
    """Choose colour and marker of each model by its role. Models of one role differ by their dashes."""
    seen: dict[str, int] = {}
    found = []
    for model in models:
        role = model.role
        dash = _DASHES[seen.get(role, 0) % len(_DASHES)]
        seen[role] = seen.get(role, 0) + 1
        found.append(
            {"color": _STAND_INS[role], "marker": _MARKERS[role], "linestyle": dash, "linewidth": 2, "markersize": 5}
        )
    return found


def name_axes(figure: Figure, axes: Axes, across: str, up: str) -> None:
    """Add labels and a grid, and name the curves above the plot, where no curve runs through the names."""
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.grid(color=LINE)
    names = axes.get_legend_handles_labels()[1]
    columns = 2 if len(names) > 4 and max(map(len, names)) < 20 else 1
    figure.legend(loc="outside upper left", frameon=False, labelcolor=INK, handlelength=3, ncols=columns)


def new_figure(height_inches: float) -> tuple[Figure, Axes]:
    """Make an empty plot, as wide as a column of the page."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH_INCHES, height_inches), layout="constrained")
    # transparent, so that the colour of the page shows
    figure.patch.set_alpha(0)
    axes = figure.add_subplot()
    axes.patch.set_alpha(0)
    axes.tick_params(which="both", colors=INK, length=0, labelsize=10)
    axes.xaxis.label.set_color(MUTED)
    axes.yaxis.label.set_color(MUTED)
    axes.set_axisbelow(True)
    for name, spine in axes.spines.items():
        spine.set_visible(name == "bottom")
        spine.set_color(MUTED)
    return figure, axes


def _steps(span: float) -> tuple[int, ...]:
    """Choose the ticks of a decade: the wider the axis, the fewer, so that their labels do not overlap."""
    if span > 1000:
        return (1,)
    return (1, 3) if span > 30 else (1, 2, 5)


def perplexity_scale(axes: Axes, which: str, values: Sequence[float]) -> None:
    """Make an axis logarithmic where the models lie far apart, with plain numbers on the ticks."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = min(values), max(values)
    # closer models differ visibly on a linear axis, which is easier to read
    if high > 3 * low:
        (axes.set_xscale if which == "x" else axes.set_yscale)("log")
        axis.set_major_locator(LogLocator(base=10, subs=_steps(high / low)))
        axis.set_minor_formatter(NullFormatter())
        pad = (high / low) ** 0.15
        limits = low / pad, high * pad
    else:
        axis.set_major_locator(MaxNLocator(5))
        pad = max(0.2 * (high - low), 0.005 * high)
        limits = low - pad, high + pad
    (axes.set_xlim if which == "x" else axes.set_ylim)(*limits)
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))


def label_of(name: str, longest: int = 34) -> str:
    """Prepare a name for matplotlib: cut a long one at the front, and escape what matplotlib would interpret."""
    cut = name if len(name) <= longest else "…" + name[1 - longest :]
    # matplotlib hides labels with a leading underscore, and reads text between dollars as a formula
    return ("\u200b" if cut.startswith("_") else "") + cut.replace("$", r"\$")


def plain_ticks(axes: Axes, places: Sequence[float], show: Callable[[float], str]) -> None:
    """Put ticks at these places and nowhere else, on a horizontal axis that is logarithmic to base 2."""
    from matplotlib.ticker import NullFormatter, NullLocator

    axes.set_xscale("log", base=2)
    axes.set_xticks(list(places), [show(place) for place in places])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())


def svg_of(figure: Figure, name: str) -> str:
    """Turn the figure into an SVG element for the body of a page, which loads nothing and has ids of its own."""
    import matplotlib as mpl

    # text stays text in the font of the page, and equal drawings get equal ids
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 10}):
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\s+xmlns(:xlink)?="[^"]*"', "", text)
    # without a size of its own, the drawing is as wide as its column
    text = re.sub(r'(<svg\b[^>]*?)\swidth="[^"]*"', r"\1", text)
    text = re.sub(r'(<svg\b[^>]*?)\sheight="[^"]*"', r"\1", text)
    text = text.replace("<svg ", '<svg aria-hidden="true" focusable="false" ', 1).replace("xlink:href", "href")
    # several plots stand in one page, where equal ids would mix up their clip paths and markers
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'href="#', f'href="#{name}-', text)
    text = re.sub(r"url\(#", f"url(#{name}-", text)
    text = re.sub(r"font: ((?:\d+ )?)([\d.]+px)[^;\"]*", r"font: \1\2 var(--sans)", text)
    for name_of_colour, stand_in in _STAND_INS.items():
        text = text.replace(stand_in, f"var(--{name_of_colour})")
    return text


def png_of(figure: Figure) -> bytes:
    """Turn the figure into a picture for slides and documents, in the light colours of the page."""
    from matplotlib.colors import to_hex

    on_white = {stand_in: PALETTE[name][0] for name, stand_in in _STAND_INS.items()}
    figure.patch.set(alpha=1, facecolor="white")
    for artist in figure.findobj():
        for kind in ("color", "edgecolor", "markeredgecolor", "markerfacecolor"):
            found = getattr(artist, f"get_{kind}", lambda: None)()
            shown = on_white.get(to_hex(found)) if isinstance(found, (str, tuple)) and len(found) > 2 else None
            if shown is not None:
                getattr(artist, f"set_{kind}")(shown)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=200)
    return buffer.getvalue()
