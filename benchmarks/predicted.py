"""Compare the damage predicted from weights and moments with measured perplexity: methods × groups × models.

    python benchmarks/predicted.py                       # the bundled model, and itself with 4 KV heads
    python benchmarks/predicted.py CHECKPOINT …          # others; with --calibration and --test for their text

Every conversion is scored without refinement. Printed: each one's predicted share of energy lost (K and V, mean
over the layers) and its perplexity over the source's, then Spearman's rank correlation for each model and over all.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path

from headfold import console
from headfold.checkpoint.load import load_language_model, load_tokenizer
from headfold.convert.calibration.calibrate import calibrate
from headfold.convert.calibration.statistics import Statistics
from headfold.convert.methods.context import MethodContext
from headfold.convert.methods.layer import convert_attention, read_attention
from headfold.convert.methods.table import METHODS
from headfold.convert.plan import Plan
from headfold.convert.run import convert_checkpoint, plan_conversion, run_plan
from headfold.corpus import open_corpus
from headfold.eval.scoring.perplexity import score
from headfold.eval.scoring.windows import TokenDocument, tokenize_text
from lost_energy import lost_shares
from scipy.stats import spearmanr

BUNDLED = Path(__file__).parents[1] / "recipes" / "bundled" / "stdlib-5m-mha"
COMPARED = ("mean", "first", "aligned", "aligned+rescale", "folded")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="*", type=Path)
    parser.add_argument("--calibration", default="stdlib#train")
    parser.add_argument("--calibration-tokens", type=int, default=32_768)
    parser.add_argument("--test", default="stdlib#heldout")
    parser.add_argument("--test-tokens", type=int, default=8192)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="predicted-") as name:
        checkpoints = options.checkpoints or [BUNDLED, _fewer_heads(Path(name), options)]
        found = {str(folder): list(_outcomes(folder, Path(name), options)) for folder in checkpoints}
    everything = [row for rows in found.values() for row in rows]
    table = [
        (method, str(groups), f"{lost:.3f}", f"{math.exp(worse):,.2f}") for method, groups, lost, worse in everything
    ]
    console.table("Predicted and measured", ("method", "KV heads", "energy lost", "× perplexity"), table)
    for folder, rows in {**found, "all": everything}.items():
        print(f"{folder}: rank correlation {spearmanr(*zip(*(row[2:] for row in rows), strict=True)).statistic:.2f}")


def _fewer_heads(scratch: Path, options: argparse.Namespace) -> Path:
    """Make a second model with a grouped source: the bundled one converted to 4 KV heads."""
    return convert_checkpoint(
        BUNDLED,
        scratch / "four-heads",
        groups=4,
        method="folded",
        grouping="contiguous",
        calibration=options.calibration,
        calibration_tokens=options.calibration_tokens,
        refine=0,
    )


def _outcomes(folder: Path, scratch: Path, options: argparse.Namespace) -> Iterator[tuple[str, int, float, float]]:
    """Yield (method, groups, predicted share lost, log of measured perplexity over the source's)."""
    documents = tokenize_text(
        load_tokenizer(folder), open_corpus(options.test), max_tokens=options.test_tokens
    ).documents
    file = scratch / f"{folder.name}.safetensors"
    first = plan_conversion(
        folder,
        groups=1,
        calibration=options.calibration,
        calibration_tokens=options.calibration_tokens,
        statistics=file,
    )
    statistics = calibrate(first.source, first.family.layers, first.settings)
    source = _nats(folder, documents)
    divisors = [count for count in range(first.family.kv_heads - 1, 0, -1) if first.family.kv_heads % count == 0]
    for groups in divisors:
        for method in COMPARED:
            fields = {"statistics": file} if METHODS[method].reads_text else {}
            plan = plan_conversion(folder, groups=groups, method=method, grouping="contiguous", **fields)
            out = run_plan(plan, scratch / "out", overwrite=True)
            yield method, groups, _lost(plan, statistics), _nats(out, documents) - source


def _lost(plan: Plan, statistics: Statistics) -> float:
    """Average over the layers the lost share of K energy plus the lost share of V energy."""
    shares = []
    for layer in plan.family.layers:
        attention = read_attention(plan.source, plan.family, layer)
        moment = statistics.second_moment(layer.layer)
        context = MethodContext(layer.layer, second_moment=moment)
        converted = convert_attention(plan.method, attention, plan.groups, context)
        shares.append(sum(lost_shares(attention, converted, moment)))
    return sum(shares) / len(shares)


def _nats(folder: Path, documents: list[TokenDocument]) -> float:
    return math.log(score(load_language_model(folder).float(), documents).total().perplexity)


if __name__ == "__main__":
    main()
