"""A rewritten checkpoint gives the same logits in transformers 4.57, installed beside the tests' own version."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from headfold.checkpoint.load import load_language_model
from headfold.convert.run import convert_checkpoint
from tiny import PAIRS, logits_of, tiny_model, tiny_pair

OLD = ["transformers==4.57.6", "tokenizers>=0.22,<=0.23.0", "huggingface-hub>=0.34,<1.0"]
"""The last release of version 4, and the two packages of which it needs older releases than version 5."""
_LOGITS = """
import json
import sys
import torch
import transformers
from transformers import AutoModelForCausalLM
assert transformers.__version__.startswith("4.57"), transformers.__version__
ids, mask = torch.load(sys.argv[1])
for folder in sys.argv[2:]:
    own = "auto_map" in json.load(open(folder + "/config.json"))
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, trust_remote_code=own)
    assert not any(report.values()), report
    with torch.no_grad():
        logits = model.eval()(input_ids=ids, use_cache=False).logits
        how = dict(attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=250, eos_token_id=None)
        written = [model.generate(ids, use_cache=cached, **how) for cached in (True, False)] if own else []
    torch.save((logits, written), folder + "/found.pt")
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
    ("gpt2", 2, {}),
    ("opt", 2, {"word_embed_proj_dim": 64}),
    ("opt", 2, {"word_embed_proj_dim": 32, "do_layer_norm_before": False}),
    ("gpt_neo", 2, {"attention_types": [[["global", "local"], 1]], "window_size": 4}),
    ("bloom", 2, {}),
    ("mpt", 2, {}),
]


@pytest.fixture(scope="session")
def old_transformers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install transformers 4.57 into a folder for the module path. HEADFOLD_TRANSFORMERS_4 may name one that has it."""
    named = os.environ.get("HEADFOLD_TRANSFORMERS_4")
    folder = Path(named) if named else tmp_path_factory.mktemp("transformers4")
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


def _old_answers(
    old: Path, folders: list[Path], ids: torch.Tensor, mask: torch.Tensor, scratch: Path
) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Return each folder's logits and, if its class is our own, the text it writes with and without a cache."""
    torch.save((ids, mask), scratch / "ids.pt")
    environment = {
        **os.environ,
        "PYTHONPATH": str(old),
        "HF_HUB_OFFLINE": "1",
        "HF_MODULES_CACHE": str(scratch / "modules"),
    }
    command = [sys.executable, "-c", _LOGITS, str(scratch / "ids.pt"), *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return [torch.load(folder / "found.pt") for folder in folders]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_transformers_4_reads_the_same_model(old_transformers: Path, tmp_path: Path) -> None:
    folders = []
    for number, (model_type, groups, over) in enumerate(ROUTES):
        source = tmp_path / f"source-{number}"
        tiny_model(model_type, **over).save_pretrained(source)
        folders.append(convert_checkpoint(source, tmp_path / f"out-{number}", groups=groups))
    control = tmp_path / "control"  # what transformers 5 itself would write, which version 4 reads as another model
    load_language_model(folders[0]).save_pretrained(control)
    assert "rope_theta" not in json.loads((control / "config.json").read_text())

    ids = torch.randint(5, 200, (2, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    *found, (wrong, _) = _old_answers(old_transformers, [*folders, control], ids, mask, tmp_path)
    how = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 250, "eos_token_id": None}
    for (model_type, _, _), folder, (logits, written) in zip(ROUTES, folders, found, strict=True):
        model = load_language_model(folder).eval()
        expected = logits_of(model)
        assert ((logits - expected).abs().max() / expected.abs().max()).item() < 1e-5, model_type
        assert all(torch.equal(text, model.generate(ids, **how)) for text in written), model_type
    assert sum(len(written) for _, written in found) == 12  # six of them are of our own type
    expected = logits_of(load_language_model(control).eval())
    assert ((wrong - expected).abs().max() / expected.abs().max()).item() > 1e-2


_TRANSLATED = """
import sys
import torch
import transformers
from transformers import AutoModelForSeq2SeqLM
assert transformers.__version__.startswith("4.57"), transformers.__version__
given = torch.load(sys.argv[1])
for folder in sys.argv[2:]:
    try:
        AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=False)
    except ValueError as problem:
        assert "trust_remote_code" in str(problem)
    else:
        raise AssertionError("its code ran without being trusted")
    model, report = AutoModelForSeq2SeqLM.from_pretrained(folder, output_loading_info=True, trust_remote_code=True)
    assert not report["missing_keys"] and not report["mismatched_keys"], report
    read = {name: given[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        logits = model.eval()(**given, use_cache=False).logits
        written = [model.generate(**read, max_new_tokens=6, min_new_tokens=6, use_cache=kept) for kept in (True, False)]
        cache = model(**given, use_cache=True).past_key_values
    halves = (cache.self_attention_cache, cache.cross_attention_cache)
    heads = {layer.keys.shape[1] for half in halves for layer in half.layers}
    model.save_pretrained(folder + "-again")
    again = AutoModelForSeq2SeqLM.from_pretrained(folder + "-again", trust_remote_code=True).eval()
    with torch.no_grad():
        assert torch.equal(again(**given, use_cache=False).logits, logits)
    torch.save((logits, written, heads), folder + "/found.pt")
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_transformers_4_runs_the_code_of_encoder_decoders(old_transformers: Path, tmp_path: Path) -> None:
    folders = []
    for model_type in PAIRS:
        tiny_pair(model_type).save_pretrained(tmp_path / model_type)
        folders.append(convert_checkpoint(tmp_path / model_type, tmp_path / f"out-{model_type}", groups=2))
    ids = torch.randint(5, 200, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :3] = mask[1, 7:] = 0
    given = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids[:, 2:]}
    torch.save(given, tmp_path / "given.pt")
    environment = {**os.environ, "PYTHONPATH": str(old_transformers), "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-c", _TRANSLATED, str(tmp_path / "given.pt"), *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    for folder in folders:
        logits, (cached, uncached), heads = torch.load(folder / "found.pt")
        model = load_language_model(folder).eval()
        with torch.no_grad():
            expected = model(**given, use_cache=False).logits
        assert ((logits - expected).abs().max() / expected.abs().max()).item() < 1e-5, folder.name
        here = model.generate(ids, attention_mask=mask, max_new_tokens=6, min_new_tokens=6)
        assert torch.equal(cached, uncached), folder.name
        assert torch.equal(cached, here), folder.name
        assert heads == {2}
