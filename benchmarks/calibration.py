"""Calibration: its time against bare forward passes over the same tokens, and its peak memory.

    python benchmarks/calibration.py                      # ratio of times, on the bundled model
    python benchmarks/calibration.py --shape-gb 8         # peak memory on a Llama-shaped checkpoint of that size

Both are measured in this run. The shape has random bfloat16 weights. Memory is the largest anonymous resident set of a
process of its own; pages of the checkpoint itself are cache and belong to the system.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from headfold.checkpoint.load import load_tokenizer
from headfold.checkpoint.source import Checkpoint
from headfold.convert.calibration.collect import collect_statistics
from headfold.convert.calibration.offload import load_or_offload
from headfold.convert.calibration.text import token_blocks
from headfold.corpus import open_corpus

from convert import make_checkpoint, watched

BUNDLED = Path(__file__).parents[1] / "recipes" / "bundled" / "stdlib-5m-mha"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--shape-gb", type=float, default=0)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        _measure_memory(options.measure)
    elif options.shape_gb:
        _memory(options.shape_gb)
    else:
        _time(options.tokens, options.repeats)


def _time(tokens: int, repeats: int) -> None:
    """Calibration and bare forward passes in turn, so that a slow moment of the machine hits both."""
    tokenizer = load_tokenizer(BUNDLED)
    text_BT = token_blocks(open_corpus("stdlib#train"), tokenizer, tokens=tokens, sequence_length=512)
    with tempfile.TemporaryDirectory() as name:
        model = load_or_offload(BUNDLED, Checkpoint.open(BUNDLED).weight_bytes, Path(name))
        ratios = []
        for _ in range(repeats):
            began = time.perf_counter()
            with torch.inference_mode():
                for ids_BT in text_BT.split(8):
                    model.base_model(input_ids=ids_BT, use_cache=False)
            bare = time.perf_counter() - began
            began = time.perf_counter()
            collect_statistics(model, text_BT, Path(name) / "statistics", metadata={})
            ratios.append((time.perf_counter() - began) / bare)
    print(f"calibration / bare forward passes, {text_BT.numel():,} tokens: median {statistics.median(ratios):.2f}")
    print(f"of {repeats} ratios: {', '.join(f'{ratio:.2f}' for ratio in sorted(ratios))}")


def _memory(gigabytes: float) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "shape"
        size = make_checkpoint(folder, gigabytes, gigabytes)
        seconds, peak = watched([sys.executable, __file__, "--measure", str(folder)])
    print(f"{size / 2**30:.2f} GiB of weights left on disk: peak anonymous memory {peak:.2f} GiB, {seconds:.0f} s")


def _measure_memory(folder: Path) -> None:
    """In a process of its own: calibrate on a little text, weights on disk."""
    text_BT = torch.arange(256).reshape(2, 128)
    with tempfile.TemporaryDirectory() as name:
        # a size beyond any memory keeps the weights on disk whatever this machine has
        model = load_or_offload(folder, 2**60, Path(name))
        collect_statistics(model, text_BT, Path(name) / "statistics", metadata={})


if __name__ == "__main__":
    main()
