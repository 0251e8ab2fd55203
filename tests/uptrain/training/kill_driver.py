"""A run that is killed at random moments, for test_kills.py: the libraries are imported once, each try is a fork.

    python kill_driver.py CHECKPOINT TEXT FOLDER KILLS SEED

Prints one JSON line: how many tries were killed, how many of them while a save or the result was being written, how
many went on from a save, and how many runs came to their end.
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
from headfold.uptrain.run import uptrain_checkpoint
from headfold.uptrain.settings import UptrainSettings


def settings(text: str) -> UptrainSettings:
    return UptrainSettings(
        data=text, steps=20, sequence_length=16, batch=4, micro_batch=4, learning_rate=3e-3, precision="fp32",
        device="cpu",
        log_every=1, save_every=2, seed=3, tracker=("none",),
    )  # fmt: skip


def being_written(out: Path) -> bool:
    return any([*out.parent.glob(f"{out.name}.training/*.tmp"), *out.parent.glob(f".{out.name}.unfinished-*")])


def newest_save(out: Path) -> int:
    """Its step; 0 where there is none."""
    saves = [one.name for one in out.parent.glob(f"{out.name}.training/step-*") if not one.suffix]
    return max((int(name.removeprefix("step-")) for name in saves), default=0)


class Moment:
    """When to kill: ``seconds`` after the save of step ``step`` is there, and with ``amid`` while one is written.

    Runs spend most of their time in getting ready, so a moment drawn from the whole of it would hardly ever find one
    that trains.
    """

    def __init__(self, out: Path, step: int, seconds: float, amid: bool) -> None:
        self.out, self.step, self.seconds, self.amid = out, step, seconds, amid
        self._since: float | None = None
        for stale in out.parent.glob(f"{out.name}.training/*.tmp") if amid else ():
            shutil.rmtree(stale)  # the run would do so itself; here it would pass for a new one

    def has_come(self) -> bool:
        if self._since is None and newest_save(self.out) >= self.step:
            self._since = time.monotonic()
        if self._since is None or time.monotonic() < self._since + self.seconds:
            return False
        return not self.amid or being_written(self.out)


def attempt(checkpoint: str, text: str, out: Path, moment: Moment | None = None) -> bool:
    """Run in a fork that lives until the moment has come; True when it was killed."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.dup2(os.open(out.with_name("log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
            uptrain_checkpoint(checkpoint, out, settings(text))
            code = 0
        finally:
            os._exit(code)
    while moment is None or not moment.has_come():
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert status == 0, out.with_name("log").read_text()[-2000:]
            return False
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return status == signal.SIGKILL


def draw_moment(draw: random.Random, out: Path, duration: float) -> Moment:
    """While it gets ready, or soon after one of its next saves, or in the midst of one."""
    kind = draw.choice(["getting ready", "training", "training", "saving"])
    if kind == "getting ready":
        return Moment(out, 0, draw.uniform(0.1, 0.8) * duration, amid=False)
    ahead = newest_save(out) + 2 * draw.randint(1, 2)
    return Moment(out, ahead, draw.uniform(0, 0.05), amid=kind == "saving")


def main(checkpoint: str, text: str, folder: Path, kills: int, seed: int) -> None:
    torch.set_num_threads(1)
    draw = random.Random(seed)
    began = time.monotonic()
    assert not attempt(checkpoint, text, folder / "reference")
    duration = time.monotonic() - began
    killed, writing, finished = 0, 0, 0
    while killed < kills:
        out = folder / f"run-{finished}"
        if not attempt(checkpoint, text, out, draw_moment(draw, out, duration)):
            finished += 1
            continue
        if out.exists():  # killed between the end of its work and that of the process
            finished += 1
        killed += 1
        writing += being_written(out)
    while not (folder / f"run-{finished}").exists():
        assert not attempt(checkpoint, text, folder / f"run-{finished}")
    went_on = (folder / "log").read_text().count("Continuing at step")
    print(json.dumps({"killed": killed, "writing": writing, "went on": went_on, "finished": finished + 1}))


if __name__ == "__main__":
    shutil.rmtree(sys.argv[3], ignore_errors=True)
    Path(sys.argv[3]).mkdir(parents=True)
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
