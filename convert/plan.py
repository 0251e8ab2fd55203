"""What a conversion will do: one action for every tensor of the source, and the edit of config.json.

``--dry-run`` prints this object and the real run executes it, so they cannot disagree.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from ..checkpoint.source import Checkpoint
from ..checkpoint.write import OutFile, OutTensor
from ..console import human_bytes
from ..errors import UnsupportedError, UsageError
from .config import with_number
from .families import Family, find_family
from .methods import METHODS, Method

GROUPINGS = ("contiguous", "similarity")


@dataclass(frozen=True)
class Action:
    """The fate of one tensor of the source.

    Attributes:
        kind: ``copy`` its bytes, ``merge`` its KV heads, or ``replace`` its values by others of the same shape.
        shape: in the result.
    """

    kind: str
    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """A conversion that can be done, with nothing done yet.

    Attributes:
        actions: source tensor → what becomes of it; every tensor of the source is here.
        config_text: config.json of the result.
    """

    source: Checkpoint
    family: Family
    groups: int
    method_name: str
    grouping: str
    actions: dict[str, Action]
    config_text: str

    @property
    def method(self) -> Method:
        return METHODS[self.method_name]

    @property
    def changes(self) -> bool:
        """False when there are as many groups as KV heads: then every byte is copied."""
        return self.groups != self.family.kv_heads

    @property
    def rewrites_queries(self) -> bool:
        """True when q and o change as well as k and v."""
        return self.changes and (self.method.rewrites_queries or self.grouping != "contiguous")

    def out_files(self) -> list[OutFile]:
        """The weight files of the result: the same names, the same tensors in the same order."""
        files = []
        for file, header in self.source.headers.items():
            tensors = [
                OutTensor(info.name, info.dtype, action.shape, info if action.kind == "copy" else None)
                for info in header.tensors
                for action in (self.actions[info.name],)
            ]
            files.append(OutFile(file.relative_to(self.source.folder), tuple(tensors), header.metadata))
        return files

    @property
    def weight_bytes(self) -> int:
        """Bytes of the result's tensors."""
        return sum(file.nbytes for file in self.out_files())

    def kv_bytes_per_token(self, kv_heads: int) -> int:
        """Keys and values that the cache keeps for one token, in the dtype of each k projection."""
        total = 0
        for block in self.family.blocks:
            info = self.source.tensors[block.k]
            total += kv_heads * (block.head_dim + block.value_dim) * (info.nbytes // math.prod(info.shape))
        return total

    def _cache_sizes(self) -> tuple[str, str]:
        before, after = (self.kv_bytes_per_token(heads) for heads in (self.family.kv_heads, self.groups))
        return human_bytes(before), human_bytes(after)

    def describe(self) -> list[tuple[str, str, str]]:
        """Rows (what, source, result) for a table."""
        counts = Counter(action.kind for action in self.actions.values())
        before, after = self.family.kv_heads, self.groups
        return [
            ("model type", self.family.model_type, self.family.model_type),
            (f"KV heads of {self.family.query_heads} query heads", str(before), str(after)),
            ("weights", human_bytes(self.source.weight_bytes), human_bytes(self.weight_bytes)),
            ("KV cache per token", *self._cache_sizes()),
            ("tensors copied", str(len(self.actions)), str(counts["copy"])),
            (f"tensors merged ({self.method_name})", "", str(counts["merge"])),
            ("tensors rewritten", "", str(counts["replace"])),
            (f"config.json: {'.'.join(self.family.kv_path)}", str(before), str(after)),
        ]


def default_method(method: str | None, grouping: str | None, *, looks_at_text: bool) -> tuple[str, str]:
    """Method and grouping where the user named none: ``folded`` by similarity where there is text, else ``mean``."""
    method = method or ("folded" if looks_at_text else "mean")
    return method, grouping or ("similarity" if method == "folded" else "contiguous")


def make_plan(source: Checkpoint, groups: int, method: str = "mean", *, grouping: str = "contiguous") -> Plan:
    """Decide what to do with every tensor; nothing is written and no weight is read.

    Raises:
        UsageError: the method, the grouping or the number of groups is impossible.
        UnsupportedError: this checkpoint cannot be converted correctly (in this way).
        CheckpointError: the checkpoint contradicts itself.
    """
    if method not in METHODS:
        raise UsageError(f"There is no method {method}.", f"Methods: {', '.join(METHODS)}.")
    if grouping not in GROUPINGS:
        raise UsageError(f"There is no grouping {grouping}.", f"Groupings: {', '.join(GROUPINGS)}.")
    family = find_family(source, groups)
    actions = {name: Action("copy", name, info.shape) for name, info in source.tensors.items()}
    if groups != family.kv_heads:
        rewrites = METHODS[method].rewrites_queries or grouping != "contiguous"
        _plan_blocks(source, family, groups, method, rewrites, actions)
    config_text = with_number(source.config_text, family.kv_path, groups, "num_attention_heads")
    return Plan(source, family, groups, method, grouping, actions, config_text)


def _plan_blocks(
    source: Checkpoint, family: Family, groups: int, method: str, rewrites: bool, actions: dict[str, Action]
) -> None:
    for block in family.blocks:
        if rewrites and block.rewritable is not None:
            raise UnsupportedError(
                f"{method} would not be exact for {family.model_type}: {block.rewritable}.",
                "Use --method mean with contiguous groups.",
            )
        for name in block.merged:
            rows, *rest = source.tensors[name].shape
            actions[name] = Action("merge", name, (rows // family.kv_heads * groups, *rest))
        for name in block.rewritten if rewrites else ():
            actions[name] = Action("replace", name, source.tensors[name].shape)
