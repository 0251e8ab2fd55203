"""Calibration: its time against bare forward passes over the same tokens, and its peak memory.

    python benchmarks/calibration.py                      # ratio of times, on the bundled model
    python benchmarks/calibration.py --shape-gb 8         # peak memory on a Llama-shaped checkpoint of that size

Both are measured in this run. The shape is a sparse file of zeros: reading it costs what reading weights costs in
memory, not in disk time. Memory is the largest resident set of a process of its own.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from headfold.checkpoint.header import encode_header
from headfold.checkpoint.load import load_tokenizer
from headfold.checkpoint.source import Checkpoint
from headfold.convert.calibration import collect_statistics, load_for_calibration, token_blocks
from headfold.corpus import open_corpus

BUNDLED = Path(__file__).parents[1] / "recipes" / "bundled" / "stdlib-5m-mha"
_HIDDEN, _INNER, _VOCABULARY = 4096, 11008, 32000


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
    blocks_NT = token_blocks(open_corpus("stdlib#train"), tokenizer, tokens=tokens, block=512)
    with tempfile.TemporaryDirectory() as name:
        model = load_for_calibration(BUNDLED, Checkpoint.open(BUNDLED).weight_bytes, Path(name))
        ratios = []
        for _ in range(repeats):
            began = time.perf_counter()
            with torch.inference_mode():
                for ids_BT in blocks_NT.split(8):
                    model.base_model(input_ids=ids_BT, use_cache=False)
            bare = time.perf_counter() - began
            began = time.perf_counter()
            collect_statistics(model, blocks_NT, Path(name) / "statistics", metadata={})
            ratios.append((time.perf_counter() - began) / bare)
    print(f"calibration / bare forward passes, {blocks_NT.numel():,} tokens: median {statistics.median(ratios):.2f}")
    print(f"of {repeats} ratios: {', '.join(f'{ratio:.2f}' for ratio in sorted(ratios))}")


def _memory(gigabytes: float) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "shape"
        size = _write_shape(folder, gigabytes)
        command = [sys.executable, __file__, "--measure", str(folder)]
        peak = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print(f"peak resident memory {peak / 2**30:.2f} GiB for {size / 2**30:.2f} GiB of weights: {peak / size:.2f}")


def _write_shape(folder: Path, gigabytes: float) -> int:
    """A Llama of hidden size 4,096 with as many layers as fit, bfloat16, all zeros."""
    square, wide = (_HIDDEN, _HIDDEN), (_INNER, _HIDDEN)
    layer = {f"self_attn.{side}_proj.weight": square for side in "qkvo"}
    layer |= {"mlp.gate_proj.weight": wide, "mlp.up_proj.weight": wide, "mlp.down_proj.weight": wide[::-1]}
    layer |= {"input_layernorm.weight": (_HIDDEN,), "post_attention_layernorm.weight": (_HIDDEN,)}
    elements = sum(torch.Size(shape).numel() for shape in layer.values())
    outside = {"model.embed_tokens.weight": (_VOCABULARY, _HIDDEN), "model.norm.weight": (_HIDDEN,)}
    layers = round((gigabytes * 1e9 / 2 - _VOCABULARY * _HIDDEN) / elements)
    shapes = outside | {f"model.layers.{i}.{name}": shape for i in range(layers) for name, shape in layer.items()}
    folder.mkdir()
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": _HIDDEN, "torch_dtype": "bfloat16",
        "intermediate_size": _INNER, "num_hidden_layers": layers, "num_attention_heads": 32, "num_key_value_heads": 32,
        "vocab_size": _VOCABULARY, "tie_word_embeddings": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    header = encode_header([(name, "BF16", shape) for name, shape in shapes.items()], {"format": "pt"})
    size = sum(2 * torch.Size(shape).numel() for shape in shapes.values())
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(header)
        stream.truncate(len(header) + size)
    return size


def _measure_memory(folder: Path) -> None:
    """In a process of its own: calibrate on a little text, weights on disk; print the largest resident set."""
    blocks_NT = torch.arange(256).reshape(2, 128)
    with tempfile.TemporaryDirectory() as name:
        # a size beyond any memory keeps the weights on disk whatever this machine has
        model = load_for_calibration(folder, 2**60, Path(name))
        collect_statistics(model, blocks_NT, Path(name) / "statistics", metadata={})
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


if __name__ == "__main__":
    main()
