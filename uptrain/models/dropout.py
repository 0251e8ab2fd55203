"""Dropout of a loaded model set to another rate than its config.json says, and layer drop switched off.

A config often holds the rate for fine-tuning, while pretraining went without: that of T5 1.1, for example, whose
uptraining must go without, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn


def set_dropout(model: Any, rate: float) -> None:
    """Set every rate of the model, wherever its class looks it up when it runs: in modules, or in their configs.

    Layer drop leaves whole layers out, so it is no dropout of that rate: it is switched off.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = rate
    for place, name in _rates(model):
        place[name] = 0.0 if _drops_layers(name) else rate


def keep_all_layers(model: Any) -> bool:
    """Switch layer drop off (Fan et al. 2020, arXiv 1909.11556); whether there was any."""
    dropped = [(place, name) for place, name in _rates(model) if _drops_layers(name) and place[name] > 0]
    for place, name in dropped:
        place[name] = 0.0
    return bool(dropped)


def _drops_layers(name: str) -> bool:
    return name.endswith("layerdrop")


def _rates(model: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Attributes that hold a rate: classes call them dropout, attn_pdrop, resid_dropout, attn_dropout_p, and so on.

    As dictionaries, since some configs declare a rate to be a whole number and would refuse another.
    """
    for module in model.modules():
        for place in (module, getattr(module, "config", None)):
            attributes = getattr(place, "__dict__", {})
            for name, value in list(attributes.items()):
                if "drop" in name and type(value) in (int, float) and 0 <= value <= 1:
                    yield attributes, name
