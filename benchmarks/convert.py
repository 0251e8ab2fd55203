"""Conversion by `mean`: its time against `cp -r` and against load-and-save, and its memory.

    python benchmarks/convert.py                  # an 8 GB Llama shape in 1 GB shards; needs 17 GB of disk
    python benchmarks/convert.py --gb 2 --rounds 5

Everything is measured in this run, start-up included, in turn, with the source in the page cache and nothing left to
write to disk at the start of each. Printed are the medians over the rounds. Memory is the largest anonymous resident
set (RssAnon) of the process while it runs; pages of the checkpoint itself are cache and belong to the system.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

HIDDEN, INNER, VOCABULARY, HEADS = 4096, 11008, 32000, 32
EMBEDDINGS = 2 * VOCABULARY * HIDDEN
PER_LAYER = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER

LOAD_AND_SAVE = """
import sys
from transformers import AutoModelForCausalLM
source, out, groups, shard, dtype = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5]
model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
config = model.config
for layer in model.model.layers:
    for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj):
        heads = projection.weight.data.reshape(groups, -1, config.head_dim, config.hidden_size)
        projection.weight.data = heads.float().mean(1).to(heads.dtype).flatten(0, 1)
config.num_key_value_heads = groups
model.save_pretrained(out, max_shard_size=shard)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=8, help="Size of the source, in 10⁹ bytes.")
    parser.add_argument("--shard-gb", type=float, default=1)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--load-rounds", type=int, default=1, help="Rounds of load-and-save, the slow one.")
    parser.add_argument(
        "--load-dtype", default="auto", help="auto keeps bf16 and maps the file; float32 was the default of old."
    )
    parser.add_argument("--folder", type=Path, help="Where to work; default: the system's temporary folder.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headfold-benchmark-", dir=options.folder) as name:
        source, out = Path(name) / "source", Path(name) / "out"
        size = make_checkpoint(source, options.gb, options.shard_gb)
        print(f"source: {size / 1e9:.2f} GB in {len(list(source.glob('*.safetensors')))} shards", flush=True)
        ways: dict[str, tuple[int, Sequence[str]]] = {
            "cp -r": (options.rounds, ("cp", "-r", str(source), str(out))),
            "headfold": (options.rounds, _headfold(source, out, options.groups)),
            "load and save": (options.load_rounds, _load_and_save(source, out, options)),
        }
        _report(_measure(ways, source, out))


def make_checkpoint(folder: Path, gigabytes: float, shard_gigabytes: float) -> int:
    """A Llama of width 4096 with random bf16 weights, as many layers as fit; returns its bytes."""
    import torch
    from headfold.checkpoint.header import encode_header
    from transformers import LlamaConfig, LlamaForCausalLM

    layers = max(1, round((gigabytes * 1e9 / 2 - EMBEDDINGS) / PER_LAYER))
    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=layers, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, vocab_size=VOCABULARY, dtype="bfloat16", architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: tuple(weight.shape) for name, weight in LlamaForCausalLM(config).state_dict().items()}
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    for name, shape in shapes.items():
        if shards[-1] and 2 * sum(map(_count, (*shards[-1].values(), shape))) > shard_gigabytes * 1e9:
            shards.append({})
        shards[-1][name] = shape
    noise = (torch.randn(2**25) * 0.02).bfloat16().view(torch.uint8).numpy().data  # 64 MiB, again and again
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = folder / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map.update(dict.fromkeys(shard, file.name))
        with file.open("wb") as stream:
            stream.write(encode_header([(name, "BF16", shape) for name, shape in shard.items()], {"format": "pt"}))
            left = 2 * sum(map(_count, shard.values()))
            while left:
                left -= stream.write(noise[: min(left, len(noise))])
    _write_index(folder, weight_map)
    return 2 * sum(map(_count, shapes.values()))


def _write_index(folder: Path, weight_map: dict[str, str]) -> None:
    import json

    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _count(shape: Sequence[int]) -> int:
    product = 1
    for side in shape:
        product *= side
    return product


def _headfold(source: Path, out: Path, groups: int) -> Sequence[str]:
    arguments = ("convert", str(source), "--groups", str(groups), "--method", "mean", "-o", str(out))
    return sys.executable, "-m", "headfold", *arguments


def _load_and_save(source: Path, out: Path, options: argparse.Namespace) -> Sequence[str]:
    shard = f"{int(options.shard_gb * 1000)}MB"
    arguments = (str(source), str(out), str(options.groups), shard, options.load_dtype)
    return sys.executable, "-c", LOAD_AND_SAVE, *arguments


def _measure(
    ways: dict[str, tuple[int, Sequence[str]]], source: Path, out: Path
) -> dict[str, list[tuple[float, float]]]:
    """Way → (seconds, peak anonymous GiB) of each of its rounds, the ways taking turns."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for turn in range(max(rounds for rounds, _ in ways.values())):
        for name, (rounds, command) in ways.items():
            if turn >= rounds:
                continue
            _read_all(source)
            os.sync()
            found[name].append(watched(command))
            shutil.rmtree(out)
            seconds, memory = found[name][-1]
            print(f"round {turn + 1}: {name:14} {seconds:6.2f} s, {memory:.2f} GiB anonymous", flush=True)
    return found


def _read_all(folder: Path) -> None:
    for file in folder.iterdir():
        with file.open("rb", buffering=0) as stream:
            while stream.read(2**24):
                pass


def watched(command: Sequence[str]) -> tuple[float, float]:
    """Run a command: (seconds, peak anonymous memory in GiB)."""
    began = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    peak = [0]
    watcher = threading.Thread(target=_watch, args=(child.pid, peak))
    watcher.start()
    _, problem = child.communicate()
    seconds = time.perf_counter() - began
    watcher.join()
    if child.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{problem}")
    return seconds, peak[0] / 2**20


def _watch(pid: int, peak: list[int]) -> None:
    """Largest RssAnon in KiB, looked at every 20 ms until the process is gone."""
    while True:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return
        line = next((line for line in status.splitlines() if line.startswith("RssAnon:")), None)
        if line is None:  # a zombie has no memory
            return
        peak[0] = max(peak[0], int(line.split()[1]))
        time.sleep(0.02)


def _report(found: dict[str, list[tuple[float, float]]]) -> None:
    seconds = {name: statistics.median(second for second, _ in rounds) for name, rounds in found.items() if rounds}
    ours = seconds["headfold"]
    print(f"headfold / cp -r: {ours / seconds['cp -r']:.2f} (bar: at most 1.5)")
    if "load and save" in seconds:
        print(f"load and save / headfold: {seconds['load and save'] / ours:.1f} (bar: at least 6)")
    peak = max(memory for _, memory in found["headfold"])
    print(f"peak anonymous memory of headfold: {peak:.2f} GiB (bar: at most 1)")


if __name__ == "__main__":
    main()
