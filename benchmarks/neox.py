"""A type whose class has no KV-head setting: pretrained here, converted to fewer KV heads, uptrained, compared.

    python benchmarks/neox.py -o neox                       # about half an hour on two cores
    python benchmarks/neox.py -o neox --tokens 200000       # a try in a few minutes
    python benchmarks/neox.py -o bloom --type bloom         # one that becomes our own decoder

The model (8 heads of width 24, 4 layers; GPT-NeoX with two norms side by side as in Pythia, unless --type says
otherwise) is trained from random weights on the Python standard library, rewritten, merged by `mean` and by `folded`;
each result is uptrained on a share of the pretraining tokens with the original as teacher. The table is on held-out
modules; a run that stopped continues.
"""

from __future__ import annotations

import argparse
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
from headfold.errors import HeadfoldError
from headfold.eval.results import Comparison
from headfold.recipes.pretrain import SETTINGS, write_blank

CONTEXT = 256
RATES = {"mean": 1e-3, "folded": 2e-4}
"""Peak learning rate of uptraining: what was merged well is only disturbed by a high one (docs/results.md)."""
_GPT = {"n_embd": 192, "n_layer": 4, "n_head": 8, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
TYPES: dict[str, dict[str, Any]] = {
    "gpt_neox": {
        "hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 8,
        "max_position_embeddings": CONTEXT,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "gpt2": {**_GPT, "n_positions": CONTEXT},
    "gpt_neo": {
        "hidden_size": 192, "num_layers": 4, "num_heads": 8, "max_position_embeddings": CONTEXT, "window_size": 64,
        "attention_types": [[["global", "local"], 2]],
    },
    "bloom": {"hidden_size": 192, "n_layer": 4, "n_head": 8, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    "mpt": {"d_model": 192, "n_layers": 4, "n_heads": 8, "max_seq_len": CONTEXT},
}  # fmt: skip
"""Type → its settings: four layers of eight heads."""


def main() -> None:
    options = _options()
    try:
        results = run(options)
    except HeadfoldError as problem:
        console.error(problem.message, problem.hint)
        sys.exit(problem.exit_code)
    rows = [
        [model.name, "/".join(map(str, model.kv_heads)), f"{model.perplexity.value:.2f}"] for model in results.models
    ]
    console.table(f"{options.tokens:,} pretraining tokens, {options.fraction:.0%} of them for uptraining",
                  ("checkpoint", "KV heads", "perplexity"), rows)  # fmt: skip


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path, required=True, help="folder for the models and the report")
    parser.add_argument("--tokens", type=int, default=4_000_000, help="to pretrain on")
    parser.add_argument("--fraction", type=float, default=0.05, help="of them, to uptrain on")
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--calibration-tokens", type=int, default=65_536, help="that folded looks at")
    parser.add_argument("--refine", type=int, help="steps per layer after folded; default as `headfold convert` has it")
    parser.add_argument("--test-tokens", type=int, default=32_768)
    parser.add_argument("--type", choices=TYPES, default="gpt_neox")
    parser.add_argument("--parallel", action=argparse.BooleanOptionalAction, default=True,
                        help="gpt_neox: attention and MLP side by side (phi) or in a row (nemotron)")  # fmt: skip
    return parser.parse_args()


def run(options: argparse.Namespace) -> Comparison:
    """Every step whose folder is not there yet; returns the comparison."""
    out = options.out
    source = _once(out / "source", lambda folder: pretrain(folder, options))
    made = []
    for method in RATES:
        converted = _once(out / method, lambda folder, method=method: convert(source, folder, method, options))
        settings = UptrainSettings(
            data="stdlib", tokens=int(options.tokens * options.fraction), sequence_length=CONTEXT, batch=8,
            micro_batch=8,
            learning_rate=RATES[method], final_learning_rate=0.05, teacher="source",
        )  # fmt: skip
        uptrained = _once(
            out / f"{method}-uptrained", lambda folder, start=converted, how=settings: uptrain(start, folder, how)
        )
        made += [str(converted), str(uptrained)]
    settings = EvalSettings(tokens=options.test_tokens, window=CONTEXT, needles=0)
    return compare(str(source), made, out=out / "report", settings=settings, overwrite=True)


def pretrain(folder: Path, options: argparse.Namespace) -> Path:
    """A model from random weights, with the tokenizer of the bundled model."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    sizes = TYPES[options.type] | ({"use_parallel_residual": options.parallel} if options.type == "gpt_neox" else {})
    with tempfile.TemporaryDirectory() as scratch:
        blank = Path(scratch)
        write_blank(blank, open_corpus("stdlib", TRAIN))
        AutoConfig.for_model(
            options.type, architectures=[MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[options.type]], vocab_size=4096,
            bos_token_id=0, eos_token_id=0, dtype="float32", **sizes,
        ).save_pretrained(blank)  # fmt: skip
        changes = {
            "tokens": options.tokens,
            "sequence_length": CONTEXT,
            "batch": 16,
            "micro_batch": 16,
            "eval_data": None,
        }
        return uptrain(blank, folder, SETTINGS.model_copy(update=changes), from_scratch=True)


def convert(source: Path, folder: Path, method: str, options: argparse.Namespace) -> Path:
    """Mean of neighbours; folded with statistics of training text, by similarity where heads may change places."""
    if method == "mean":
        return convert_checkpoint(source, folder, groups=options.groups)
    return convert_checkpoint(
        source, folder, groups=options.groups, method=method, calibration="stdlib",
        calibration_tokens=options.calibration_tokens, sequence_length=CONTEXT, refine=options.refine,
    )  # fmt: skip


def _once(folder: Path, make: Any) -> Path:
    return folder if folder.exists() else Path(make(folder))


if __name__ == "__main__":
    main()
