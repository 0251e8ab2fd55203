"""A conversion that can be done: one action for every tensor of the source, and the edit of config.json.

``--dry-run`` prints this object and the real run executes it, so they cannot disagree.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from ...checkpoint.folder.weights import safetensors_name
from ...checkpoint.source import Checkpoint
from ...checkpoint.write import OutFile, OutTensor, resharded
from ...console import human_bytes, parse_bytes
from ..family.attention_layer import AttentionLayer
from ..family.family import Family
from ..family.model_type import ModelType
from ..family.refusals import model_type_to_convert
from ..methods.basis_change import turns_in_words
from ..methods.table import METHODS, Method
from ..settings import ConvertSettings
from .result_attention import Action, ResultAttention
from .results import kind_of_result


@dataclass(frozen=True)
class Plan:
    """A conversion that can be done, with nothing done yet.

    Attributes:
        result: the attention of the result.
        actions: source tensor → what happens to it; every tensor of the source is here.
    """

    settings: ConvertSettings
    result: ResultAttention
    method_name: str
    grouping: str
    actions: dict[str, Action]

    @property
    def source(self) -> Checkpoint:
        """The source as the result reads it."""
        return self.result.source

    @property
    def model_type(self) -> ModelType:
        """Type of the result."""
        return self.result.model_type

    @property
    def family(self) -> Family:
        return self.result.family

    @property
    def groups(self) -> int:
        return self.settings.groups

    @property
    def method(self) -> Method:
        return METHODS[self.method_name]

    @property
    def config_text(self) -> str:
        """config.json of the result."""
        return self.result.config_text

    @property
    def changes(self) -> bool:
        """True if the result has fewer KV heads than the source."""
        return bool(self.result.changed_layers)

    @property
    def reads_text(self) -> bool:
        """Return True if the method or the grouping uses the second moments of text."""
        return self.changes and (self.method.reads_text or self.grouping != "contiguous")

    @property
    def notes(self) -> list[str]:
        """Notes on source and family for the record, one sentence each."""
        return [*self.source.notes, *(self.family.notes if self.changes else ())]

    def reading(self, source: Checkpoint) -> Plan:
        """Return the same plan, with the same tensors read from another place."""
        return replace(self, result=self.result.reading(source))

    def out_files(self) -> list[OutFile]:
        """List the weight files of the result: the same files with the same order of tensors, none without tensors."""
        files = []
        for file, header in self.source.headers.items():
            tensors = [
                # Only a copied tensor has bytes in the source. ShardWriter.put brings the others.
                OutTensor(action.name, info.dtype, action.shape, info if action.kind == "copy" else None)
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

    def turns(self) -> list[str]:
        """Say how the method turns heads, once for each kind of layer. Empty for a method that turns none."""
        turns = self.method.turns
        if not self.changes or turns is None:
            return []
        return list(dict.fromkeys(turns_in_words(layer, turns) for layer in self.family.layers))

    def describe(self) -> list[tuple[str, str, str]]:
        """Return rows (name, source, result) for the table of ``--dry-run``."""
        counts = Counter(action.kind for action in self.actions.values())
        copied = ("tensors copied", str(len(self.actions)), str(counts["copy"]))
        if counts["compute"]:
            copied = (f"tensors written as {self.model_type.name}", "", str(counts["compute"]))
        return [
            *self.result.describe(),
            ("weights", human_bytes(self.source.weight_bytes), human_bytes(self.weight_bytes)),
            *self._cache_rows(),
            copied,
            (f"tensors merged ({self.method_name})", "", str(counts["merge"])),
            ("tensors rewritten", "", str(counts["replace"])),
            *(("turned in the heads", "", words) for words in self.turns()),
            *([("tensors dropped", "", str(counts["drop"]))] if counts["drop"] else []),
            *self.result.describe_config(),
        ]

    def _cache_rows(self) -> list[tuple[str, str, str]]:
        rows = []
        for name, side in (("KV cache per token", "self"), ("KV cache per token of the source text", "cross")):
            before, after = self.result.kv_bytes_per_token(side)
            if before:
                rows.append((name, human_bytes(before), human_bytes(after)))
        return rows


def make_plan(source: Checkpoint, settings: ConvertSettings) -> Plan:
    """Decide what to do with every tensor, and write nothing.

    No weights are read, except embeddings and heads that may be copies of each other.

    Raises:
        UsageError: the method, the grouping or the number of groups is impossible.
        UnsupportedError: this checkpoint cannot be converted correctly (in this way).
        CheckpointError: the checkpoint contradicts itself.
    """
    method = METHODS[settings.resolved_method]
    model_type = model_type_to_convert(source)
    result = kind_of_result(model_type).plan(source, model_type, settings)
    grouping = settings.grouping or _default_grouping(method, result.family.layers)
    return Plan(settings, result, method.name, grouping, result.actions(method, grouping))


def _default_grouping(method: Method, layers: tuple[AttentionLayer, ...]) -> str:
    """Take the method's own grouping where heads may change places, else neighbours."""
    movable = all(layer.order_obstacle is None for layer in layers)
    return method.default_grouping if movable else "contiguous"
