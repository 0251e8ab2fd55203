"""Carry out a plan: headers first, then bytes, then the merged heads layer by layer; the folder appears whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.publish import publishing, refuse_occupied, refuse_overlap
from ..checkpoint.record import write_record
from ..checkpoint.source import CONFIG_NAME, Checkpoint
from ..checkpoint.write import ShardWriter, copy_side_files, require_space
from ..console import info, progress, warn
from ..errors import UnsupportedError
from .blocks import Block
from .families import Family
from .grouping import similarity_order
from .heads import Attention, Rotary, permuted
from .methods import MethodContext
from .plan import Plan, make_plan
from .statistics import Statistics
from .verify import verify

_RESERVE_BYTES = 64 * 2**20


def convert_checkpoint(
    source: str | Path,
    out: str | Path,
    *,
    groups: int,
    method: str = "mean",
    grouping: str = "contiguous",
    statistics: str | Path | None = None,
    overwrite: bool = False,
    seed: int = 0,
    revision: str | None = None,
) -> Path:
    """Turn a checkpoint with K KV heads into one with ``groups``.

    Args:
        source: a folder or a hub id (then with ``revision``).
        out: the folder to write; it appears only when everything is done and checked.
        groups: KV heads of the result; divides those of the source.
        method: how a group becomes one head, a key of ``METHODS``.
        grouping: which heads form a group: neighbours (``contiguous``), or those that share best (``similarity``).
        statistics: file of second moments from calibration; without it a method that could use them goes without data.
        overwrite: replace an output folder that is there.
        seed: for the random method.

    Returns:
        ``out``.

    Raises:
        HeadfoldError: of one of its kinds, with nothing written.
    """
    plan = plan_conversion(source, groups=groups, method=method, grouping=grouping, revision=revision)
    moments = None if statistics is None else Statistics.open(Path(statistics))
    return run_plan(plan, Path(out), statistics=moments, overwrite=overwrite, seed=seed)


def plan_conversion(
    source: str | Path,
    *,
    groups: int,
    method: str = "mean",
    grouping: str = "contiguous",
    revision: str | None = None,
) -> Plan:
    """What :func:`convert_checkpoint` would do, with nothing written: this is ``--dry-run``."""
    return make_plan(Checkpoint.open(source, revision=revision), groups, method, grouping=grouping)


def run_plan(
    plan: Plan,
    out: Path,
    *,
    statistics: Statistics | None = None,
    refine: Callable[[Path], dict[str, Any]] | None = None,
    overwrite: bool = False,
    seed: int = 0,
) -> Path:
    """Execute ``plan``; see :func:`convert_checkpoint`.

    Args:
        refine: called with the finished folder before it is published, to fit its weights in place; what it returns
            goes into the record.
    """
    refuse_occupied(out, overwrite)
    refuse_overlap(plan.source.folder, out)
    require_space(out, plan.weight_bytes + _RESERVE_BYTES)
    if statistics is not None:
        statistics.require_source(plan.source.digest(), len(plan.family.blocks))
    _say_what_is_odd(plan)
    with publishing(out, overwrite=overwrite) as folder:
        writer = ShardWriter(folder, plan.out_files())
        writer.create()
        if plan.source.sharded:
            writer.write_index()
        copy_side_files(plan.source, folder)
        (folder / CONFIG_NAME).write_bytes(plan.config_text.encode("utf-8"))
        # Names and shapes stand now, the weights do not: a disagreement costs no time.
        unused = verify(folder)
        write_weights(plan, writer, statistics, seed)
        Checkpoint.open(folder)
        refined = None if refine is None else refine(folder)
        write_record(folder, plan.source.folder, {**_entry(plan, statistics, seed, unused), "refinement": refined})
    return out


def write_weights(plan: Plan, writer: ShardWriter, statistics: Statistics | None, seed: int) -> None:
    """Copy what stays and compute what changes, one block at a time."""
    with progress("copying", plan.weight_bytes) as advance:
        writer.copy(advance)
    if not plan.changes:
        return
    with progress(plan.method_name, len(plan.family.blocks)) as advance, torch.no_grad():
        for block in plan.family.blocks:
            moment = None if statistics is None else statistics.second_moment(block.layer)
            context = MethodContext(block.layer, seed, plan.family.initializer_range, moment)
            for name, tensor in new_tensors(plan, block, context).items():
                writer.put(name, tensor)
            advance()


def new_tensors(plan: Plan, block: Block, context: MethodContext) -> dict[str, Tensor]:
    """The tensors of one block that change, by disk name, in the shapes of the result."""
    if plan.rewrites_queries:
        attention = read_attention(plan.source, plan.family, block)
        if plan.grouping == "similarity":
            attention = permuted(attention, similarity_order(attention, plan.groups, context))
        return _disk_tensors(block, plan.method.apply(attention, plan.groups, context))
    pool = plan.method.pool
    assert pool is not None  # a method without one rewrites queries
    made = {}
    for place, name in enumerate(block.merged):
        tensor = plan.source.read(name)
        heads = tensor.reshape(plan.family.kv_heads, -1, *tensor.shape[1:])
        made[name] = pool(heads, plan.groups, context.for_tensor(place)).flatten(0, 1)
    return made


def read_attention(source: Checkpoint, family: Family, block: Block) -> Attention:
    """One block of a checkpoint as heads, in float32 (float64 stays); the block must be ``rewritable``."""

    def heads(name: str | None, count: int) -> Tensor | None:
        if name is None:
            return None
        tensor = source.read(name)
        wide = tensor if tensor.dtype == torch.float64 else tensor.float()
        return wide.reshape(count, -1, *wide.shape[1:])

    q, k, v = heads(block.q, family.query_heads), heads(block.k, family.kv_heads), heads(block.v, family.kv_heads)
    o = heads(block.o, 1)
    if q is None or k is None or v is None or o is None:
        raise UnsupportedError(f"{block.module} has no query or output projection that is known: {block.rewritable}.")
    q_norm, k_norm = heads(block.q_norm, 1), heads(block.k_norm, 1)
    return Attention(
        q_HDC=q,
        k_KDC=k,
        v_KDC=v,
        o_CHD=o.reshape(o.shape[1], family.query_heads, -1),
        q_bias_HD=heads(block.q_bias, family.query_heads),
        k_bias_KD=heads(block.k_bias, family.kv_heads),
        v_bias_KD=heads(block.v_bias, family.kv_heads),
        rotary=block.rotary or Rotary("none", 0),
        keys_normed=block.keys_normed,
        q_norm_D=None if q_norm is None else q_norm[0],
        k_norm_D=None if k_norm is None else k_norm[0],
    )


def _disk_tensors(block: Block, attention: Attention) -> dict[str, Tensor]:
    pairs = (
        (block.q, attention.q_HDC.flatten(0, 1)),
        (block.k, attention.k_KDC.flatten(0, 1)),
        (block.v, attention.v_KDC.flatten(0, 1)),
        (block.o, attention.o_CHD.flatten(1)),
        (block.q_bias, None if attention.q_bias_HD is None else attention.q_bias_HD.flatten()),
        (block.k_bias, None if attention.k_bias_KD is None else attention.k_bias_KD.flatten()),
        (block.v_bias, None if attention.v_bias_KD is None else attention.v_bias_KD.flatten()),
    )
    return {name: tensor for name, tensor in pairs if name is not None and tensor is not None}


def _say_what_is_odd(plan: Plan) -> None:
    for note in plan.source.notes:
        warn(f"{plan.source.folder}: {note}.")
    if plan.source.left_out:
        info(f"Not copied (weights in another form, or training state): {', '.join(map(str, plan.source.left_out))}.")
    if not plan.changes:
        info(f"The source has {plan.groups} KV heads already: every tensor is copied as it is.")


def _entry(plan: Plan, statistics: Statistics | None, seed: int, unused: list[str]) -> dict[str, Any]:
    """What headfold.json says about this conversion."""
    notes = [*plan.source.notes]
    if unused:
        notes.append(f"tensors that the model class does not use: {', '.join(unused)}")
    return {
        "step": "convert",
        "source": plan.source.spec,
        "source_folder": str(plan.source.folder.resolve()),
        "source_digest": plan.source.digest(),
        "model_type": plan.family.model_type,
        "query_heads": plan.family.query_heads,
        "kv_heads_before": plan.family.kv_heads,
        "kv_heads": plan.groups,
        "groups": plan.groups,
        "method": plan.method_name,
        "grouping": plan.grouping,
        "statistics": None if statistics is None else statistics.metadata,
        "seed": seed,
        "kv_bytes_per_token_before": plan.kv_bytes_per_token(plan.family.kv_heads),
        "kv_bytes_per_token": plan.kv_bytes_per_token(plan.groups),
        "notes": notes,
    }
