"""Fill the templates beside this file: each page is one file with its style and plots inside, and loads nothing."""

from __future__ import annotations

from typing import Any


def render(template: str, **values: Any) -> str:
    """Fill a template. Text is escaped, since names of models and documents may hold markup. A plot's SVG is not."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    pages = Environment(
        loader=PackageLoader(__package__),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.filters["unbroken"] = lambda text: text.replace(" %", "\u00a0%")
    pages.filters["drawing"] = Markup
    return pages.get_template(template).render(**values)
