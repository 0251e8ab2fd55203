"""Uptraining against transformers' Trainer: tokens per second, and peak memory with a large vocabulary.

    python benchmarks/uptrain.py                        # the bundled model
    python benchmarks/uptrain.py --shape 100m           # a Llama of 100 M parameters, random
    python benchmarks/uptrain.py --shape vocabulary     # peak memory at a vocabulary of 128,000

Same model, blocks, batch, dtype, optimizer (fused AdamW over float32 weights) and order; both in this run, each in a
process of its own, in turns, the first of them changing. Both get blocks that are tokenised and packed beforehand.
On a GPU it also prints the share of the peak operations (MFU).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

BUNDLED = Path(__file__).parents[1] / "recipes" / "bundled" / "stdlib-5m-mha"
SHAPES = {
    "100m": {"hidden_size": 640, "intermediate_size": 1792, "num_hidden_layers": 14, "num_attention_heads": 10,
             "vocab_size": 32000},
    "vocabulary": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 2, "num_attention_heads": 8,
                   "vocab_size": 128000},
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=["bundled", *SHAPES], default="bundled")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each turn; two more warm up")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--child", choices=["ours", "trainer"], help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, default=BUNDLED, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps({"ours": run_ours, "trainer": run_trainer}[options.child](options)))
        return
    with tempfile.TemporaryDirectory() as name:
        if options.shape != "bundled":
            options.model = write_model(Path(name) / "model", SHAPES[options.shape])
        compare(options)


def compare(options: argparse.Namespace) -> None:
    found: dict[str, list[dict[str, float]]] = {"ours": [], "trainer": []}
    for turn in range(options.turns):
        for child, results in list(found.items())[:: -1 if turn % 2 else 1]:
            command = [sys.executable, __file__, *sys.argv[1:], "--child", child, "--model", str(options.model)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                sys.exit(done.stderr[-3000:])
            results.append(json.loads(done.stdout.splitlines()[-1]))
    middle = {
        (child, key): statistics.median(result[key] for result in results)
        for child, results in found.items()
        for key in results[0]
    }
    pairs = zip(found["ours"], found["trainer"], strict=True)
    ratios = sorted(round(ours["tokens_per_second"] / theirs["tokens_per_second"], 2) for ours, theirs in pairs)
    print(
        f"{options.shape}, {options.precision}, {options.batch} × {options.sequence_length} tokens, "
        f"{options.turns} turns"
    )
    for child in found:
        print(
            f"  {child:8} {middle[child, 'tokens_per_second']:10,.0f} tokens/s   peak "
            f"{middle[child, 'peak_bytes'] / 2**20:8,.0f} MiB   mean loss {middle[child, 'loss']:.4f}"
        )
    print(f"tokens per second, ours / Trainer: median {statistics.median(ratios):.2f} of {ratios}")
    print(f"peak memory, ours / Trainer: {middle['ours', 'peak_bytes'] / middle['trainer', 'peak_bytes']:.2f}")
    if "mfu" in found["ours"][0]:
        print(f"MFU, ours: {100 * middle['ours', 'mfu']:.1f} %")


def write_model(folder: Path, shape: dict[str, int]) -> Path:
    """A random Llama with the bundled tokenizer."""
    import shutil

    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**shape, max_position_embeddings=2048, tie_word_embeddings=False)
    LlamaForCausalLM(config).save_pretrained(folder)
    for file in BUNDLED.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def batches(options: argparse.Namespace) -> Any:
    """The same blocks for both: (steps + 2) · batch of them, from the first modules of the standard library."""
    from dataclasses import replace
    from itertools import islice

    from headfold.checkpoint.load import load_tokenizer
    from headfold.corpus import Encoder, open_corpus
    from headfold.uptrain.data.mixture import Mixture, WeightedCorpus
    from headfold.uptrain.data.objective import NextToken

    corpus = open_corpus("stdlib#train")
    few = replace(corpus, read=lambda: islice(corpus.read(), 60))
    stream = Mixture(
        [WeightedCorpus(few, 1.0)],
        NextToken(Encoder(load_tokenizer(BUNDLED)), sequence_length=options.sequence_length, seed=0),
    )
    return [stream.next_batch(options.batch, rank=0, processes=1) for _ in range(options.steps + 2)]


class Peak:
    """Largest memory while open: of the GPU where there is one, else the anonymous memory of this process."""

    def __enter__(self) -> Peak:
        import torch

        self._gpu, self.bytes, self._done = torch.cuda.is_available(), 0, threading.Event()
        if self._gpu:
            torch.cuda.reset_peak_memory_stats()
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()
        return self

    def _watch(self) -> None:
        while not self._gpu and not self._done.wait(0.005):
            status = Path("/proc/self/status").read_text()
            self.bytes = max(self.bytes, 1024 * int(status.split("RssAnon:")[1].split()[0]))

    def __exit__(self, *_: object) -> None:
        import torch

        self._done.set()
        self._watcher.join()
        if self._gpu:
            self.bytes = torch.cuda.max_memory_allocated()


def now() -> float:
    """Seconds, when everything asked of a GPU is done."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def run_ours(options: argparse.Namespace) -> dict[str, float]:
    """The run that `headfold uptrain` makes, fed with prepared batches."""
    from headfold.uptrain.estimate.cost import flops_per_token
    from headfold.uptrain.estimate.model_size import ModelSize
    from headfold.uptrain.processes.devices import peak_flops
    from headfold.uptrain.settings import UptrainSettings
    from headfold.uptrain.training.opening import open_run
    from headfold.uptrain.training.preparation import prepare_run

    settings = UptrainSettings(
        data="stdlib", steps=options.steps + 2, sequence_length=options.sequence_length, batch=options.batch,
        micro_batch=options.batch,
        schedule="constant", warmup=0, learning_rate=1e-4, teacher=None, precision=options.precision, tracker=("none",),
    )  # fmt: skip
    prepared = batches(options)
    with tempfile.TemporaryDirectory() as name:
        run = prepare_run(open_run(options.model, Path(name) / "out", settings))
        run.model.train()
        losses = []
        with Peak() as peak:
            for step, batch in enumerate(prepared):
                if step == 2:
                    began = now()
                losses.append(run.stepper(step, batch).loss)
            seconds = now() - began
    rate = options.steps * options.batch * options.sequence_length / seconds
    found = {"tokens_per_second": rate, "peak_bytes": peak.bytes, "loss": statistics.fmean(losses)}
    promised = peak_flops(run.accelerator.device)
    if promised:
        found["mfu"] = rate * flops_per_token(ModelSize.of(run.model, encoder_decoder=False)) / promised
    return found


def run_trainer(options: argparse.Namespace) -> dict[str, float]:
    """transformers' Trainer on the same batches."""
    import torch
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments
    from transformers.utils import logging

    logging.set_verbosity_error()
    rows = [{"input_ids": row, "labels": row} for batch in batches(options) for row in batch.ids_BT]
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, arguments: Any, state: Any, control: Any, **named: Any) -> None:
            if state.global_step in (2, options.steps + 2):
                times.append(now())

    with tempfile.TemporaryDirectory() as name:
        arguments = TrainingArguments(
            name, per_device_train_batch_size=options.batch, max_steps=options.steps + 2, learning_rate=1e-4,
            lr_scheduler_type="constant", weight_decay=0.1, adam_beta2=0.95, max_grad_norm=1.0,
            optim="adamw_torch_fused", bf16=options.precision == "bf16", report_to=[], save_strategy="no",
            logging_steps=options.steps + 2, disable_tqdm=True, use_cpu=not torch.cuda.is_available(),
            dataloader_pin_memory=torch.cuda.is_available(),
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[Clock()])
        # in the order of the blocks, as ours
        trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(rows)  # type: ignore[method-assign]
        with Peak() as peak:
            trainer.train()
    rate = options.steps * options.batch * options.sequence_length / (times[1] - times[0])
    loss = next(line["loss"] for line in trainer.state.log_history if "loss" in line)
    return {"tokens_per_second": rate, "peak_bytes": peak.bytes, "loss": loss}


if __name__ == "__main__":
    main()
