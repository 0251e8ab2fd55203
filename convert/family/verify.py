"""Check that a checkpoint's config and headers agree with what its class expects, without reading a weight."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ...checkpoint.header import TensorInfo
from ...checkpoint.modelling import register_own_code
from ...checkpoint.source import Checkpoint
from ...errors import CheckpointError, reason
from ...libraries.transformers_internals import memory_names, unread_names
from .model_type import ModelType, quiet_transformers

_KEYS = re.compile(r"(?P<module>.+)\.(k_proj|k|qkv_proj|Wqkv|query_key_value|c_attn)(\.linear)?\.weight")
_OF_KV_HEADS = re.compile(r"([kv]_proj|[kv]|qkv_proj|Wqkv|query_key_value|c_attn|k(ey)?_(layer)?norm|[kv]_sconv)\b.*")
_OLD_BUFFER = re.compile(r"(.*\.)?inv_freq|bias|masked_bias|position_ids")


@dataclass(frozen=True)
class UnusedTensors:
    """The tensors on disk that a class does not use, by name.

    Attributes:
        reported: transformers reports them as unexpected.
        ignored: its class drops them on loading without a word, such as the layers of multi-token prediction.
    """

    reported: tuple[str, ...]
    ignored: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        return sorted({*self.reported, *self.ignored})


def verify(folder: Path) -> UnusedTensors:
    """Load the checkpoint on the meta device, as transformers would load it.

    Raises:
        CheckpointError: a tensor is missing or has another shape than the config asks for. Or attention that the class
            ignores on loading has another number of KV heads than its layers.
        UnsupportedError: transformers has no class for it.
    """
    checkpoint = Checkpoint.open(folder)
    register_own_code(checkpoint.config, folder)
    cls: Any = ModelType(checkpoint.config).model_class
    with quiet_transformers():
        try:
            model, report = cls.from_pretrained(
                folder,
                device_map="meta",
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are listed in the report and refused below
                local_files_only=True,
                trust_remote_code=False,
            )
        except Exception as problem:  # the loader raises whatever its parts raise
            raise CheckpointError(
                f"transformers cannot load {folder}: {reason(problem)}", "Check that the source itself loads."
            ) from problem
    mismatched = sorted(report["mismatched_keys"])
    if mismatched:
        name, on_disk, expected = mismatched[0]
        raise CheckpointError(
            f"{len(mismatched)} tensors disagree with config.json, {name} for one: "
            f"the file has {_shape(on_disk)}, the config asks for {_shape(expected)}.",
            "The config.json belongs to another checkpoint.",
        )
    missing = sorted(report["missing_keys"])
    if missing:
        raise CheckpointError(
            f"{len(missing)} tensors that {cls.__name__} needs are missing, {missing[0]} for one.",
            "The checkpoint is incomplete.",
        )
    reported = set(report["unexpected_keys"])
    unread = [name for name in unread_names(model, list(checkpoint.tensors)) if name not in reported]
    _refuse_stale(model, checkpoint.tensors, {*unread, *reported})
    return UnusedTensors(tuple(sorted(reported)), tuple(sorted(unread)))


Parts = Mapping[str, TensorInfo]
"""The tensors of one attention layer on disk, by the rest of their names in the class: ``k_proj.weight``, …"""


def attention_modules(model: PreTrainedModel, tensors: Mapping[str, TensorInfo]) -> dict[str, Parts]:
    """Find attention by its key projections, also where the class loads none of it: place → parts, no old buffers.

    A place is ``model.layers.3.self_attn``, for example. A layer that is not loaded gets the names of those that are.
    """
    named = _names_in_class(model, tensors)
    found = {match["module"]: dict[str, TensorInfo]() for match in map(_KEYS.fullmatch, named) if match}
    for name, info in named.items():
        parts = name.split(".")
        for length in range(1, len(parts)):
            module, leaf = ".".join(parts[:length]), ".".join(parts[length:])
            if module in found and not _OLD_BUFFER.fullmatch(leaf):
                found[module][leaf] = info
    return dict(found)


def _names_in_class(model: PreTrainedModel, tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Rename tensors as the class does, also in layers that it does not load, unless they have such names on disk."""
    tails = {_cut(disk)[1]: _cut(name)[1] for disk, name in memory_names(model, list(tensors)).items()}
    as_in_class = {match["module"] for match in map(_KEYS.fullmatch, tensors) if match}
    named = {}
    for disk, info in tensors.items():
        parts = disk.split(".")
        place, tail = _cut(disk)
        keeps = any(".".join(parts[:length]) in as_in_class for length in range(1, len(parts)))
        named[disk if keeps else place + tails.get(tail, tail)] = info
    return named


def _cut(name: str) -> tuple[str, str]:
    """Cut a name after its last number: ``mtp.layers.0.self_attn.k_proj.weight`` → ``mtp.layers.0.``, the rest."""
    tail = re.split(r"(?:^|\.)\d+\.", name)[-1]
    return name.removesuffix(tail), tail


def kind_of_module(place: str) -> str:
    """Cut the number off the place of a layer: ``mtp.layers.0.self_attn`` → ``self_attn``."""
    return _cut(place)[1]


def holds_kv_heads(leaf: str) -> bool:
    """Return True if the shape of this part of an attention layer depends on the number of KV heads."""
    return _OF_KV_HEADS.fullmatch(leaf) is not None


def shapes(parts: Parts) -> dict[str, tuple[int, ...]]:
    """Return the shape of each part."""
    return {leaf: info.shape for leaf, info in parts.items()}


def differ_in_kv_heads_alone(one: Parts, other: Parts) -> bool:
    """Return True if two layers have the same parts, of which only those of KV heads have other shapes."""
    differing = [leaf for leaf in one if leaf in other and one[leaf].shape != other[leaf].shape]
    return one.keys() == other.keys() and bool(differing) and all(map(holds_kv_heads, differing))


def _refuse_stale(model: PreTrainedModel, tensors: Mapping[str, TensorInfo], unused: set[str]) -> None:
    """Refuse attention that the class ignores on loading, and that has another number of KV heads than its layers."""
    modules = attention_modules(model, tensors) if unused else {}
    ignored = {place for place, parts in modules.items() if any(info.name in unused for info in parts.values())}
    for place in sorted(ignored):
        kind = kind_of_module(place)
        loaded = {name: modules[name] for name in modules.keys() - ignored if kind_of_module(name) == kind}
        if any(shapes(parts) == shapes(modules[place]) for parts in loaded.values()):
            continue
        for parts in (loaded[name] for name in sorted(loaded)):
            if differ_in_kv_heads_alone(modules[place], parts):
                stale, sound = next(
                    (info, parts[leaf]) for leaf, info in modules[place].items() if info.shape != parts[leaf].shape
                )
                raise CheckpointError(
                    f"{stale.name} has shape {_shape(stale.shape)}, but {sound.name} has {_shape(sound.shape)}: these "
                    "layers have different numbers of KV heads, and config.json has one number. "
                    f"{type(model).__name__} ignores {stale.name} on loading, so transformers does not report it.",
                    "headfold up to 0.1.0 left such layers as they were. Convert the source again.",
                )


def _shape(sides: object) -> str:
    return f"({', '.join(map(str, sides))})" if isinstance(sides, (tuple, list)) else str(sides)
