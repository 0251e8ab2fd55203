"""Refinement of a model that is larger than memory: its peak memory, one layer at a time from disk.

    python benchmarks/refine.py                  # an 8 GB Llama shape; needs 20 GB of disk

The shape has random bfloat16 weights, is converted to 8 KV heads by `mean`, and both checkpoints stay on disk, whatever
memory this machine has. A few steps on a few tokens: memory depends on the layer and the batch, time is not the point.
Memory is the largest anonymous resident set of a process of its own.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from headfold.convert.calibration import offload
from headfold.convert.refinement.fit import RefineSettings
from headfold.convert.refinement.on_disk import refine_folder
from headfold.convert.run import plan_conversion, run_plan

from convert import make_checkpoint, watched

GROUPS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=8, help="Size of the source, in 10⁹ bytes.")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--batch-tokens", type=int, default=1024)
    parser.add_argument("--folder", type=Path, help="Where to work; default: the system's temporary folder.")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        _refine(options.measure, options)
        return
    with tempfile.TemporaryDirectory(prefix="headfold-benchmark-", dir=options.folder) as name:
        place = Path(name)
        size = make_checkpoint(place / "source", options.gb, options.gb)
        run_plan(plan_conversion(place / "source", groups=GROUPS), place / "converted")
        sizes = [
            f"--{key}={getattr(options, key.replace('-', '_'))}"
            for key in ("tokens", "sequence_length", "batch-tokens")
        ]
        seconds, peak = watched([sys.executable, __file__, *sizes, "--measure", str(place)])
    print(f"{size / 2**30:.2f} GiB of weights left on disk: peak anonymous memory {peak:.2f} GiB, {seconds:.0f} s")


def _refine(place: Path, options: argparse.Namespace) -> None:
    """In a process of its own: two steps a layer, weights on disk."""
    offload._IN_MEMORY_SHARE = 0.0
    plan = plan_conversion(place / "source", groups=GROUPS)
    text_BT = torch.randint(0, 30_000, (options.tokens // options.sequence_length, options.sequence_length))
    settings = RefineSettings(steps=2, batch_tokens=options.batch_tokens)
    fits = refine_folder(place / "source", place / "converted", plan.family.layers, text_BT, settings)
    print(*fits, sep="\n", file=sys.stderr)


if __name__ == "__main__":
    main()
