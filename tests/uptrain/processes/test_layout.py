"""A conversion that pairs the wrong heads shows in the loss that uptraining starts from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from headfold.convert.run import convert_checkpoint
from headfold.uptrain.run import uptrain_checkpoint
from runs import metrics
from tiny import repeat_kv_heads
from transformers import AutoModelForCausalLM


def widened(trained: Path, folder: Path, *, tile: bool) -> Path:
    """The checkpoint with its 2 KV heads repeated to 4, a little noise on each; in the wrong order for ``tile``."""
    model = AutoModelForCausalLM.from_pretrained(trained, dtype=torch.float32)
    wide = repeat_kv_heads(model, 4, tile=tile)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in wide.named_parameters():
            if "k_proj" in name or "v_proj" in name:
                weight.add_(torch.randn(weight.shape, generator=generator) * 0.01 * weight.std())
    wide.save_pretrained(folder)
    for file in trained.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def test_the_loss_at_the_start_tells_near_equal_heads_from_wrongly_paired_ones(
    tiny_checkpoint, settings, text_file, tmp_path
):
    """A model that has learnt to count, its heads repeated and merged again: source, result and uniform guess."""
    watched = {"eval_data": str(text_file), "eval_tokens": 1500, "teacher": None}
    counting = settings(
        **watched,
        steps=150,
        sequence_length=32,
        batch=8,
        micro_batch=8,
        learning_rate=1e-2,
        save_every=1000,
        log_every=50,
    )
    trained = uptrain_checkpoint(tiny_checkpoint, tmp_path / "trained", counting)
    source = metrics(trained, "eval")[-1]["perplexity"]
    uniform = json.loads((tiny_checkpoint / "config.json").read_text())["vocab_size"]
    start = {}
    for tile in (False, True):
        wide = widened(trained, tmp_path / f"wide-{tile}", tile=tile)
        converted = convert_checkpoint(wide, tmp_path / f"converted-{tile}", groups=2, method="mean")
        out = uptrain_checkpoint(converted, tmp_path / f"out-{tile}", settings(**watched, steps=1))
        start[tile] = metrics(out, "eval")[0]["perplexity"]
    assert start[False] == pytest.approx(source, rel=0.03)
    assert 1.4 * source < start[True] < uniform
