"""Perplexity right after conversion, before any uptraining: every method on one checkpoint, in one table.

    python benchmarks/zero_shot.py                  # the bundled model, stdlib#train and stdlib#heldout
    python benchmarks/zero_shot.py CHECKPOINT --groups 1 --calibration TEXT --test OTHER_TEXT

Calibration and refinement see the calibration text only; the test text is scored and nothing else.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from headfold import console
from headfold.checkpoint.load import load_language_model, load_tokenizer
from headfold.checkpoint.source import Checkpoint
from headfold.convert.calibration.collect import collect_statistics
from headfold.convert.calibration.offload import load_or_offload
from headfold.convert.calibration.statistics import SOURCE, Statistics
from headfold.convert.calibration.text import token_blocks
from headfold.convert.methods.table import METHODS
from headfold.convert.refinement.fit import RefineSettings
from headfold.convert.refinement.on_disk import refine_folder
from headfold.convert.run import plan_conversion, run_plan
from headfold.corpus import open_corpus
from headfold.errors import HeadfoldError
from headfold.eval.scoring.perplexity import score
from headfold.eval.scoring.windows import TokenDocument, tokenize_text

BUNDLED = Path(__file__).parents[1] / "recipes" / "bundled" / "stdlib-5m-mha"
VARIANTS = {
    **{name: (name, "contiguous", False) for name in METHODS},
    "aligned+similarity": ("aligned", "similarity", False),
    "folded+similarity": ("folded", "similarity", False),
    "folded+refine": ("folded", "contiguous", True),
    "folded+similarity+refine": ("folded", "similarity", True),
    "mean+refine": ("mean", "contiguous", True),
}
"""Name on the command line → (method, grouping, refine)."""


def main() -> None:
    options = _options()
    if options.threads:
        torch.set_num_threads(options.threads)
    started = time.perf_counter()
    try:
        rows = list(_rows(options))
    except HeadfoldError as problem:
        console.error(problem.message, problem.hint)
        sys.exit(problem.exit_code)
    seconds = time.perf_counter() - started
    title = f"{options.checkpoint}: {options.test}, window {options.window}, {seconds:.0f} s in all"
    console.table(title, ("conversion", "KV heads", "perplexity", "vs source", "seconds"), rows)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, nargs="?", default=BUNDLED, help="folder of the source")
    parser.add_argument("--groups", default="4,2,1", help="KV heads of the results, e.g. 4,2,1")
    parser.add_argument(
        "--variants", default="mean,aligned,aligned+rescale,folded,folded+refine", help=", ".join(VARIANTS)
    )
    parser.add_argument("--calibration", default="stdlib#train", help="corpus for statistics and refinement")
    parser.add_argument("--calibration-tokens", type=int, default=98_304)
    parser.add_argument("--sequence-length", type=int, default=512, help="tokens of one sequence of calibration text")
    parser.add_argument("--test", default="stdlib#heldout", help="corpus that is scored")
    parser.add_argument("--test-tokens", type=int, default=16_384, help="score about so many; 0 for all")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--stride", type=int, default=None, help="default: half a window")
    parser.add_argument("--steps", type=int, default=RefineSettings.steps, help="of refinement, per layer")
    parser.add_argument("--learning-rate", type=float, default=RefineSettings.learning_rate)
    parser.add_argument("--batch-tokens", type=int, default=RefineSettings.batch_tokens)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=0, help="of torch; 0 for its default")
    return parser.parse_args()


def _rows(options: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    tokenizer = load_tokenizer(options.checkpoint)
    documents = tokenize_text(tokenizer, open_corpus(options.test), max_tokens=options.test_tokens or None).documents
    corpus = open_corpus(options.calibration)
    text_BT = token_blocks(
        corpus, tokenizer, tokens=options.calibration_tokens, sequence_length=options.sequence_length
    )
    source = Checkpoint.open(options.checkpoint)
    with tempfile.TemporaryDirectory(prefix="zero-shot-") as name:
        scratch = Path(name)
        expected = _perplexity(options.checkpoint, documents, options)
        kv_heads = plan_conversion(options.checkpoint, groups=1).family.kv_heads
        yield "source", str(kv_heads), f"{expected:.2f}", "", ""
        started = time.perf_counter()
        model = load_or_offload(options.checkpoint, source.weight_bytes, scratch, device=options.device)
        statistics = collect_statistics(
            model, text_BT, scratch / "statistics", metadata={SOURCE: source.digest()}, device=options.device
        )
        yield "calibration", "", "", "", f"{time.perf_counter() - started:.0f}"
        for groups in map(int, options.groups.split(",")):
            for variant in options.variants.split(","):
                found, seconds = _measure(variant, groups, options, text_BT, statistics, documents, scratch)
                change = f"{100 * (found / expected - 1):+.1f} %"
                console.info(f"{variant}, {groups} KV heads: {found:.2f} ({change}) in {seconds:.0f} s")
                yield variant, str(groups), f"{found:,.2f}", change, f"{seconds:.0f}"


def _measure(
    variant: str,
    groups: int,
    options: argparse.Namespace,
    text_BT: torch.Tensor,
    statistics: Statistics,
    documents: list[TokenDocument],
    scratch: Path,
) -> tuple[float, float]:
    """Convert and score: (perplexity, seconds of the conversion without calibration)."""
    method, grouping, refine = VARIANTS[variant]
    out = scratch / "converted"
    started = time.perf_counter()
    reads_text = METHODS[method].reads_text or grouping == "similarity"
    fields = {"statistics": statistics.file} if reads_text else {}
    plan = plan_conversion(options.checkpoint, groups=groups, method=method, grouping=grouping, **fields)
    run_plan(plan, out, overwrite=True)
    if refine:
        settings = RefineSettings(options.steps, options.learning_rate, options.batch_tokens)
        refine_folder(options.checkpoint, out, plan.family.layers, text_BT, settings, device=options.device)
    seconds = time.perf_counter() - started
    return _perplexity(out, documents, options), seconds


def _perplexity(folder: Path, documents: list[TokenDocument], options: argparse.Namespace) -> float:
    model: Any = load_language_model(folder).float().to(options.device)
    return score(model, documents, window=options.window, stride=options.stride).total().perplexity


if __name__ == "__main__":
    main()
