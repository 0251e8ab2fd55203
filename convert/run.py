"""Carry out a plan: headers first, then bytes, then the merged heads layer by layer; the folder appears whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.card import write_card
from ..checkpoint.modelling import write_code
from ..checkpoint.publish import publishing, refuse_occupied, refuse_overlap
from ..checkpoint.record import write_record
from ..checkpoint.source import CONFIG_NAME, Checkpoint
from ..checkpoint.write import ShardWriter, copy_side_files, require_space
from ..console import info, parse_bytes, progress, warn
from .calibration.statistics import Statistics
from .family.verify import verify
from .methods.layer import new_tensors
from .methods.table import MethodContext
from .plan import Plan, make_plan
from .rewrites.encoder_decoder import settle_generation
from .rewrites.materialise import say_route, settle_tokenizer

_RESERVE_BYTES = 64 * 2**20


def convert_checkpoint(
    source: str | Path,
    out: str | Path,
    *,
    groups: int,
    method: str = "mean",
    grouping: str = "contiguous",
    encoder: bool = False,
    statistics: str | Path | None = None,
    max_shard_size: str | None = None,
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
        encoder: of an encoder-decoder, merge the heads of the encoder, too; else those of the decoder alone.
        statistics: file of second moments from calibration; without it a method that could use them goes without data.
        max_shard_size: of the weight files, such as ``5GB``; without it the source's boundaries stay.
        overwrite: replace an output folder that is there.
        seed: for the random method.

    Returns:
        ``out``.

    Raises:
        HeadfoldError: of one of its kinds, with nothing written.
    """
    plan = plan_conversion(source, groups=groups, method=method, grouping=grouping, encoder=encoder, revision=revision)
    if max_shard_size is not None:
        plan = replace(plan, max_shard_bytes=parse_bytes(max_shard_size, "shard"))
    moments = None if statistics is None else Statistics.open(Path(statistics))
    return run_plan(plan, Path(out), statistics=moments, overwrite=overwrite, seed=seed)


def plan_conversion(
    source: str | Path | Checkpoint,
    *,
    groups: int,
    method: str = "mean",
    grouping: str | None = "contiguous",
    encoder: bool = False,
    revision: str | None = None,
) -> Plan:
    """What :func:`convert_checkpoint` would do, with nothing written: this is ``--dry-run``.

    Args:
        grouping: None for the better one of those that the family allows.
        encoder: of an encoder-decoder, merge the heads of the encoder, too.
    """
    checkpoint = source if isinstance(source, Checkpoint) else Checkpoint.open(source, revision=revision)
    return make_plan(checkpoint, groups, method, grouping=grouping, encoder=encoder)


def run_plan(
    plan: Plan,
    out: Path,
    *,
    statistics: Statistics | None = None,
    refine: Callable[[Path], dict[str, Any] | None] | None = None,
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
    with publishing(out, overwrite=overwrite) as folder, ShardWriter(folder, plan.out_files()) as writer:
        writer.create()
        fill_folder(plan, folder, writer, statistics=statistics, refine=refine, seed=seed)
    return out


def fill_folder(
    plan: Plan,
    folder: Path,
    writer: ShardWriter,
    *,
    statistics: Statistics | None = None,
    refine: Callable[[Path], dict[str, Any] | None] | None = None,
    seed: int = 0,
) -> None:
    """Write everything that belongs into an output folder whose weight files ``writer`` has created."""
    say_what_is_odd(plan)
    if writer.sharded:
        writer.write_index()
    copy_side_files(plan.source, folder)
    (folder / CONFIG_NAME).write_bytes(plan.config_text.encode("utf-8"))
    write_code(json.loads(plan.config_text), folder)
    if plan.rewrite is not None:
        settle_tokenizer(plan.source.folder, folder)
        settle_generation(plan.on_disk, folder)
    # Names and shapes stand now, the weights do not: a disagreement costs no time.
    unused = verify(folder)
    write_weights(plan, writer, statistics, seed)
    refined = None if refine is None else refine(folder)
    digest = Checkpoint.open(folder).digest()
    entry = {**_entry(plan, statistics, seed, unused), "refinement": refined, "digest": digest}
    write_record(folder, plan.source.folder, entry)
    write_card(folder)


def write_weights(plan: Plan, writer: ShardWriter, statistics: Statistics | None, seed: int) -> None:
    """Copy what stays and, meanwhile, compute what changes, one block at a time."""
    writer.start_copying()
    blocks = [block for block in plan.family.blocks if block.kv_heads != plan.groups] if plan.changes else []
    with progress(plan.method_name, len(blocks)) as advance, torch.no_grad():
        for block in blocks:
            moment = None if statistics is None else statistics.second_moment(block.layer)
            context = MethodContext(block.layer, seed, plan.family.initializer_range, moment)
            for name, tensor in new_tensors(plan, block, context).items():
                writer.put(name, tensor)
            advance()
    computed = [name for name, action in plan.actions.items() if action.kind == "compute"]
    with progress(f"rewriting as {plan.family.model_type}", len(computed)) as advance, torch.no_grad():
        for name in computed:
            writer.put(name, plan.source.read(name))
            advance()
    with progress("copying", writer.bytes_to_copy) as advance:
        writer.finish(advance)


def say_what_is_odd(plan: Plan) -> None:
    """What the user should know before anything is written."""
    for note in plan.source.notes:
        warn(f"{plan.source.folder}: {note}.")
    for note in plan.family.notes if plan.changes else ():
        warn(f"{note}.")
    if plan.source.left_out:
        info(f"Not copied (weights in another form, or training state): {', '.join(map(str, plan.source.left_out))}.")
    if plan.rewrite:
        say_route(plan.rewrite)
    if not plan.changes:
        kept = "no KV head is merged" if plan.rewrite else "every tensor is copied as it is"
        info(f"The source has {plan.groups} KV heads already: {kept}.")


def _source_text(plan: Plan) -> dict[str, Any]:
    """Of an encoder-decoder: what the cache keeps of the text that it reads, and which sides were converted."""
    if not plan.kv_bytes_per_token(1, "cross"):
        return {}
    return {
        "kv_bytes_per_source_token_before": plan.kv_bytes_per_token(plan.family.kv_heads, "cross"),
        "kv_bytes_per_source_token": plan.kv_bytes_per_token(plan.groups, "cross"),
        "encoder_converted": len(plan.family.settings) > 1,
    }


def _entry(plan: Plan, statistics: Statistics | None, seed: int, unused: list[str]) -> dict[str, Any]:
    """What headfold.json says about this conversion."""
    notes = [*plan.source.notes, *(plan.family.notes if plan.changes else ())]
    if unused:
        notes.append(f"tensors that the model class does not use: {', '.join(unused)}")
    return {
        "step": "convert",
        "source": plan.source.spec,
        "source_folder": str(plan.source.folder.resolve()),
        "source_digest": plan.on_disk.digest(),
        "model_type": plan.family.model_type,
        "query_heads": plan.family.query_heads,
        "kv_heads_before": plan.family.kv_heads,
        "kv_heads": plan.groups,
        "groups": plan.groups,
        "method": plan.method_name,
        "grouping": plan.grouping,
        "turned": plan.freedom(),
        "statistics": None if statistics is None else statistics.metadata,
        "seed": seed,
        "kv_bytes_per_token_before": plan.kv_bytes_per_token(plan.family.kv_heads),
        "kv_bytes_per_token": plan.kv_bytes_per_token(plan.groups),
        **_source_text(plan),
        "rewrite": None if plan.rewrite is None else plan.rewrite.describe(),
        "tensors_unused": unused,
        "notes": notes,
    }
