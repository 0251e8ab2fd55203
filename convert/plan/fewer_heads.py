"""A result with fewer KV heads, of the same class as its source."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ...checkpoint.source import Checkpoint
from ...errors import UnsupportedError
from ..family.attention_layer import AttentionLayer
from ..family.family import find_family
from ..family.kv_config import present
from ..family.model_type import ModelType
from ..methods.context import MethodContext
from ..methods.layer import merges_equal_heads, new_tensors
from ..methods.table import Method
from ..settings import ConvertSettings
from .config_edit import with_number
from .ignored import IgnoredTensors, find_ignored
from .result_attention import Action, Prospect, ResultAttention


@dataclass(frozen=True)
class FewerHeads(ResultAttention):
    """K KV heads become ``groups``, in the same class and type.

    Attributes:
        ignored: what the class drops on loading.
    """

    groups: int
    ignored: IgnoredTensors = field(default_factory=IgnoredTensors)

    @classmethod
    def suits(cls, model_type: ModelType) -> bool:
        """Return True for every type. `find_family` refuses types without a KV-head setting."""
        return True

    @classmethod
    def prospect(cls, checkpoint: Checkpoint, model_type: ModelType) -> Prospect:
        return Prospect(model_type, lambda groups: checkpoint.config)

    @classmethod
    def read_as(cls, checkpoint: Checkpoint, model_type: ModelType, *groups: int) -> tuple[Checkpoint, ModelType]:
        return checkpoint, model_type

    @classmethod
    def plan(cls, checkpoint: Checkpoint, model_type: ModelType, settings: ConvertSettings) -> FewerHeads:
        family = find_family(checkpoint, model_type, settings.groups, encoder=settings.encoder)
        ignored = find_ignored(checkpoint, model_type, family)
        family = replace(family, notes=(*family.notes, *ignored.notes))
        return cls(checkpoint, model_type, family, settings.groups, ignored)

    @property
    def original(self) -> Checkpoint:
        return self.source

    def reading(self, source: Checkpoint) -> FewerHeads:
        return replace(self, source=source)

    @property
    def changed_layers(self) -> list[AttentionLayer]:
        layers = (*self.family.layers, *self.ignored.layers)
        return [layer for layer in layers if layer.kv_heads != self.groups]

    def actions(self, method: Method, grouping: str) -> dict[str, Action]:
        found = {name: Action("copy", name, info.shape) for name, info in self.source.tensors.items()}
        for layer in self.changed_layers:
            self._refuse_inexact(layer, method, grouping)
            found |= self._merged(layer)
            followers = [name for one in layer.followers for name in one.names] if grouping != "contiguous" else []
            rewritten = layer.rewritten if method.rewrites_queries else ()
            for name in dict.fromkeys((*followers, *rewritten)):
                found[name] = Action("replace", name, self.source.tensors[name].shape)
        return found

    def _refuse_inexact(self, layer: AttentionLayer, method: Method, grouping: str) -> None:
        if method.rewrites_queries and layer.rewrite_obstacle is not None:
            raise UnsupportedError(
                f"{method.name} would not be exact for {self.model_type.name}: {layer.rewrite_obstacle}.",
                "Use --method mean.",
            )
        if grouping != "contiguous" and layer.order_obstacle is not None:
            raise UnsupportedError(
                f"{grouping} would not be exact for {self.model_type.name}, so heads stay in their places: "
                f"{layer.order_obstacle}.",
                "Use --grouping contiguous.",
            )

    def _merged(self, layer: AttentionLayer) -> dict[str, Action]:
        found = {}
        for stored in layer.stored:
            shape = self.source.tensors[stored.names[0]].shape
            merged = stored.merged_shape(shape, self.family.query_heads, layer.kv_heads, self.groups)
            for head, name in enumerate(stored.names):
                # Where each KV head has a tensor of its own, fewer heads are fewer tensors.
                kind = "drop" if stored.numbered and head >= self.groups else "merge"
                found[name] = Action(kind, name, merged)
        return found

    def new_tensors(
        self, layer: AttentionLayer, method: Method, grouping: str, context: MethodContext
    ) -> dict[str, Tensor]:
        return new_tensors(self.source, self.family, layer, self.groups, method, context, grouping=grouping)

    def merges_equal_heads(self, layer: AttentionLayer, method: Method, grouping: str, context: MethodContext) -> bool:
        return merges_equal_heads(self.source, self.family, layer, self.groups, method, context, grouping=grouping)

    @property
    def config_text(self) -> str:
        text = self.source.config_text
        for setting in self.family.settings:
            for path in dict.fromkeys((setting.path, *present(self.source.config, setting.mirrors))):
                text = with_number(text, path, setting.value(self.groups), "num_attention_heads")
        return text

    def finish(self, folder: Path) -> None:
        """Add nothing: the files of the source describe the result as well."""

    def kv_bytes_per_token(self, side: str = "self") -> tuple[int, int]:
        before = after = 0
        for layer in self.family.layers:
            if layer.side == side:
                per_head = (layer.head_dim + layer.value_dim) * self.source.element_bytes
                before += self.family.counts.cached_heads(layer.kv_heads) * per_head
                after += self.family.counts.cached_heads(min(self.groups, layer.kv_heads)) * per_head
        return before, after

    def describe(self) -> list[tuple[str, str, str]]:
        name, heads = self.model_type.name, f"KV heads of {self.family.query_heads} query heads"
        return [("model type", name, name), (heads, str(self.family.kv_heads), str(self.groups))]

    def describe_config(self) -> list[tuple[str, str, str]]:
        return [
            (f"config.json: {'.'.join(one.path)}", one.shown(one.heads), one.shown(self.groups))
            for one in self.family.settings
        ]

    def record(self) -> dict[str, Any]:
        before, after = self.kv_bytes_per_token()
        entry = {
            "model_type": self.model_type.name,
            "query_heads": self.family.query_heads,
            "kv_heads_before": self.family.kv_heads,
            "kv_heads": self.groups,
            "groups": self.groups,
            "kv_bytes_per_token_before": before,
            "kv_bytes_per_token": after,
            "rewrite": None,
        }
        source_before, source_after = self.kv_bytes_per_token("cross")
        if not source_before:
            return entry
        return {
            **entry,
            "kv_bytes_per_source_token_before": source_before,
            "kv_bytes_per_source_token": source_after,
            "encoder_converted": len(self.family.settings) > 1,
        }

    def announce(self) -> None:
        """Add nothing: the notes of the family say it."""
