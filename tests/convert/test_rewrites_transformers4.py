"""What a rewrite writes gives the same logits in transformers 4.57, installed beside the tests' own version."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from headfold.checkpoint.load import load_causal_lm
from headfold.convert.run import convert_checkpoint
from tiny import logits_of, tiny_model

OLD = ["transformers==4.57.6", "tokenizers>=0.22,<=0.23.0", "huggingface-hub>=0.34,<1.0"]
"""The last release of version 4, and the two packages that it wants older than version 5 does."""
_LOGITS = """
import sys
import torch
import transformers
from transformers import AutoModelForCausalLM
assert transformers.__version__.startswith("4.57"), transformers.__version__
ids = torch.load(sys.argv[1])
for folder in sys.argv[2:]:
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    with torch.no_grad():
        torch.save(model.eval()(input_ids=ids, use_cache=False).logits, folder + "/logits.pt")
"""
ROPE = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.75}
ROUTES: list[tuple[str, int, dict[str, Any]]] = [
    ("gpt_neox", 2, {"rope_parameters": ROPE}),
    ("gpt_neox", 2, {"rope_parameters": {**ROPE, "rope_type": "linear", "factor": 4.0}}),
    ("gpt_neox", 2, {"use_parallel_residual": False, "rope_parameters": ROPE}),
    ("gptj", 2, {"rotary_dim": 8}),
    ("codegen", 1, {"rotary_dim": 8}),
    ("gpt2", 1, {}),
    ("opt", 1, {"word_embed_proj_dim": 64}),
    ("falcon", 1, {"new_decoder_architecture": False, "multi_query": False, "alibi": True, "parallel_attn": False}),
]


@pytest.fixture(scope="session")
def old_transformers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with transformers 4.57, to be put in front of the module path; HEADFOLD_TRANSFORMERS_4 may name one."""
    kept = os.environ.get("HEADFOLD_TRANSFORMERS_4")
    folder = Path(kept) if kept else tmp_path_factory.mktemp("transformers4")
    if (folder / "transformers").exists():
        return folder
    done = _pip("install", "--target", str(folder), *OLD)
    if done.returncode and _pip("download", "--dest", str(folder / "probe"), "six").returncode:
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stderr
    return folder


def _pip(action: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", action, "--quiet", "--disable-pip-version-check", "--no-deps", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


def _old_logits(old: Path, folders: list[Path], ids: torch.Tensor, scratch: Path) -> list[torch.Tensor]:
    torch.save(ids, scratch / "ids.pt")
    environment = {**os.environ, "PYTHONPATH": str(old), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", _LOGITS, str(scratch / "ids.pt"), *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return [torch.load(folder / "logits.pt") for folder in folders]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_transformers_4_reads_the_same_model(old_transformers: Path, tmp_path: Path) -> None:
    folders = []
    for number, (model_type, groups, over) in enumerate(ROUTES):
        source = tmp_path / f"source-{number}"
        tiny_model(model_type, **over).save_pretrained(source)
        folders.append(convert_checkpoint(source, tmp_path / f"out-{number}", groups=groups))
    control = tmp_path / "control"  # what transformers 5 itself would write, which version 4 reads as another model
    load_causal_lm(folders[0]).save_pretrained(control)
    assert "rope_theta" not in json.loads((control / "config.json").read_text())

    ids = torch.randint(5, 200, (2, 12), generator=torch.Generator().manual_seed(1))
    *found, wrong = _old_logits(old_transformers, [*folders, control], ids, tmp_path)
    for (model_type, _, _), folder, logits in zip(ROUTES, folders, found, strict=True):
        expected = logits_of(load_causal_lm(folder).eval())
        assert ((logits - expected).abs().max() / expected.abs().max()).item() < 1e-5, model_type
    expected = logits_of(load_causal_lm(control).eval())
    assert ((wrong - expected).abs().max() / expected.abs().max()).item() > 1e-2
