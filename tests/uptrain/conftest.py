"""Settings of a short run, on one thread."""

from __future__ import annotations

import pytest
import torch
from headfold.uptrain.settings import UptrainSettings


@pytest.fixture(autouse=True)
def _one_thread():
    """Two processes on two cores in some tests; bit-equality must not hang on the number of threads either."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def settings(text_file):
    """Settings of a short run: 12 steps of 4 blocks of 16 tokens."""

    def make(**changes) -> UptrainSettings:
        values = {
            "data": str(text_file), "steps": 12, "block": 16, "batch": 4, "micro_batch": 2, "learning_rate": 3e-3,
            "precision": "fp32", "device": "cpu", "log_every": 1, "save_every": 5, "seed": 3,
        }  # fmt: skip
        return UptrainSettings(**{**values, **changes})

    return make
