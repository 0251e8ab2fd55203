"""`kill -9` at twenty random moments of a conversion: the output is absent or complete, and the next run succeeds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import tiny_model

# One process imports the libraries once and forks a child for each conversion that is to be killed.
DRIVER = """
import hashlib, json, os, random, shutil, signal, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from headfold.convert.run import convert_checkpoint
source, work = Path(sys.argv[1]), Path(sys.argv[2])
out = work / "out"

def convert(groups=2, folder=out):
    return convert_checkpoint(source, folder, groups=groups, overwrite=True)

def state(folder):
    if not folder.exists():
        return "absent"
    files = {p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.rglob("*")
             if p.is_file()}
    named = "headfold.json" in files and "README.md" in files
    weights = {name: digest for name, digest in sorted(files.items()) if name not in ("headfold.json", "README.md")}
    return hashlib.sha256(repr((named, weights)).encode()).hexdigest()

def names():
    return {path.name for path in work.iterdir() if ".unfinished-" in path.name}

convert(folder=work / "warm")
began = time.monotonic()
convert(folder=work / "new")
seconds = time.monotonic() - began
convert(groups=4, folder=work / "old")
known = {"new": state(work / "new"), "old": state(work / "old")}
dice = random.Random(7)
found = []
for attempt in range(20):
    shutil.rmtree(out, ignore_errors=True)
    if attempt % 2:
        shutil.copytree(work / "old", out)
    before = names()
    child = os.fork()
    if child == 0:
        convert()
        os._exit(0)
    if attempt % 4 < 2:
        time.sleep(dice.uniform(0, 1.3 * seconds))
    else:  # planning takes most of the time, so half of the kills come after the first file
        while not names() - before and os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            time.sleep(0.0005)
        time.sleep(dice.uniform(0, 0.2 * seconds))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    beside = [path.name for path in work.iterdir() if path.name.startswith(("out", ".out"))]
    found.append({"state": state(out), "beside": beside, "old": attempt % 2 == 1})
convert()
last = {"state": state(out), "beside": [path.name for path in work.iterdir() if path.name.startswith((".", "out"))]}
print(json.dumps({"known": known, "found": found, "last": last}))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_kill_at_twenty_random_moments_leaves_the_output_absent_or_complete(tmp_path: Path) -> None:
    source, work = tmp_path / "m", tmp_path / "work"
    work.mkdir()
    tiny_model("llama", 8, 8, num_hidden_layers=12, vocab_size=4000).save_pretrained(source, max_shard_size="1MB")
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(source), str(work)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=800,
        check=True,
    )
    report = json.loads(done.stdout.splitlines()[-1])
    known, found = report["known"], report["found"]
    assert len(set(known.values())) == 2
    assert len(found) == 20
    for one in found:
        assert one["state"] in {"absent", known["new"], *([known["old"]] if one["old"] else [])}, one
        # whatever else lies there is hidden and named as unfinished
        hidden = (".unfinished-", ".replaced-", ".lock")
        assert all(name == "out" or any(word in name for word in hidden) for name in one["beside"]), one
    states = {one["state"] for one in found}
    assert len(states) >= 2, "every kill met the same state: the moments were not spread"
    assert any(len(one["beside"]) > ("out" in one["beside"]) for one in found), "no kill met a run at work"
    assert report["last"] == {"state": known["new"], "beside": ["out"]}
