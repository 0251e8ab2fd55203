"""The interface of a result's attention: everything that planning, running and inspecting need to know about it.

One class per kind of result. :mod:`.plan`, :mod:`headfold.convert.run` and :mod:`headfold.convert.inspect` know this
interface only, so a new kind is one file and one entry of :data:`.results.RESULTS`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ...checkpoint.source import Checkpoint
from ..family.attention_layer import AttentionLayer
from ..family.family import Family
from ..family.model_type import ModelType
from ..methods.context import MethodContext
from ..methods.table import Method
from ..settings import ConvertSettings


@dataclass(frozen=True)
class Action:
    """The action for one source tensor.

    Attributes:
        kind: ``copy`` its bytes, ``compute`` it anew because the type changes, ``merge`` its KV heads, ``replace`` its
            values by others of the same shape, or ``drop`` it because its KV head is gone.
        name, shape: in the result.
    """

    kind: str
    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Prospect:
    """The results that config.json alone shows to be possible.

    Attributes:
        model_type: a type that can have each of the possible numbers of groups.
        result_config: number of groups → the part of that result's config.json that names and describes its type.
        route: the type that the checkpoint is rewritten as, and where that runs; None where its own type stays.
    """

    model_type: ModelType
    result_config: Callable[[int], Mapping[str, Any]]
    route: str | None = None


@dataclass(frozen=True)
class ResultAttention(ABC):
    """The attention of a result: its tensors on disk, its edit of config.json, and its bytes in the cache.

    Attributes:
        source: the source as the result reads it: its tensors have the names that the actions have as keys.
        model_type: type of the result, with the source's own number of KV heads.
        family: the attention of ``source``.
    """

    source: Checkpoint
    model_type: ModelType
    family: Family

    # Choosing and making one

    @classmethod
    @abstractmethod
    def suits(cls, model_type: ModelType) -> bool:
        """Return True if checkpoints of this type get a result of this kind."""

    @classmethod
    @abstractmethod
    def prospect(cls, checkpoint: Checkpoint, model_type: ModelType) -> Prospect:
        """Look ahead from config.json alone. No weights need to be there.

        Raises:
            UnsupportedError: no result is possible here.
        """

    @classmethod
    @abstractmethod
    def read_as(cls, checkpoint: Checkpoint, model_type: ModelType, *groups: int) -> tuple[Checkpoint, ModelType]:
        """Present the checkpoint as the type of the result, which can have each of these numbers of groups.

        Raises:
            HeadfoldError: there is no such type.
        """

    @classmethod
    @abstractmethod
    def plan(cls, checkpoint: Checkpoint, model_type: ModelType, settings: ConvertSettings) -> ResultAttention:
        """Find the attention of the source and the shape of the result.

        Raises:
            HeadfoldError: this conversion is not possible.
        """

    # Parts

    @property
    @abstractmethod
    def original(self) -> Checkpoint:
        """The source as it is on disk."""

    @abstractmethod
    def reading(self, source: Checkpoint) -> ResultAttention:
        """Return the same result, with the same tensors read from another place."""

    @property
    @abstractmethod
    def changed_layers(self) -> list[AttentionLayer]:
        """The attention layers whose tensors change; none when the source is such a result already."""

    # Writing

    @abstractmethod
    def actions(self, method: Method, grouping: str) -> dict[str, Action]:
        """Decide on every tensor of ``source``, by name.

        Raises:
            UnsupportedError: the method or the grouping would not be exact here.
        """

    @abstractmethod
    def new_tensors(
        self, layer: AttentionLayer, method: Method, grouping: str, context: MethodContext
    ) -> dict[str, Tensor]:
        """Compute the tensors of one changed layer, by their names in the result."""

    def merges_equal_heads(self, layer: AttentionLayer, method: Method, grouping: str, context: MethodContext) -> bool:
        """Return True if the heads of each group of a changed layer are equal, so that merging them loses nothing."""
        return False

    @property
    @abstractmethod
    def config_text(self) -> str:
        """config.json of the result."""

    @abstractmethod
    def finish(self, folder: Path) -> None:
        """Complete the other files of the result, which have been copied from the source."""

    # Reporting

    @abstractmethod
    def kv_bytes_per_token(self, side: str = "self") -> tuple[int, int]:
        """Bytes that the cache of the source and the cache of the result hold for one token.

        Args:
            side: ``self`` for a token that is written, ``cross`` for one of the text that an encoder reads.
        """

    @abstractmethod
    def describe(self) -> list[tuple[str, str, str]]:
        """Return rows (name, source, result) about type and heads for the table of ``--dry-run``."""

    @abstractmethod
    def describe_config(self) -> list[tuple[str, str, str]]:
        """Return a row (name, source, result) for each edit of config.json."""

    @abstractmethod
    def record(self) -> dict[str, Any]:
        """Return the part of the record that describes the result."""

    @abstractmethod
    def announce(self) -> None:
        """Say before the conversion what the user should know about the result."""
