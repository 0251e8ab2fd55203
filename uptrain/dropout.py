"""Dropout of a loaded model set to another rate than its config.json says.

A config often holds the rate for fine-tuning, while pretraining went without: that of T5 1.1, for example, whose
uptraining must go without, too.
"""

from __future__ import annotations

from typing import Any

from torch import nn

_RATES = (
    "dropout",
    "dropout_rate",
    "attention_dropout",
    "activation_dropout",
    "hidden_dropout",
    "attn_pdrop",
    "embd_pdrop",
    "resid_pdrop",
    "classifier_dropout",
)
"""What classes of transformers call a rate, in their configs and in their modules."""


def set_dropout(model: Any, rate: float) -> None:
    """Set every rate of the model, wherever its class looks it up when it runs: in modules, or in their configs."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = rate
        for place in (module, getattr(module, "config", None)):
            for name in _RATES:
                if type(getattr(place, name, None)) in (int, float):
                    setattr(place, name, rate)
