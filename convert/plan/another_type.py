"""A result of another type than its source, which computes the same, with fewer KV heads there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ...checkpoint.modelling import OWN_TYPES
from ...checkpoint.source import Checkpoint
from ...errors import UnsupportedError
from ..family.attention_layer import AttentionLayer
from ..family.model_type import ModelType
from ..methods.context import MethodContext
from ..methods.table import Method
from ..rewrites.encoder_decoder import ENCODER_DECODERS, as_own, describe_own, own_target_config, settle_generation
from ..rewrites.materialise import say_route, settle_tokenizer
from ..rewrites.retyped import RetypedCheckpoint
from ..rewrites.routes import ROWS, Route, rewritten, route_of, target_config
from ..rewrites.target_type import TargetType
from ..settings import ConvertSettings
from .fewer_heads import FewerHeads
from .result_attention import Action, Prospect, ResultAttention


@dataclass(frozen=True)
class AnotherType(ResultAttention):
    """The source as another type, with fewer heads there.

    Attributes:
        source_type: type of the source on disk.
        retyped: the source as the type of the result.
        inner: the result within that type.
    """

    source_type: ModelType
    retyped: RetypedCheckpoint
    inner: FewerHeads

    @classmethod
    def suits(cls, model_type: ModelType) -> bool:
        return model_type.name in ENCODER_DECODERS or model_type.name in ROWS

    @classmethod
    def prospect(cls, checkpoint: Checkpoint, model_type: ModelType) -> Prospect:
        if model_type.name in ENCODER_DECODERS:
            target = ModelType(own_target_config(checkpoint, model_type))
            return Prospect(target, lambda groups: target.config, describe_own(model_type))
        route, lacking = _runnable(_route(model_type))
        # No type has all numbers of groups where one target knows one KV head or all, and it alone can be run here.
        widest = route.target(*route.groups)
        text = " ".join([route.describe(), *lacking])
        if widest is None:
            return Prospect(model_type, lambda groups: _config(route, groups), text)
        tied = bool(model_type.resolved.tie_word_embeddings)
        target = ModelType(target_config(checkpoint, route, widest, tied=tied))
        return Prospect(target, lambda groups: _config(route, groups), text)

    @classmethod
    def read_as(
        cls, checkpoint: Checkpoint, model_type: ModelType, *groups: int
    ) -> tuple[RetypedCheckpoint, ModelType]:
        retyped = (
            as_own(checkpoint, model_type)
            if model_type.name in ENCODER_DECODERS
            else rewritten(checkpoint, _route(model_type), *groups)
        )
        return retyped, ModelType(retyped.config)

    @classmethod
    def plan(cls, checkpoint: Checkpoint, model_type: ModelType, settings: ConvertSettings) -> AnotherType:
        retyped, target = cls.read_as(checkpoint, model_type, settings.groups)
        inner = FewerHeads.plan(retyped, target, settings)
        return cls(inner.source, inner.model_type, inner.family, model_type, retyped, inner)

    @property
    def original(self) -> Checkpoint:
        assert self.retyped.original is not None
        return self.retyped.original

    def reading(self, source: Checkpoint) -> AnotherType:
        return replace(self, source=source, inner=self.inner.reading(source))

    @property
    def changed_layers(self) -> list[AttentionLayer]:
        return self.inner.changed_layers

    def actions(self, method: Method, grouping: str) -> dict[str, Action]:
        """Decide as :class:`FewerHeads` does. Tensors that it copies are computed, unless they stay as they are."""
        return {
            name: replace(action, kind=self.retyped.unchanged_kind) if action.kind == "copy" else action
            for name, action in self.inner.actions(method, grouping).items()
        }

    def new_tensors(
        self, layer: AttentionLayer, method: Method, grouping: str, context: MethodContext
    ) -> dict[str, Tensor]:
        return self.inner.new_tensors(layer, method, grouping, context)

    def merges_equal_heads(self, layer: AttentionLayer, method: Method, grouping: str, context: MethodContext) -> bool:
        return self.inner.merges_equal_heads(layer, method, grouping, context)

    @property
    def config_text(self) -> str:
        return self.inner.config_text

    def finish(self, folder: Path) -> None:
        """Make sure that the result tokenizes and generates like the source although its type is another."""
        settle_tokenizer(self.original.folder, folder)
        settle_generation(self.original, self.source_type, folder)

    def kv_bytes_per_token(self, side: str = "self") -> tuple[int, int]:
        return self.inner.kv_bytes_per_token(side)

    def describe(self) -> list[tuple[str, str, str]]:
        _, *heads = self.inner.describe()
        return [("model type", self.source_type.name, self.model_type.name), *heads]

    def describe_config(self) -> list[tuple[str, str, str]]:
        return self.inner.describe_config()

    def record(self) -> dict[str, Any]:
        return {**self.inner.record(), "rewrite": self.retyped.describe()}

    def announce(self) -> None:
        say_route(self.retyped)


def _route(model_type: ModelType) -> Route:
    route = route_of(model_type)
    assert route is not None, "suits() answers for types with a route only"
    return route


def _config(route: Route, groups: int) -> Mapping[str, Any]:
    target = route.target(groups)
    return route.model_type.config if target is None else route.neutral_config(target)


def _runnable(route: Route) -> tuple[Route, list[str]]:
    """Leave out the types that the installed transformers cannot run.

    Returns:
        The route, and why each type was left out.

    Raises:
        UnsupportedError: no type is left.
    """
    runnable: list[TargetType] = []
    lacking: list[UnsupportedError] = []
    for target in route.targets:
        own = OWN_TYPES.get(target.model_type)
        try:
            if own is not None:
                own.classes()
            runnable.append(target)
        except UnsupportedError as problem:
            lacking.append(problem)
    if lacking and not runnable:
        raise lacking[0]
    return replace(route, targets=tuple(runnable)), [problem.message for problem in lacking]
