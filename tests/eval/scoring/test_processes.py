from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from eval_models import WORDS, tiny_llama, word_tokenizer
from headfold.eval.compare import compare
from headfold.eval.results import read_results
from headfold.eval.settings import EvalSettings

LENGTHS = [9, 30, 4, 61, 12, 7, 7, 22, 5]
NUMBERS = ("perplexity_ratio", "kl_nats", "same_top_token", "kl_percentiles")


def write_text(file: Path) -> str:
    lines = [" ".join(WORDS[(start + n) % len(WORDS)] for n in range(length)) for start, length in enumerate(LENGTHS)]
    file.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return str(file)


def launch(*arguments: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [*launcher, "--main_process_port", "0", "-m", "headfold", "eval", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=environment)


def test_two_processes_give_the_numbers_of_one(save, tmp_path):
    text = write_text(tmp_path / "text.jsonl")
    folders = [save(name, tiny_llama(seed=seed), word_tokenizer()) for seed, name in enumerate(("source", "other"))]
    settings = EvalSettings(data=text, window=16, batch=5, device="cpu", repeats=0, needles=0)
    alone = compare(folders[0], folders[1:], out=tmp_path / "alone", settings=settings)
    switches = ["--window", "16", "--batch", "5", "--device", "cpu", "--repeats", "0", "--needles", "0"]
    done = launch(*folders, "--data", text, *switches, "-o", str(tmp_path / "both"))
    assert done.returncode == 0, done.stderr[-2000:]
    both = read_results(tmp_path / "both")
    assert both.protocol.processes == 2
    assert both.protocol.tokens == alone.protocol.tokens == sum(LENGTHS) - len(LENGTHS)
    assert done.stdout.count("report.html") == 1  # one process talks
    for one, two in zip(alone.models, both.models, strict=True):
        assert two.nll_nats == pytest.approx(one.nll_nats, rel=1e-6)
    for name in NUMBERS:
        one, two = (found.models[1].against_source.model_dump()[name] for found in (alone, both))
        assert two == pytest.approx(one, rel=1e-6), name
    assert not (tmp_path / "both.partial").exists()
