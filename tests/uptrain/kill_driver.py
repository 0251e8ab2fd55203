"""A run that is killed at random moments, for test_kills.py: the libraries are imported once, each try is a fork.

    python kill_driver.py CHECKPOINT TEXT FOLDER KILLS SEED

Prints one JSON line: how many tries were killed, how many of them while a save or the result was being written, and
how many runs came to their end in between.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import torch
from headfold.uptrain.loop import uptrain_checkpoint
from headfold.uptrain.settings import UptrainSettings


def settings(text: str) -> UptrainSettings:
    return UptrainSettings(
        data=text, steps=20, block=16, batch=4, micro_batch=4, learning_rate=3e-3, precision="fp32", device="cpu",
        log_every=1, save_every=2, seed=3, tracker=("none",),
    )  # fmt: skip


def attempt(checkpoint: str, text: str, out: Path, seconds: float) -> bool:
    """Run in a fork that lives for so long; True when it was killed."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.dup2(os.open(out.with_name("log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
            uptrain_checkpoint(checkpoint, out, settings(text))
            code = 0
        finally:
            os._exit(code)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert status == 0, out.with_name("log").read_text()[-2000:]
            return False
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return status == signal.SIGKILL


def main(checkpoint: str, text: str, folder: Path, kills: int, seed: int) -> None:
    torch.set_num_threads(1)
    draw = random.Random(seed)
    began = time.monotonic()
    assert not attempt(checkpoint, text, folder / "reference", 600)
    duration = time.monotonic() - began
    killed, writing, finished = 0, 0, 0
    while killed < kills:
        out = folder / f"run-{finished}"
        if not attempt(checkpoint, text, out, draw.uniform(0.2, 0.8) * duration):
            finished += 1
            continue
        killed += 1
        assert not out.exists(), "a killed run left something that looks finished"
        left_over = [*folder.glob(f"{out.name}.training/*.tmp"), *folder.glob(f".{out.name}.unfinished-*")]
        writing += bool(left_over)
    while not (folder / f"run-{finished}").exists():
        assert not attempt(checkpoint, text, folder / f"run-{finished}", 600)
    print(json.dumps({"killed": killed, "writing": writing, "finished": finished + 1}))


if __name__ == "__main__":
    shutil.rmtree(sys.argv[3], ignore_errors=True)
    Path(sys.argv[3]).mkdir(parents=True)
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
