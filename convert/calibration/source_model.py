"""The source as a model for calibration, loaded when it is first needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...checkpoint.load import load_tokenizer
from ...checkpoint.source import Checkpoint
from ...console import human_bytes
from ..rewrites.materialise import model_folder
from .offload import load_or_offload
from .out_of_memory import reporting_out_of_memory


class SourceModel:
    """The source as a model, loaded when it is first called."""

    def __init__(self, source: Checkpoint, device: str, scratch: Path, *, trust_remote_code: bool) -> None:
        self.device, self.source = device, source
        self._scratch, self._trust = scratch, trust_remote_code
        self._model: Any = None

    def __call__(self) -> Any:
        if self._model is None:
            self._scratch.mkdir()
            with self.reporting_out_of_memory("Loading the source"):
                self._model = load_or_offload(
                    model_folder(self.source),
                    self.source.weight_bytes,
                    self._scratch,
                    device=self.device,
                    trust_remote_code=self._trust,
                    # Dropout would make the statistics differ from run to run.
                ).eval()
        return self._model

    def tokenizer(self) -> Any:
        return load_tokenizer(self.source.folder, trust_remote_code=self._trust)

    @contextmanager
    def reporting_out_of_memory(self, doing: str) -> Iterator[None]:
        """Turn "out of memory" inside the block into a sentence that names the size of the source."""
        size = f"the source's weights take {human_bytes(self.source.weight_bytes)}"
        with reporting_out_of_memory(self.device, doing, lambda: size):
            yield

    def release(self) -> None:
        """Give its memory back."""
        self._model = None
