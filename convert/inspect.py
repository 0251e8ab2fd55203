"""What a checkpoint is and what each number of groups would give, before anything is converted."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.source import Checkpoint
from .families import find_family, group_counts, head_counts, no_setting, with_kv_heads
from .folding import predicted_loss
from .methods import MethodContext
from .run import read_attention
from .shapes import build, known_type, model_class
from .statistics import Statistics


@dataclass(frozen=True)
class CacheRow:
    """KV cache of one sequence at one number of groups, all layers together."""

    groups: int
    bytes_per_token: int
    bytes_per_1000_tokens: int
    share_of_source: float


@dataclass(frozen=True)
class Inspection:
    """What config.json alone says.

    Attributes:
        dtype: of the cache: that of config.json.
        cache: one row for every number of groups that divides the KV heads, largest first.
    """

    model_type: str
    model_class: str
    query_heads: int
    kv_heads: int
    attention_layers: int
    head_dim: int
    parameters: int
    dtype: str
    cache: list[CacheRow]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)


def inspect_checkpoint(source: str | Path, *, revision: str | None = None) -> Inspection:
    """Look at a checkpoint through its config.json; no weights need to be there.

    The class is built on the meta device with K KV heads and with one: the projections whose rows differ are those of
    K and V, and their rows are what the cache holds of each token.

    Raises:
        UnsupportedError: the type is unknown or has no KV-head setting.
    """
    config = Checkpoint.open(source, revision=revision, weights=False).config
    counts = head_counts(config)
    cls = model_class(config)
    many = build(cls, with_kv_heads(config, counts.kv_path, counts.kv_heads))
    few = dict(build(cls, with_kv_heads(config, counts.kv_path, 1)).named_parameters())
    changed = {
        name: weight.shape[0]
        for name, weight in many.named_parameters()
        if name.endswith("weight") and weight.dim() == 2 and weight.shape != few[name].shape
    }
    if counts.kv_heads > 1 and not changed:
        raise no_setting(known_type(config), cls.__name__)
    dtype = _dtype(config)
    elements = sum(changed.values()) if counts.kv_heads > 1 else _single_head_elements(many)
    return Inspection(
        model_type=known_type(config),
        model_class=cls.__name__,
        query_heads=counts.query_heads,
        kv_heads=counts.kv_heads,
        attention_layers=len({name.rpartition(".k_proj")[0] for name in changed if ".k_proj" in name}),
        head_dim=next(iter(changed.values()), 0) // counts.kv_heads,
        parameters=sum(weight.numel() for weight in many.parameters()),
        dtype=str(dtype).removeprefix("torch."),
        cache=[
            _cache_row(elements * groups // counts.kv_heads * dtype.itemsize, groups, counts.kv_heads)
            for groups in reversed(group_counts(counts.kv_heads))
        ],
    )


def _single_head_elements(model: torch.nn.Module) -> int:
    """Rows of all k and v projections of a model that has one KV head already."""
    sides = (".k_proj.weight", ".v_proj.weight")
    return sum(weight.shape[0] for name, weight in model.named_parameters() if name.endswith(sides))


def _cache_row(bytes_per_token: int, groups: int, kv_heads: int) -> CacheRow:
    return CacheRow(groups, bytes_per_token, 1000 * bytes_per_token, groups / kv_heads)


def _dtype(config: dict[str, Any]) -> torch.dtype:
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else {}
    assert isinstance(text, dict)
    named = config.get("dtype") or config.get("torch_dtype") or text.get("dtype") or text.get("torch_dtype")
    dtype = getattr(torch, str(named).removeprefix("torch."), None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


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
    checkpoint = Checkpoint.open(source, revision=revision)
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
