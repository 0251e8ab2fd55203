"""Set the dropout of a loaded model to another rate than its config.json says, and switch layer drop off.

A config often holds the rate for fine-tuning although the model was pretrained without dropout. T5 1.1 is an example,
and its uptraining must go without, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn


def set_dropout(model: Any, rate: float) -> None:
    """Set every rate of the model, wherever its class looks it up when it runs: in modules, or in their configs.

    Layer drop is switched off instead, because it leaves out whole layers.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = rate
    for attributes, name in _rates(model):
        attributes[name] = 0.0 if _drops_layers(name) else rate


def keep_all_layers(model: Any) -> bool:
    """Switch layer drop off (Fan et al. 2020, arXiv 1909.11556), and return whether there was any."""
    dropped = [(attributes, name) for attributes, name in _rates(model) if _drops_layers(name) and attributes[name] > 0]
    for attributes, name in dropped:
        attributes[name] = 0.0
    return bool(dropped)


def _drops_layers(name: str) -> bool:
    return name.endswith("layerdrop")


def _rates(model: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Find attributes that hold a rate. Classes call them dropout, attn_pdrop, resid_dropout, attn_dropout_p, and more.

    Each is yielded as (attributes, name), because some configs declare a rate as a whole number and refuse to have
    another one set.
    """
    for module in model.modules():
        for owner in (module, getattr(module, "config", None)):
            attributes = getattr(owner, "__dict__", {})
            for name, value in list(attributes.items()):
                # not isinstance, which would take a bool such as use_dropout for a rate
                if "drop" in name and type(value) in (int, float) and 0 <= value <= 1:
                    yield attributes, name
