"""Measure how fast uptraining recovers the loss of conversion on the bundled model: held-out perplexity over tokens.

    python benchmarks/recovery.py -o recovery            # all rows; a run that was stopped goes on
    python benchmarks/recovery.py -o recovery --list     # the rows, and which are done
    python benchmarks/recovery.py -o recovery --only g1-folded-teacher

Rows: G = K/4 and 1 KV heads, by mean, folded, and folded with refinement, each from the text alone and with the source
as teacher; and the source itself trained on for the same tokens, the control. A run of 5 % has its own schedule, so
every share of the pretraining tokens is a run of its own that ends where its learning rate ends.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BUNDLED = Path(__file__).parents[1] / "recipes" / "bundled" / "stdlib-5m-mha"
METHODS = {
    "mean": ["--method", "mean"],
    "folded": ["--method", "folded", "--calibration", "stdlib", "--calibration-tokens", "65536", "--refine", "0"],
    "refined": ["--method", "folded", "--calibration", "stdlib", "--calibration-tokens", "393216", "--refine", "800"],
}
RATES = {"mean": 8e-4, "folded": 8e-4, "refined": 4e-4, None: 4e-4}
"""Peak learning rate by the start: the better it is, the more a high one disturbs it (docs/results.md)."""
FULL_RATE_SHARE = 0.05
"""From a good start a run that is shorter than this has no time to calm down from such a peak."""
KV_HEADS = 8


@dataclass(frozen=True)
class Row:
    """One line of the table: what is trained, and by what. ``groups`` None is the source itself."""

    groups: int | None
    method: str | None
    teacher: bool

    @property
    def name(self) -> str:
        if self.groups is None:
            return "source"
        return f"g{self.groups}-{self.method}" + ("-teacher" if self.teacher else "")


ROWS = [Row(None, None, False)] + [
    Row(groups, method, teacher) for groups in (KV_HEADS // 4, 1) for method in METHODS for teacher in (False, True)
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path, default=Path("recovery"))
    parser.add_argument("--model", type=Path, default=BUNDLED)
    parser.add_argument("--shares", default="1,2,5", help="percent of the pretraining tokens")
    parser.add_argument("--only", help="rows by name, with commas between")
    parser.add_argument("--lr", type=float, help="peak learning rate of every row; default: by the row's start")
    parser.add_argument("--weight", type=float, default=1.0, help="share of the divergence with a teacher")
    parser.add_argument("--schedule", default="cosine")
    parser.add_argument("--final", type=float, default=0.05)
    parser.add_argument("--eval-tokens", type=int, default=32768)
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    rows = [row for row in ROWS if options.only is None or row.name in options.only.split(",")]
    shares = [float(share) / 100 for share in options.shares.split(",")]
    if not options.list:
        options.out.mkdir(parents=True, exist_ok=True)
        for row in rows:
            for share in shares:
                measure(options, row, share)
    show(options, rows, shares)


def measure(options: argparse.Namespace, row: Row, share: float) -> None:
    """Convert and uptrain one row to one share, unless that is done; the uptrained weights are not kept."""
    key = f"{row.name}@{share:g}"
    if key in read(options.out):
        return
    began = time.monotonic()
    start = options.model if row.groups is None else converted(options, row)
    trained = options.out / key
    taught = ["--teacher", str(options.model), "--distillation-weight", str(options.weight)]
    teacher = taught if row.teacher else ["--no-teacher"]
    headfold(
        "uptrain", str(start), "-o", str(trained), "--data", "stdlib", "--fraction", str(share), "--pretraining-tokens",
        str(pretraining_tokens(options.model)), "--lr", str(options.lr or rate(row, share)),
        "--final-learning-rate", str(options.final), "--schedule", options.schedule, "--eval-data", "stdlib",
        "--eval-tokens", str(options.eval_tokens), "--seed", "0", "--tracker", "none", *teacher,
    )  # fmt: skip
    lines = [json.loads(line) for line in (trained / "headfold_metrics.jsonl").read_text().splitlines()]
    points = [line["perplexity"] for line in lines if line["kind"] == "eval"]
    found = {"before": points[0], "after": points[-1], "seconds": time.monotonic() - began}
    write(options.out, {**read(options.out), key: found})  # another process may have added its rows meanwhile
    subprocess.run(["rm", "-rf", str(trained), f"{trained}.logs"], check=True)


def rate(row: Row, share: float) -> float:
    """Peak learning rate; of a run from a good start in proportion to its length."""
    good = row.method in ("refined", None)
    return RATES[row.method] * (min(1.0, share / FULL_RATE_SHARE) if good else 1.0)


def converted(options: argparse.Namespace, row: Row) -> Path:
    folder: Path = options.out / f"g{row.groups}-{row.method}"
    if not folder.exists():
        where = ["--groups", str(row.groups), "-o", str(folder)]
        headfold("convert", str(options.model), *where, *METHODS[row.method or ""])
    return folder


def headfold(*arguments: str) -> None:
    print("headfold", *arguments, file=sys.stderr)
    subprocess.run([sys.executable, "-m", "headfold", *arguments], check=True, env=dict(os.environ))


def pretraining_tokens(model: Path) -> int:
    history = json.loads((model / "headfold.json").read_text())["history"]
    return int(next(entry["tokens"] for entry in history if entry["step"] == "pretrain"))


def read(out: Path) -> dict[str, Any]:
    file = out / "results.json"
    return json.loads(file.read_text()) if file.exists() else {}


def write(out: Path, results: dict[str, Any]) -> None:
    """Whole or not at all: a row that was measured is never lost."""
    temporary = out / "results.json.tmp"
    temporary.write_text(json.dumps(results, indent=2) + "\n")
    temporary.rename(out / "results.json")


def show(options: argparse.Namespace, rows: list[Row], shares: list[float]) -> None:
    """The table, and how far the last column is from the source as it is and as it is trained on alike."""
    results = read(options.out)
    control = results.get(f"source@{shares[-1]:g}")
    heads = ["row", "0 %", *(f"{100 * share:g} %" for share in shares), "against the source", "trained on alike"]
    print("| " + " | ".join(heads) + " |\n|:--|" + "--:|" * (len(shares) + 3))
    for row in rows:
        found = [results.get(f"{row.name}@{share:g}") for share in shares]
        before = next((f"{one['before']:.2f}" for one in found if one), "–")
        cells = [row.name, before, *(f"{one['after']:.2f}" if one else "–" for one in found)]
        for moment in ("before", "after"):
            known = found[-1] and control
            cells.append(f"{100 * (found[-1]['after'] / control[moment] - 1):+.1f} %" if known else "–")
        print("| " + " | ".join(cells) + " |")
    seconds = math.fsum(one["seconds"] for one in results.values())
    print(f"{len(results)} of {len(ROWS) * len(shares)} runs done in {seconds:,.0f} s")


if __name__ == "__main__":
    main()
