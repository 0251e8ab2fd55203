"""Fill the templates beside this file: each page is one file with its style and plots inside, and loads nothing."""

from __future__ import annotations

from typing import Any

PALETTE = {
    "page": ("#ffffff", "#12161b"),
    "card": ("#f5f7f9", "#1b2128"),
    "ink": ("#1a2027", "#e8edf2"),
    "muted": ("#59636e", "#9da8b3"),
    "line": ("#dde2e7", "#313a44"),
    "source": ("#59636e", "#a9b4bf"),
    "converted": ("#b4500b", "#f19149"),
    "uptrained": ("#0a63b0", "#61aeff"),
    "other": ("#7a3fa0", "#c79be6"),
}
"""Name of a colour → the colour on a light page, and on a dark one."""


def render(template: str, **values: Any) -> str:
    """Fill a template. Text is escaped, since names of models and documents may hold markup. A plot's SVG is not."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    pages = Environment(
        loader=PackageLoader(__package__),
        autoescape=True,
        # a value that is missing fails at once instead of leaving a gap
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # a narrow column must not put the sign on a line of its own
    pages.filters["unbroken"] = lambda text: text.replace(" %", "\u00a0%")
    pages.filters["drawing"] = Markup
    return pages.get_template(template).render(palette=PALETTE, **values)
