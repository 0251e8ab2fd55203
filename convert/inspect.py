"""Describe a checkpoint and the results that each number of groups would give, before anything is converted."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from ..checkpoint.source import Checkpoint
from .calibration.statistics import Statistics
from .family.family import HeadCounts, find_family, head_counts, setting_counts
from .family.kv_config import with_kv_heads
from .family.model_type import ModelType
from .family.refusals import model_type_to_convert, no_setting
from .methods.context import MethodContext
from .methods.folded import predicted_loss
from .methods.layer import read_attention
from .plan.results import kind_of_result
from .serving.devices import REFUSED, SIZES, STACKS, placement, slow_kernels
from .serving.engines import not_served_by, where_it_runs


@dataclass(frozen=True)
class GroupRow:
    """The cache and the serving of a result with one number of groups.

    Attributes:
        bytes_per_token: KV cache of one sequence, all layers together.
        queries_per_head: query heads that share one KV head.
        devices: serving stack → number of devices → ``even``, ``copied`` (KV heads on several devices) or ``refused``.
        slow_kernels: stacks without a decoding kernel of their own for ``queries_per_head``.
        bytes_per_source_token: KV cache of an encoder-decoder for one token of the text that it reads.
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
    """The facts that config.json alone shows.

    Attributes:
        dtype: dtype of the cache, as config.json names it.
        cache: one row for every possible number of groups, largest first.
        route: the type that the checkpoint is rewritten as, and where that runs; None where its own type stays.
        runs: where a result of its own type runs.
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
    runs: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)


def inspect_checkpoint(
    source: str | Path, *, revision: str | None = None, device_counts: Sequence[int] = SIZES
) -> Inspection:
    """Look at a checkpoint through its config.json. No weights need to be there.

    The class is built on the meta device with K KV heads and with one. The projections whose rows differ are those of K
    and V, and the difference is what the cache holds of each token for each head.

    Args:
        device_counts: sizes of tensor parallelism to judge.

    Raises:
        UnsupportedError: the type is unknown or has no KV-head setting.
    """
    checkpoint = Checkpoint.open(source, revision=revision, weights=False)
    model_type = ModelType(checkpoint.config)
    prospect = kind_of_result(model_type).prospect(checkpoint, model_type)
    counts = head_counts(prospect.model_type)
    model = prospect.model_type.on_meta(with_kv_heads(prospect.model_type.config, counts.settings))
    projections = _projections(prospect.model_type, counts, model)
    if not projections:
        raise no_setting(prospect.model_type.name, prospect.model_type.model_class.__name__)
    keys = [one for one in projections if one.side == "self" and not one.name.endswith((".v_proj", ".v"))]
    dtype = checkpoint.config_dtype
    return Inspection(
        model_type=model_type.name,
        model_class=model_type.model_class.__name__,
        query_heads=counts.query_heads,
        kv_heads=counts.kv_heads,
        attention_layers=len(keys),
        head_dim=keys[0].rows // keys[0].parts,
        parameters=sum(weight.numel() for weight in model.parameters()),
        dtype=str(dtype).removeprefix("torch."),
        cache=[
            _group_row(projections, counts, groups, dtype.itemsize, device_counts, prospect.result_config(groups))
            for groups in reversed(setting_counts(counts.settings[0]))
        ],
        route=prospect.route,
        runs=where_it_runs(checkpoint.config, fewer_heads=True).text,
    )


@dataclass(frozen=True)
class _Projection:
    """A k, v or fused projection, which holds one or both ``parts``; each of ``heads`` KV heads has ``rows`` in it."""

    name: str
    side: str
    heads: int
    rows: int
    parts: int


def _projections(model_type: ModelType, counts: HeadCounts, model: nn.Module) -> list[_Projection]:
    """Find the projections of K and V; ``model`` is the class with the checkpoint's own number of KV heads."""
    few = model_type.on_meta(with_kv_heads(model_type.config, counts.settings, 1))
    found = _compared(model_type, model, few, counts.kv_heads)
    if found or counts.kv_heads > 1 or counts.query_heads == 1:
        return found
    # The share of one KV head in a fused projection is only seen beside a class with more of them.
    every = model_type.on_meta(with_kv_heads(model_type.config, counts.settings, counts.query_heads))
    return [replace(one, heads=1) for one in _compared(model_type, every, few, counts.query_heads)]


def _compared(model_type: ModelType, many: nn.Module, few: nn.Module, kv_heads: int) -> list[_Projection]:
    """Compare the class at ``kv_heads`` with the class at one."""
    small = {name: weight.shape for name, weight in few.named_parameters()}
    found = []
    for name, weight in many.named_parameters():
        stem = name.removesuffix(".weight").removesuffix(".linear")
        if not name.endswith(".weight") or weight.dim() != 2 or "norm" in name:
            continue
        side = model_type.side(stem.rpartition(".")[0])
        if stem.endswith((".k_proj", ".v_proj", ".k", ".v")):
            if weight.shape != small[name] or kv_heads == 1:
                heads = weight.shape[0] // small[name][0]
                found.append(_Projection(stem, side, heads, rows=small[name][0], parts=1))
        elif weight.shape != small[name]:
            rows = (weight.shape[0] - small[name][0]) // (kv_heads - 1)
            found.append(_Projection(stem, side, kv_heads, rows, parts=2))
    return found


def _group_row(
    projections: list[_Projection],
    counts: HeadCounts,
    groups: int,
    itemsize: int,
    device_counts: Sequence[int],
    result_config: Mapping[str, Any],
) -> GroupRow:
    bytes_per_token, bytes_per_source_token = (
        itemsize
        * sum(counts.cached_heads(min(groups, one.heads)) * one.rows for one in projections if one.side == side)
        for side in ("self", "cross")
    )
    return GroupRow(
        groups=groups,
        bytes_per_token=bytes_per_token,
        bytes_per_1000_tokens=1000 * bytes_per_token,
        share_of_source=groups / counts.kv_heads,
        queries_per_head=counts.query_heads // groups,
        devices=_placements(result_config, counts.query_heads, groups, device_counts),
        slow_kernels=slow_kernels(counts.query_heads, groups),
        bytes_per_source_token=bytes_per_source_token,
    )


def _placements(
    result_config: Mapping[str, Any], query_heads: int, groups: int, device_counts: Sequence[int]
) -> dict[str, dict[int, str]]:
    """Judge every serving stack at every number of devices."""
    not_served = not_served_by(result_config, fewer_heads=groups < query_heads)
    return {
        stack.name: {
            devices: REFUSED if stack.name in not_served else placement(stack, query_heads, groups, devices)
            for devices in device_counts
        }
        for stack in STACKS
    }


@dataclass(frozen=True)
class LayerLoss:
    """The predicted loss of one layer at one number of groups: shares of the K and V energy that would be lost."""

    layer: int
    groups: int
    keys: float
    values: float

    @property
    def total(self) -> float:
        return self.keys + self.values


def predict_loss(
    source: str | Path, groups: Sequence[int], statistics: Path, *, revision: str | None = None
) -> Iterator[LayerLoss]:
    """Predict what ``folded`` with neighbours as groups would lose, layer by layer, before anything is converted.

    Args:
        statistics: the file that ``convert --calibration TEXT --statistics FILE`` wrote.

    Raises:
        UsageError: a number of groups does not divide the KV heads, or the statistics belong to another checkpoint.
        UnsupportedError: the queries of a layer cannot be rewritten.
    """
    checkpoint = Checkpoint.open(source, revision=revision)
    model_type = model_type_to_convert(checkpoint)
    checkpoint, model_type = kind_of_result(model_type).read_as(checkpoint, model_type, *groups)
    # Each number is checked against the source. The layers that are found are the same for all of them.
    family, *_ = [find_family(checkpoint, model_type, wanted) for wanted in groups]
    moments = Statistics.open(statistics)
    moments.require_source(checkpoint.digest(), len(family.layers))
    for layer in family.layers:
        attention = read_attention(checkpoint, family, layer)
        context = MethodContext(layer.layer, second_moment=moments.second_moment(layer.layer))
        for wanted in groups:
            loss = predicted_loss(attention, wanted, context)
            yield LayerLoss(layer.layer, wanted, sum(loss.keys_G), sum(loss.values_G))
