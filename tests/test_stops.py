"""Commands that a signal stops end with code 75, leave nothing half done, and go on when they are called again."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# Runs a command that comes to a halt in the n-th call of a function and says so by a file.
DRIVER = """
import signal, sys, time
from pathlib import Path
from unittest.mock import patch
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
place, nth, mark, *command = sys.argv[1:]
import importlib
module, _, path = place.partition(":")
owner = importlib.import_module(module)
*outer, name = path.split(".")
for part in outer:
    owner = getattr(owner, part)
real, calls = getattr(owner, name), []
def halting(*arguments, **named):
    calls.append(1)
    if len(calls) == int(nth):
        Path(mark).touch()
        time.sleep(120)
    return real(*arguments, **named)
setattr(owner, name, halting)
from headfold.cli import main
main(command)
"""


def _stopped(place: str, nth: int, number: signal.Signals, command: list[str], scratch: Path) -> tuple[int, str]:
    """Stop a command at a place, and return its exit code and what it said."""
    mark = scratch / "reached"
    child = subprocess.Popen(
        [sys.executable, "-c", DRIVER, place, str(nth), str(mark), *command],
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    began = time.monotonic()
    while not mark.exists():
        assert child.poll() is None, child.stderr.read()
        assert time.monotonic() - began < 200
        time.sleep(0.02)
    child.send_signal(number)
    said = child.communicate(timeout=100)[1]
    return child.returncode, said


CONVERT = ["convert", "SOURCE", "-g", "1", "-o", "OUT"]
REFINED = [
    *CONVERT,
    "--calibration",
    "TEXT",
    "--calibration-tokens",
    "1024",
    "--sequence-length",
    "32",
    "--refine",
    "4",
]
EVAL = ["eval", "SOURCE", "--data", "TEXT", "--tokens", "400", "--repeats", "1", "--new-tokens", "2",
        "--contexts", "8", "--decode-batches", "1", "--needles", "0", "-o", "OUT"]  # fmt: skip
SWEEP = ["sweep", "SOURCE", "--groups", "1", "--methods", "mean,first", "--data", "TEXT", "--tokens", "200",
         "--window", "32", "-o", "OUT"]  # fmt: skip


@pytest.mark.parametrize(
    ("command", "place", "nth", "number", "kept"),
    [
        (CONVERT, "headfold.convert.run:write_weights", 1, signal.SIGTERM, set()),
        (CONVERT, "headfold.convert.run:write_weights", 1, signal.SIGINT, set()),
        (REFINED, "headfold.convert.refinement.refine:_LayerRefiner.refine", 2, signal.SIGTERM, {"out.refinement"}),
        (EVAL, "headfold.eval.runner:Runner._time", 1, signal.SIGINT, {"out.partial"}),
        (SWEEP, "headfold.recipes.sweep:_convert_and_measure", 2, signal.SIGTERM, {"out"}),
    ],
    ids=["convert", "convert, Ctrl-C", "refinement", "eval", "sweep"],
)
def test_a_signal_is_a_clean_stop(command, place, nth, number, kept, tiny_checkpoint, text_file, tmp_path):
    places = {"SOURCE": str(tiny_checkpoint), "TEXT": str(text_file), "OUT": str(tmp_path / "work" / "out")}
    words = [places.get(word, word) for word in command]
    (tmp_path / "work").mkdir()
    code, said = _stopped(place, nth, number, words, tmp_path)
    assert code == 75, said
    assert "stopped:" in said
    assert "The same command" in said
    assert "error:" not in said
    assert "Traceback" not in said
    assert {file.name for file in (tmp_path / "work").iterdir()} == kept
    again = subprocess.run(
        [sys.executable, "-m", "headfold", *words], capture_output=True, text=True, timeout=250, check=False
    )
    assert again.returncode == 0, again.stderr
    assert "out" in {file.name for file in (tmp_path / "work").iterdir()}
    if "out.refinement" in kept:
        assert "1 of 2 layers are refined already" in again.stderr


def test_a_reader_that_has_seen_enough_is_no_error(tiny_checkpoint):
    command = f"{sys.executable} -m headfold inspect {tiny_checkpoint} --json | head -c 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=100)
    assert (done.stdout, done.stderr, done.returncode) == ("{", "", 0)


def test_a_fault_of_headfold_asks_for_a_report(tiny_checkpoint, monkeypatch, capfd):
    from headfold import cli
    from headfold.convert import inspect

    def fault(*_: object, **__: object) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr(inspect, "inspect_checkpoint", fault)
    with pytest.raises(SystemExit) as ended:
        cli.main(["inspect", str(tiny_checkpoint)])
    said = capfd.readouterr().err
    assert ended.value.code == 1
    assert "Traceback" in said
    assert "RuntimeError: a fault" in said
    assert f"headfold inspect {tiny_checkpoint}" in said.replace("\n", "")
