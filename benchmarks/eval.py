"""Measure the cost of scoring: against a bare forward pass, against lm-eval, and in memory against the plain way.

    python benchmarks/eval.py [CHECKPOINT] --tokens 8192

Three ratios, each measured in this run, the ways in turn: scored tokens per second of headfold over those of a forward
pass with the model's own loss on the same windows; over those of lm-eval's rolling log-likelihood of the same text and
batch size; and the peak of headfold's tensors over that of logits taken whole, at a vocabulary of 128,256. The text
comes in records of mixed length (`--pieces paragraphs`: a module's parts between blank lines) or as long documents
(`--pieces documents`). On a CPU seconds are those that the process computed, so that other processes on the machine do
not count. `--check` exits with 1 where a ratio misses its bar.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from headfold import console
from headfold.checkpoint.load import load_language_model, load_tokenizer
from headfold.corpus import Document, open_corpus
from headfold.eval.measures.capacity import peak_bytes
from headfold.eval.scoring.batches import collate, group_windows
from headfold.eval.scoring.perplexity import score
from headfold.eval.scoring.windows import TokenDocument, tokenize_text

BUNDLED = Path(__file__).parent.parent / "recipes" / "bundled" / "stdlib-5m-mha"
BARS = {"bare forward pass": (0.9, "at least"), "lm-eval": (2.0, "at least"), "peak memory": (0.5, "at most")}
VOCAB = 128_256


def main() -> None:
    options = _options()
    model = load_language_model(options.checkpoint, dtype=torch.float32).to(options.device).eval()
    tokenizer = load_tokenizer(options.checkpoint)
    texts = _texts(tokenizer, options)
    documents = tokenize_text(tokenizer, texts, max_tokens=None).documents
    ways: dict[str, Callable[[], Any]] = {
        "headfold": lambda: score(
            model, documents, window=options.window, stride=options.window, batch_size=options.batch
        ),
        "bare forward pass": lambda: bare(model, documents, options.window, options.batch),
        "lm-eval": _rolling(model, tokenizer, texts, options),
    }
    clock = time.process_time if options.device == "cpu" else time.perf_counter
    seconds = in_turn(ways, options.repeats, clock)
    tokens = sum(document.scored for document in documents)
    ours = statistics.median(seconds["headfold"])
    ratios = {name: statistics.median(taken) / ours for name, taken in seconds.items() if name != "headfold"}
    rows = [
        [
            name,
            f"{tokens / statistics.median(taken):,.0f}",
            f"{ratios[name]:.2f}×" if name in ratios else "",
            _spread(taken),
        ]
        for name, taken in seconds.items()
    ]
    title = (
        f"{tokens:,} tokens of {len(texts)} {options.pieces}, window {options.window}, batch {options.batch}, "
        f"{torch.get_num_threads()} threads"
    )
    console.table(title, ("way", "tokens/s", "headfold is", "seconds"), rows)
    chunked, whole = memory(options.window, options.batch)
    ratios["peak memory"] = chunked / whole
    sizes = [["headfold", console.human_bytes(chunked)], ["logits taken whole", console.human_bytes(whole)]]
    console.table(f"Peak of tensors at a vocabulary of {VOCAB:,}", ("way", "bytes"), sizes)
    sys.exit(_verdict(ratios) if options.check else 0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", type=Path, default=BUNDLED, help="folder; default: the bundled model")
    parser.add_argument("--data", default="stdlib#heldout")
    parser.add_argument("--tokens", type=int, default=8192, help="score about so many")
    parser.add_argument("--pieces", choices=("paragraphs", "documents"), default="paragraphs")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a ratio misses its bar")
    return parser.parse_args()


def _texts(tokenizer: Any, options: argparse.Namespace) -> list[Document]:
    """Pieces of text, in their own order, of about so many tokens together."""
    found, left = [], options.tokens
    for document in open_corpus(options.data):
        parts = document.text.split("\n\n") if options.pieces == "paragraphs" else [document.text]
        for text in parts:
            length = len(tokenizer(text, verbose=False)["input_ids"])
            if 8 <= length <= max(left, 64):
                found.append(Document(document.name, text))
                left -= length
            if left < options.tokens // 20:
                return found
    return found


@torch.no_grad()
def bare(model: Any, documents: list[TokenDocument], window: int, batch_size: int) -> None:
    """The model and its own loss on the windows that headfold scores, and nothing else."""
    for windows in group_windows(documents, window, window, batch_size):
        batch = collate(windows, documents)
        labels_BT = batch.ids_BT if batch.mask_BT is None else batch.ids_BT.masked_fill(batch.mask_BT == 0, -100)
        inputs = {"input_ids": batch.ids_BT, "attention_mask": batch.mask_BT, "labels": labels_BT}
        on_device = {name: tensor if tensor is None else tensor.to(model.device) for name, tensor in inputs.items()}
        model(**on_device, use_cache=False).loss.item()


def _rolling(model: Any, tokenizer: Any, texts: list[Document], options: argparse.Namespace) -> Callable[[], Any]:
    import logging

    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    theirs: Any = HFLM(pretrained=model, tokenizer=tokenizer, max_length=options.window - 1, batch_size=options.batch)
    asked = [Instance("loglikelihood_rolling", {}, (text.text,), number) for number, text in enumerate(texts)]

    def run() -> Any:
        return theirs.loglikelihood_rolling(asked, disable_tqdm=True)

    return run


def in_turn(ways: dict[str, Callable[[], Any]], repeats: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Seconds of each way, after one run each that is not timed."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, run in ways.items():
            began = clock()
            run()
            if repeat:
                taken[name].append(clock() - began)
    return taken


def memory(window: int, batch_size: int) -> tuple[int, int]:
    """Peak bytes of headfold's scoring and of the plain way, on a small random model with a large vocabulary."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCAB, (batch_size, window), generator=generator)
    documents = [TokenDocument(str(number), row, 1) for number, row in enumerate(ids.tolist())]

    @torch.no_grad()
    def plain() -> None:
        logits_NV = model(input_ids=ids, use_cache=False).logits[:, :-1].float().flatten(0, 1)
        torch.nn.functional.cross_entropy(logits_NV, ids[:, 1:].flatten(), reduction="none")

    device = torch.device("cpu")
    ours = peak_bytes(device, lambda: score(model, documents, window=window, batch_size=batch_size))
    return ours, peak_bytes(device, plain)


def _spread(taken: list[float]) -> str:
    return f"{statistics.median(taken):.2f} ({min(taken):.2f} to {max(taken):.2f})"


def _verdict(ratios: dict[str, float]) -> int:
    """0 where every ratio keeps its bar."""
    missed = 0
    for name, (bar, how) in BARS.items():
        kept = ratios[name] >= bar if how == "at least" else ratios[name] <= bar
        missed += not kept
        console.info(f"{name}: {ratios[name]:.2f}, {how} {bar} {'kept' if kept else 'MISSED'}")
    return int(missed > 0)


if __name__ == "__main__":
    main()
