"""What a checkpoint is and what each number of groups would give, before anything is converted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..checkpoint.modelling import OWN_TYPES
from ..checkpoint.source import Checkpoint
from ..errors import UnsupportedError
from .calibration.statistics import Statistics
from .family.family import HeadCounts, find_family, head_counts, no_setting, setting_counts
from .family.kv_config import with_kv_heads
from .family.meta_model import build, known_type, model_class, resolved_config
from .methods.context import MethodContext
from .methods.folded import predicted_loss
from .methods.layer import read_attention
from .rewrites.encoder_decoder import PAIRS, as_own, described_pair, is_pair, own_target_config, side
from .rewrites.routes import Route, rewritten, route_of, target_config
from .rewrites.target_type import TargetType
from .serving import REFUSED, SIZES, STACKS, not_served_by, placement, slow_kernels


@dataclass(frozen=True)
class GroupRow:
    """What one number of groups means.

    Attributes:
        bytes_per_token: KV cache of one sequence, all layers together.
        queries_per_head: query heads that share one KV head.
        devices: serving stack → number of devices → ``even``, ``copied`` (KV heads on several devices) or ``refused``.
        slow_kernels: stacks without a decoding kernel of their own for ``queries_per_head``.
        bytes_per_source_token: of an encoder-decoder, KV cache for the text that it reads.
    """

    groups: int
    bytes_per_token: int
    bytes_per_1000_tokens: int
    share_of_source: float
    queries_per_head: int
    devices: dict[str, dict[int, str]]
    slow_kernels: list[str]
    bytes_per_source_token: int = 0


@dataclass(frozen=True)
class Inspection:
    """What config.json alone says.

    Attributes:
        dtype: of the cache: that of config.json.
        cache: one row for every possible number of groups, largest first.
        route: as what the checkpoint is rewritten, and where that runs; None where its own type is kept.
    """

    model_type: str
    model_class: str
    query_heads: int
    kv_heads: int
    attention_layers: int
    head_dim: int
    parameters: int
    dtype: str
    cache: list[GroupRow]
    route: str | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)


def inspect_checkpoint(
    source: str | Path, *, revision: str | None = None, device_counts: Sequence[int] = SIZES
) -> Inspection:
    """Look at a checkpoint through its config.json; no weights need to be there.

    The class is built on the meta device with K KV heads and with one: the projections whose rows differ are those of
    K and V, and what they differ by is what the cache holds of each token for each head.

    Args:
        device_counts: sizes of tensor parallelism to judge.

    Raises:
        UnsupportedError: the type is unknown or has no KV-head setting.
    """
    checkpoint = Checkpoint.open(source, revision=revision, weights=False)
    route, lacking = _runnable(route_of(checkpoint.config))
    config = _widest(checkpoint, route)
    counts = head_counts(config)
    cls = model_class(config)
    many = build(cls, with_kv_heads(config, counts.settings))
    rows = _projections(cls, config, counts, many)
    if not rows:
        raise no_setting(known_type(config), cls.__name__)
    dtype = checkpoint.config_dtype
    of = {name: side(name.rpartition(".")[0]) if is_pair(config) else "self" for name in rows}
    own, cross = ([one for name, one in rows.items() if of[name] == part] for part in ("self", "cross"))
    keys = [one for name, one in rows.items() if of[name] == "self" and not name.endswith((".v_proj", ".v"))]
    return Inspection(
        model_type=known_type(checkpoint.config),
        model_class=model_class(checkpoint.config).__name__,
        query_heads=counts.query_heads,
        kv_heads=counts.kv_heads,
        attention_layers=len(keys),
        head_dim=keys[0].rows // keys[0].parts,
        parameters=sum(weight.numel() for weight in many.parameters()),
        dtype=str(dtype).removeprefix("torch."),
        cache=[
            _group_row(
                own,
                cross,
                lambda heads: counts.query_heads if counts.caches_all_heads else heads,
                counts.query_heads,
                counts.kv_heads,
                groups,
                dtype.itemsize,
                device_counts,
                not_served_by(_result_type(config, route, groups)),
            )
            for groups in reversed(setting_counts(counts.settings[0]))
        ],
        route=described_pair(checkpoint.config) if route is None else " ".join([route.describe(), *lacking]),
    )


def _runnable(route: Route | None) -> tuple[Route | None, list[str]]:
    """The route without the types that the installed transformers cannot run, and why it cannot.

    Raises:
        UnsupportedError: none is left.
    """
    if route is None:
        return None, []
    kept: list[TargetType] = []
    lacking: list[UnsupportedError] = []
    for target in route.targets:
        own = OWN_TYPES.get(target.model_type)
        try:
            if own is not None:
                own.classes()
            kept.append(target)
        except UnsupportedError as problem:
            lacking.append(problem)
    if lacking and not kept:
        raise lacking[0]
    return replace(route, targets=tuple(kept)), [problem.message for problem in lacking]


def _widest(checkpoint: Checkpoint, route: Route | None) -> dict[str, Any]:
    """config.json of a type that can have each of the possible numbers of groups."""
    if checkpoint.config.get("model_type") in PAIRS:
        return own_target_config(checkpoint)
    target = None if route is None else route.target(*route.groups)
    if route is None or target is None:
        return checkpoint.config
    tied = bool(resolved_config(checkpoint.config).tie_word_embeddings)
    return target_config(checkpoint, route, target, tied=tied)


def _result_type(config: dict[str, Any], route: Route | None, groups: int) -> str:
    target = None if route is None else route.target(groups)
    return known_type(config) if target is None else target.model_type


@dataclass(frozen=True)
class _Projection:
    """``rows`` that each of ``heads`` KV heads has in a k, v or fused projection, which holds one or both ``parts``."""

    heads: int
    rows: int
    parts: int


def _projections(
    cls: type[PreTrainedModel], config: dict[str, Any], counts: HeadCounts, here: torch.nn.Module
) -> dict[str, _Projection]:
    """Projection → its rows per KV head; ``here`` is the class with the checkpoint's own number."""
    few = build(cls, with_kv_heads(config, counts.settings, 1))
    rows = _rows_per_head(here, few, counts.kv_heads)
    if rows or counts.kv_heads > 1 or counts.query_heads == 1:
        return rows
    # one KV head in a fused projection: only beside a class with more is its share seen
    every = build(cls, with_kv_heads(config, counts.settings, counts.query_heads))
    found = _rows_per_head(every, few, counts.query_heads)
    return {name: replace(projection, heads=1) for name, projection in found.items()}


def _rows_per_head(many: torch.nn.Module, few: torch.nn.Module, kv_heads: int) -> dict[str, _Projection]:
    """Projection → its rows per KV head, from the class at ``kv_heads`` and at one."""
    small = {name: weight.shape for name, weight in few.named_parameters()}
    found = {}
    for name, weight in many.named_parameters():
        stem = name.removesuffix(".weight").removesuffix(".linear")
        if not name.endswith(".weight") or weight.dim() != 2 or "norm" in name:
            continue
        if stem.endswith((".k_proj", ".v_proj", ".k", ".v")):
            if weight.shape != small[name] or kv_heads == 1:
                found[stem] = _Projection(weight.shape[0] // small[name][0], small[name][0], 1)
        elif weight.shape != small[name]:
            found[stem] = _Projection(kv_heads, (weight.shape[0] - small[name][0]) // (kv_heads - 1), 2)
    return found


def _group_row(
    projections: list[_Projection],
    cross: list[_Projection],
    cached_heads: Callable[[int], int],
    query_heads: int,
    kv_heads: int,
    groups: int,
    itemsize: int,
    device_counts: Sequence[int],
    ignoring: Sequence[str],
) -> GroupRow:
    bytes_per_token, bytes_per_source_token = (
        itemsize * sum(cached_heads(min(groups, one.heads)) * one.rows for one in part) for part in (projections, cross)
    )
    devices = {
        stack.name: dict.fromkeys(device_counts, REFUSED)
        if stack.name in ignoring and groups < query_heads
        else {size: placement(stack, query_heads, groups, size) for size in device_counts}
        for stack in STACKS
    }
    return GroupRow(
        groups=groups,
        bytes_per_token=bytes_per_token,
        bytes_per_1000_tokens=1000 * bytes_per_token,
        share_of_source=groups / kv_heads,
        queries_per_head=query_heads // groups,
        devices=devices,
        slow_kernels=slow_kernels(query_heads, groups),
        bytes_per_source_token=bytes_per_source_token,
    )


@dataclass(frozen=True)
class Damage:
    """Predicted damage of one layer at one number of groups: shares of the K and V energy that would be lost."""

    layer: int
    groups: int
    keys: float
    values: float

    @property
    def total(self) -> float:
        return self.keys + self.values


def predict_damage(
    source: str | Path, groups: Sequence[int], statistics: Path, *, revision: str | None = None
) -> Iterator[Damage]:
    """What ``folded`` with neighbours as groups would lose, layer by layer, before anything is converted.

    Args:
        statistics: the file that ``convert --calibration TEXT --statistics FILE`` wrote.

    Raises:
        UsageError: a number of groups that does not divide, or statistics of another checkpoint.
        UnsupportedError: a layer whose queries cannot be rewritten.
    """
    checkpoint = as_own(rewritten(Checkpoint.open(source, revision=revision), *groups))
    families = {wanted: find_family(checkpoint, wanted) for wanted in groups}
    moments = Statistics.open(statistics)
    family = families[groups[0]]
    moments.require_source(checkpoint.digest(), len(family.blocks))
    for block in family.blocks:
        attention = read_attention(checkpoint, family, block)
        context = MethodContext(block.layer, second_moment=moments.second_moment(block.layer))
        for wanted in groups:
            loss = predicted_loss(attention, wanted, context)
            yield Damage(block.layer, wanted, sum(loss.keys_G), sum(loss.values_G))
