"""Saved calibration statistics: one second moment per layer in a safetensors file, read a layer at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...checkpoint.digest import is_comparable
from ...checkpoint.header import encode_header
from ...errors import CheckpointError, UsageError
from ...working_folder import writing_whole

_KIND, _KIND_VALUE = "kind", "headfold statistics 1"
SOURCE, TOKENS = "source_digest", "tokens"
"""Keys of the metadata: the digest of the source, and the number of tokens that the means are over."""


@dataclass(frozen=True)
class Statistics:
    """E[x xᵀ] at the attention's input of every layer, x extended by a constant 1 as last index.

    Attributes:
        layers: number of layers in the file.
        metadata: the source, the text and the number of tokens; see ``SOURCE`` and ``TOKENS``.
    """

    file: Path
    layers: int
    metadata: dict[str, str]

    @classmethod
    def open(cls, file: Path) -> Statistics:
        """Open a statistics file; no matrix is read.

        Raises:
            UsageError: there is no such file.
            CheckpointError: the file is damaged, or holds something else.
        """
        if not file.is_file():
            raise UsageError(f"There is no statistics file {file}.", "Check the path given to --statistics.")
        try:
            with safe_open(file, framework="pt") as tensors:
                metadata, names = dict(tensors.metadata() or {}), list(tensors.keys())
        except (SafetensorError, OSError) as problem:
            raise CheckpointError(
                f"{file} is not a valid statistics file: {problem}.", "Collect it again."
            ) from problem
        if metadata.pop(_KIND, None) != _KIND_VALUE:
            raise CheckpointError(f"{file} holds no calibration statistics.", "Give the file that calibration wrote.")
        return cls(file, sum(name.endswith(_ENDING) for name in names), metadata)

    @property
    def tokens(self) -> int:
        """Number of tokens that the means are over."""
        return int(self.metadata[TOKENS])

    def second_moment(self, layer: int) -> Tensor:
        """Read E[x xᵀ] of one layer, (C+1)×(C+1) float64.

        In cross-attention (2, C+1, C+1): the input of keys and values, then the input of queries.
        """
        with safe_open(self.file, framework="pt") as tensors:
            moment_EE: Tensor = tensors.get_tensor(_name(layer))
            if _query_name(layer) in tensors.keys():  # noqa: SIM118 - tensors is not a mapping
                moment_EE = torch.stack([moment_EE, tensors.get_tensor(_query_name(layer))])
        return moment_EE

    def require_source(self, digest: str, layers: int) -> None:
        """Refuse statistics of another checkpoint.

        Args:
            digest: of the checkpoint about to be converted.
            layers: number of its attention layers.

        Raises:
            UsageError: they were collected from another checkpoint.
        """
        if SOURCE in self.metadata and not is_comparable(self.metadata[SOURCE]):
            raise UsageError(
                f"The statistics in {self.file} are of an older version, which cannot tell all checkpoints apart.",
                "Collect them again: name a new file.",
            )
        if self.metadata.get(SOURCE, digest) != digest or self.layers != layers:
            raise UsageError(
                f"The statistics in {self.file} were collected from another checkpoint.",
                "Collect them from the one you convert: leave --statistics out, or name a new file.",
            )


class MomentSums:
    """Sums of x xᵀ that grow in place, in the file that becomes the statistics.

    They lie in the file from the start, because all of them together are larger than a layer of a large model. A matrix
    is mapped only while it is added to, so one of them is in memory at a time.
    """

    def __init__(self, file: Path, widths: Sequence[int], offset: int) -> None:
        self._file, self._widths, self._offset = file, widths, offset
        self.counts = [0] * len(widths)

    def add(self, layer: int, x_NC: Tensor) -> None:
        """Add x xᵀ of N tokens: each product in float32 for speed, the sum in float64 for many tokens.

        Raises:
            CheckpointError: x holds NaN or infinity.
        """
        x_NC = x_NC.float()
        hidden = x_NC.shape[1]
        sum_EE = self._map(layer)
        # The constant 1 is not appended to x: its row and column of x xᵀ are the sum of x, its corner the count.
        column_C = x_NC.sum(0, dtype=torch.float64).cpu().numpy()
        if not np.isfinite(column_C).all():
            raise CheckpointError(
                f"On this text, the input of attention layer {layer} holds numbers that are NaN or infinite.",
                "A weight before it is broken, or the model overflows in its dtype: try --method mean to see whether "
                "its own heads are sound.",
            )
        sum_EE[:hidden, :hidden] += (x_NC.T @ x_NC).cpu().numpy()
        sum_EE[hidden, :hidden] += column_C
        sum_EE[:hidden, hidden] += column_C
        sum_EE[hidden, hidden] += len(x_NC)
        self.counts[layer] += len(x_NC)

    def divide(self) -> None:
        """Turn the sums into means."""
        for layer, count in enumerate(self.counts):
            mean_EE = self._map(layer)
            mean_EE /= max(count, 1)  # a layer that saw no token is refused by its caller

    def _map(self, layer: int) -> Any:
        begin = self._offset + 8 * sum(width * width for width in self._widths[:layer])
        width = self._widths[layer]
        return np.memmap(self._file, np.float64, "r+", begin, (width, width))


@contextmanager
def writing_statistics(
    file: Path, hidden: Sequence[int], metadata: dict[str, str], *, crossing: Sequence[int] = ()
) -> Iterator[MomentSums]:
    """Yield sums to add to. Write their means to ``file`` if the block succeeds.

    Args:
        hidden: width C of the attention's input, layer by layer.
        crossing: layers of cross-attention, whose queries have an input of their own; sums for these inputs follow
            those of all layers.
    """
    widths = [width + 1 for width in (*hidden, *(hidden[layer] for layer in crossing))]
    names = [*map(_name, range(len(hidden))), *map(_query_name, crossing)]
    entries = [(name, "F64", (width, width)) for name, width in zip(names, widths, strict=True)]
    header = encode_header(entries, {**metadata, _KIND: _KIND_VALUE})
    file.parent.mkdir(parents=True, exist_ok=True)
    with writing_whole(file) as temporary:
        with temporary.open("wb") as stream:
            stream.write(header)
            # Extends the file with zeros, where the sums start; it takes no room on disk until they are added to.
            stream.truncate(len(header) + 8 * sum(width * width for width in widths))
        sums = MomentSums(temporary, widths, len(header))
        yield sums
        sums.divide()


_ENDING = ".second_moment"


def _name(layer: int) -> str:
    return f"layers.{layer}{_ENDING}"


def _query_name(layer: int) -> str:
    return f"layers.{layer}.second_moment_of_queries"
