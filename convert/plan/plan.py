"""What a conversion will do: one action for every tensor of the source, and the edit of config.json.

``--dry-run`` prints this object and the real run executes it, so they cannot disagree.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from ..checkpoint.modelling import admit
from ..checkpoint.source import Checkpoint
from ..checkpoint.weights import safetensors_name
from ..checkpoint.write import OutFile, OutTensor, resharded
from ..console import human_bytes, parse_bytes
from ..errors import UnsupportedError
from .family.attention_layer import AttentionLayer
from .family.config_edit import with_number
from .family.family import Family, find_family, refuse_quantised
from .family.kv_config import present
from .methods.basis_change import turns_in_words
from .methods.table import METHODS, Method
from .rewrites.encoder_decoder import as_own, is_pair, side
from .rewrites.retyped import RetypedCheckpoint, RewrittenCheckpoint
from .rewrites.routes import rewritten
from .settings import ConvertSettings


@dataclass(frozen=True)
class Action:
    """The fate of one tensor of the source.

    Attributes:
        kind: ``copy`` its bytes, ``compute`` it from the source's where the type changes, ``merge`` its KV heads,
            ``replace`` its values by others of the same shape, or ``drop`` it, when its KV head is no more.
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
    settings: ConvertSettings
    family: Family
    method_name: str
    grouping: str
    actions: dict[str, Action]
    config_text: str

    @property
    def groups(self) -> int:
        return self.settings.groups

    @property
    def method(self) -> Method:
        return METHODS[self.method_name]

    @property
    def changes(self) -> bool:
        """False when there are as many groups as KV heads: then every byte is copied."""
        return any(setting.heads != self.groups for setting in self.family.settings)

    @property
    def reads_text(self) -> bool:
        """Whether the method or the grouping uses the second moments of text."""
        return self.changes and (self.method.reads_text or self.grouping != "contiguous")

    @property
    def rewrite(self) -> RetypedCheckpoint | None:
        """The source as another type, where its own has no KV-head setting."""
        return self.source if isinstance(self.source, RetypedCheckpoint) else None

    @property
    def on_disk(self) -> Checkpoint:
        """The source as it is, not as the type that it is rewritten as."""
        return (self.rewrite and self.rewrite.original) or self.source

    def out_files(self) -> list[OutFile]:
        """The weight files of the result: the same names, the same tensors in the same order, none without tensors."""
        files = []
        for file, header in self.source.headers.items():
            tensors = [
                OutTensor(info.name, info.dtype, action.shape, info if action.kind == "copy" else None)
                for info in header.tensors
                for action in (self.actions[info.name],)
                if action.kind != "drop"
            ]
            path = safetensors_name(file.relative_to(self.source.folder))
            if tensors:
                files.append(OutFile(path, tuple(tensors), header.metadata))
        size = self.settings.max_shard_size
        return files if size is None else resharded(files, parse_bytes(size, "shard"))

    @property
    def weight_bytes(self) -> int:
        """Bytes of the result's tensors."""
        return sum(file.nbytes for file in self.out_files())

    def kv_bytes_per_token(self, kv_heads: int, of: str = "self") -> int:
        """Keys and values that the cache keeps for one token, in the dtype of each k projection.

        Args:
            of: ``self`` for a token of the text that is written, ``cross`` for one of the text that an
                encoder-decoder reads.
        """
        total = 0
        for block in (block for block in self.family.blocks if self._reads(block) == of):
            info = self.source.tensors[block.k]
            heads = self.family.cached_heads(min(kv_heads, block.kv_heads))
            total += heads * (block.head_dim + block.value_dim) * (info.nbytes // math.prod(info.shape))
        return total

    def _reads(self, block: AttentionLayer) -> str:
        return side(block.module) if is_pair(self.source.config) else "self"

    def _cache_sizes(self) -> list[tuple[str, str, str]]:
        most = max(setting.heads for setting in self.family.settings)
        rows = []
        for name, of in (("KV cache per token", "self"), ("KV cache per token of the source text", "cross")):
            before, after = (self.kv_bytes_per_token(heads, of) for heads in (most, self.groups))
            if before:
                rows.append((name, human_bytes(before), human_bytes(after)))
        return rows

    def freedom(self) -> list[str]:
        """What the method turns in the heads, once for each kind of block; nothing for a method that turns nothing."""
        turns = self.method.turns
        if not self.changes or turns is None:
            return []
        return list(dict.fromkeys(turns_in_words(block, turns) for block in self.family.blocks))

    def describe(self) -> list[tuple[str, str, str]]:
        """Rows (what, source, result) for a table."""
        counts = Counter(action.kind for action in self.actions.values())
        before, after, made = self.family.kv_heads, self.groups, self.family.model_type
        settings = self.family.settings
        kept = ("tensors copied", str(len(self.actions)), str(counts["copy"]))
        if counts["compute"]:
            kept = (f"tensors written as {made}", "", str(counts["compute"]))
        return [
            ("model type", self.rewrite.source_type if self.rewrite else made, made),
            (f"KV heads of {self.family.query_heads} query heads", str(before), str(after)),
            ("weights", human_bytes(self.source.weight_bytes), human_bytes(self.weight_bytes)),
            *self._cache_sizes(),
            kept,
            (f"tensors merged ({self.method_name})", "", str(counts["merge"])),
            ("tensors rewritten", "", str(counts["replace"])),
            *(("turned in the heads", "", found) for found in self.freedom()),
            *([("tensors dropped", "", str(counts["drop"]))] if counts["drop"] else []),
            *((f"config.json: {'.'.join(one.path)}", one.shown(one.heads), one.shown(after)) for one in settings),
        ]


def _default_grouping(method: str, family: Family) -> str:
    """The method's own where heads may change places, else neighbours."""
    movable = all(block.fixed is None for block in family.blocks)
    return METHODS[method].default_grouping if movable else "contiguous"


def make_plan(source: Checkpoint, settings: ConvertSettings) -> Plan:
    """Decide what to do with every tensor; nothing is written.

    Of weights, embeddings and heads that may be copies of each other are compared; no other is read.

    Raises:
        UsageError: the method, the grouping or the number of groups is impossible.
        UnsupportedError: this checkpoint cannot be converted correctly (in this way).
        CheckpointError: the checkpoint contradicts itself.
    """
    groups, method = settings.groups, settings.resolved_method
    refuse_quantised(source)
    admit(source.config, source.folder)
    source = as_own(rewritten(source, groups))
    family = find_family(source, groups, encoder=settings.encoder)
    grouping = settings.grouping or _default_grouping(method, family)
    kept = "compute" if isinstance(source, RewrittenCheckpoint) else "copy"
    actions = {name: Action(kept, name, info.shape) for name, info in source.tensors.items()}
    if any(setting.heads != groups for setting in family.settings):
        _plan_blocks(source, family, groups, method, grouping, actions)
    return Plan(source, settings, family, method, grouping, actions, _edited_config(source, family, groups))


def _edited_config(source: Checkpoint, family: Family, groups: int) -> str:
    text = source.config_text
    for setting in family.settings:
        for path in dict.fromkeys((setting.path, *present(source.config, setting.mirrors))):
            text = with_number(text, path, setting.value(groups), "num_attention_heads")
    return text


def _plan_blocks(
    source: Checkpoint, family: Family, groups: int, method: str, grouping: str, actions: dict[str, Action]
) -> None:
    rewrites, moves = METHODS[method].rewrites_queries, grouping != "contiguous"
    for block in family.blocks:
        if block.kv_heads == groups:
            continue
        if rewrites and block.rewritable is not None:
            raise UnsupportedError(
                f"{method} would not be exact for {family.model_type}: {block.rewritable}.",
                "Use --method mean.",
            )
        if moves and block.fixed is not None:
            raise UnsupportedError(
                f"{grouping} would not be exact for {family.model_type}, so heads stay in their places: {block.fixed}.",
                "Use --grouping contiguous.",
            )
        for stored in block.stored:
            shape = source.tensors[stored.names[0]].shape
            merged = stored.merged_shape(shape, family.query_heads, block.kv_heads, groups)
            for place, name in enumerate(stored.names):
                kind = "drop" if stored.numbered and place >= groups else "merge"
                actions[name] = Action(kind, name, merged)
        followers = [name for one in block.followers for name in one.names] if moves else []
        for name in dict.fromkeys((*followers, *(block.rewritten if rewrites else ()))):
            actions[name] = Action("replace", name, source.tensors[name].shape)
