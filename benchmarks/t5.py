"""A T5, whose class has no KV-head setting: pretrained here by span corruption, converted, uptrained, compared.

    python benchmarks/t5.py -o t5                       # about a quarter of an hour on one core
    python benchmarks/t5.py -o t5 --tokens 100000       # a try in a few minutes

The model (8 heads of width 24, 4 layers on each side, gated feed-forward as in T5 1.1) is trained from random weights
on the Python standard library. Self- and cross-attention of its decoder are merged to fewer KV heads by `mean`, and by
`folded` where that is offered for such models; each result is uptrained on a share of the pretraining tokens with the
original as teacher. The table is on held-out modules, per token of the spans that are to be written; a run that
stopped continues.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

from headfold import (
    EvalSettings,
    UptrainSettings,
    compare,
    console,
    convert_checkpoint,
)
from headfold import uptrain_checkpoint as uptrain
from headfold.corpus import TRAIN, open_corpus
from headfold.errors import HeadfoldError, UnsupportedError
from headfold.eval.results import Comparison, ModelResult
from headfold.recipes.pretrain import SETTINGS, write_blank

CONTEXT = 128
SENTINELS = 100
METHODS = ("mean", "folded")


def main() -> None:
    options = _options()
    try:
        results = run(options)
    except HeadfoldError as problem:
        console.error(problem.message, problem.hint)
        sys.exit(problem.exit_code)
    title = f"{options.tokens:,} pretraining tokens, {options.fraction:.0%} of them for uptraining"
    columns = ("checkpoint", "KV heads", "target loss", "perplexity per target token", "change", "both caches")
    console.table(title, columns, [_row(model) for model in results.models])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path, required=True, help="folder for the models and the report")
    parser.add_argument("--tokens", type=int, default=2_000_000, help="to pretrain on; tokens that the encoder reads")
    parser.add_argument("--fraction", type=float, default=0.05, help="of them, to uptrain on")
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--calibration-tokens", type=int, default=65_536, help="that folded looks at")
    parser.add_argument("--test-tokens", type=int, default=16_384, help="target tokens to score")
    return parser.parse_args()


def run(options: argparse.Namespace) -> Comparison:
    """Every step whose folder is not there yet; returns the comparison."""
    out = options.out
    source = _once(out / "source", lambda folder: pretrain(folder, options.tokens))
    made = []
    for method in METHODS:
        try:
            converted = _once(out / method, lambda folder, method=method: convert(source, folder, method, options))
        except UnsupportedError as problem:
            console.warn(f"{method} is left out: {problem.message}")
            continue
        settings = UptrainSettings(
            data="stdlib", tokens=max(1, int(options.tokens * options.fraction)), sequence_length=CONTEXT, batch=16,
            micro_batch=16, learning_rate=1e-3, final_learning_rate=0.05, teacher="source",
        )  # fmt: skip
        uptrained = _once(
            out / f"{method}-uptrained", lambda folder, start=converted, how=settings: uptrain(start, folder, how)
        )
        made += [str(converted), str(uptrained)]
    settings = EvalSettings(tokens=options.test_tokens, window=CONTEXT)
    return compare(str(source), made, out=out / "report", settings=settings, overwrite=True)


def pretrain(folder: Path, tokens: int) -> Path:
    """A T5 from random weights, with the tokenizer of the bundled model and sentinels behind it."""
    from transformers import AutoTokenizer, T5Config

    with tempfile.TemporaryDirectory() as scratch:
        blank = Path(scratch)
        write_blank(blank, open_corpus("stdlib", TRAIN))
        tokenizer = AutoTokenizer.from_pretrained(blank)
        names = [f"<extra_id_{number}>" for number in reversed(range(SENTINELS))]  # the last id is <extra_id_0>
        tokenizer.add_special_tokens({"pad_token": "<pad>"})
        tokenizer.add_tokens(names, special_tokens=True)
        tokenizer.save_pretrained(blank)
        (blank / "generation_config.json").unlink()
        T5Config(
            architectures=["T5ForConditionalGeneration"], vocab_size=len(tokenizer), d_model=192, d_kv=24, d_ff=512,
            num_layers=4, num_decoder_layers=4, num_heads=8, feed_forward_proj="gated-gelu", dropout_rate=0.0,
            pad_token_id=tokenizer.pad_token_id, decoder_start_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id, dtype="float32",
        ).save_pretrained(blank)  # fmt: skip
        changes = {"tokens": tokens, "sequence_length": CONTEXT, "batch": 16, "micro_batch": 16, "eval_data": None}
        return uptrain(blank, folder, SETTINGS.model_copy(update=changes), from_scratch=True)


def convert(source: Path, folder: Path, method: str, options: argparse.Namespace) -> Path:
    """Mean of neighbours; folded with statistics of training text."""
    if method == "mean":
        return convert_checkpoint(source, folder, groups=options.groups)
    return convert_checkpoint(
        source, folder, groups=options.groups, method=method, calibration="stdlib",
        calibration_tokens=options.calibration_tokens, sequence_length=CONTEXT, refine=0,
    )  # fmt: skip


def _once(folder: Path, make: Any) -> Path:
    return folder if folder.exists() else Path(make(folder))


def _row(model: ModelResult) -> list[str]:
    value, pair = model.perplexity.value, model.against_source
    caches = [model.cache_bytes_per_token, model.cross_cache_bytes_per_token]
    change = "" if pair is None else f"{pair.perplexity_ratio.value - 1:+.1%}"
    sizes = " and ".join(console.human_bytes(size) for size in caches)
    return [
        model.name,
        "/".join(map(str, model.kv_heads)),
        f"{math.log(value):.3f}",
        f"{value:.2f}",
        change,
        sizes,
    ]


if __name__ == "__main__":
    main()
