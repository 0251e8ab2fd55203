"""Copy while the libraries load: bytes that the conversion will surely copy start to move before torch is imported.

Importing transformers costs seconds, in which a disk can move gigabytes. What moves is foreseen from the names of the
tensors alone; the plan, made from the model class afterwards, decides. Where it says anything else, the foreseen files
are thrown away and the conversion begins again; where it refuses, nothing of them is left.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..checkpoint.header import TensorInfo
from ..checkpoint.publish import publishing, refuse_occupied, refuse_overlap
from ..checkpoint.source import Checkpoint
from ..checkpoint.weights import safetensors_name
from ..checkpoint.write import OutFile, OutTensor, ShardWriter, require_space, resharded

KV_KEY = "num_key_value_heads"
_WORTH_BYTES = 512 * 2**20  # below that the libraries take longer than the copy does afterwards
_PER_KV_HEAD = re.compile(r".*\.[kv]_proj\.(weight|bias)")
_POOLS = ("mean", "first", "random")  # methods that change nothing but the k and v projections


def foresee(
    source: Checkpoint, groups: int, method: str, grouping: str, max_shard_bytes: int | None
) -> list[OutFile] | None:
    """The files that a conversion will likely write; None where that is not clear from names and config.json alone."""
    kv_heads = _kv_heads(source.config)
    plain = method in _POOLS and grouping == "contiguous" and not source.config.get("quantization_config")
    if not plain or kv_heads is None or not 0 < groups <= kv_heads or kv_heads % groups:
        return None
    if not any(_PER_KV_HEAD.fullmatch(name) for name in source.tensors):
        return None
    files = [
        OutFile(
            safetensors_name(file.relative_to(source.folder)),
            tuple(_foreseen(info, kv_heads, groups) for info in header.tensors),
            header.metadata,
        )
        for file, header in source.headers.items()
    ]
    return files if max_shard_bytes is None else resharded(files, max_shard_bytes)


def convert_early(
    source: Checkpoint,
    out: Path,
    files: list[OutFile],
    *,
    groups: int,
    method: str,
    max_shard_bytes: int | None,
    overwrite: bool,
    seed: int,
) -> Path:
    """:func:`.run.convert_checkpoint` with a head start on ``files``, which :func:`foresee` gave.

    Raises:
        HeadfoldError: of one of its kinds, with nothing left behind.
    """
    refuse_occupied(out, overwrite)
    refuse_overlap(source.folder, out)
    require_space(out, sum(file.nbytes for file in files))
    with publishing(out, overwrite=overwrite) as folder, ShardWriter(folder, files) as early:
        early.create()
        early.start_copying()
        from .plan import make_plan
        from .run import fill_folder

        plan = replace(make_plan(source, groups, method), max_shard_bytes=max_shard_bytes)
        planned = plan.out_files()
        if planned == files:
            fill_folder(plan, folder, early, seed=seed)
            return out
        early.discard()
        require_space(out, plan.weight_bytes)
        with ShardWriter(folder, planned) as writer:
            writer.create()
            writer.start_copying()
            fill_folder(plan, folder, writer, seed=seed)
    return out


def worth_it(source: Checkpoint) -> bool:
    """True for a checkpoint whose copy takes as long as loading the libraries."""
    return source.weight_bytes >= _WORTH_BYTES


def _kv_heads(config: dict[str, Any]) -> int | None:
    text = config.get("text_config")
    found = (text if isinstance(text, dict) else config).get(KV_KEY)
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def _foreseen(info: TensorInfo, kv_heads: int, groups: int) -> OutTensor:
    merged = groups < kv_heads and _PER_KV_HEAD.fullmatch(info.name) and info.shape
    if not merged:
        return OutTensor(info.name, info.dtype, info.shape, info)
    rows = info.shape[0] // kv_heads * groups
    return OutTensor(info.name, info.dtype, (rows, *info.shape[1:]), None)
