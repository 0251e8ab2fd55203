"""Fixtures of the evaluation's tests, made by eval_models."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from eval_models import WORDS


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., str]:
    """Save a model with its tokenizer under a name, and return the folder."""

    def save_checkpoint(name: str, model: Any, tokenizer: Any) -> str:
        folder = tmp_path / name
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return str(folder)

    return save_checkpoint


@pytest.fixture
def text_file(tmp_path: Path) -> str:
    """Twelve documents of words as JSON lines, between 8 and 120 words long."""
    draw = random.Random(0)
    lines = [" ".join(draw.choice(WORDS) for _ in range(draw.randint(8, 120))) for _ in range(12)]
    file = tmp_path / "text.jsonl"
    file.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return str(file)
