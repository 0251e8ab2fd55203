"""Calibrate: read the text, and collect the statistics of the source on it, or open those that a file keeps."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...checkpoint.load import load_tokenizer
from ...checkpoint.source import Checkpoint
from ...console import human_bytes, info
from ...corpus import TRAIN, Corpus, open_corpus
from ...errors import UsageError
from ..family.attention_layer import AttentionLayer
from ..rewrites.encoder_decoder import is_pair
from ..rewrites.materialise import loadable, model_folder
from ..settings import ConvertSettings
from .collect import collect_statistics, reading_modules
from .encoder_decoder import collect_encoder_decoder_statistics, cut_spans
from .offload import load_or_offload
from .out_of_memory import reporting_out_of_memory
from .statistics import SOURCE, Statistics
from .text import token_blocks

IDS = "ids_sha256"
"""Key of the metadata of statistics: the hash of the token ids they were collected on."""


@dataclass(frozen=True)
class CalibrationText:
    """Calibration text: the corpus, and its token ids (B sequences of T tokens)."""

    corpus: Corpus
    ids_BT: Tensor

    def describe(self) -> dict[str, str]:
        """Name the corpus, and give a hash of the very token ids that are used."""
        ids = hashlib.sha256(self.ids_BT.numpy().tobytes()).hexdigest()
        known = {"corpus": self.corpus.spec, "revision": self.corpus.revision}
        size = {"tokens": str(self.ids_BT.numel()), "sequence_length": str(self.ids_BT.shape[1])}
        return {**known, **size, IDS: ids}


def read_text(source: Checkpoint, settings: ConvertSettings, *, trust_remote_code: bool) -> CalibrationText | None:
    """Read the calibration text in the source's own tokens; None where no text is named."""
    if settings.calibration is None:
        return None
    corpus = open_corpus(settings.calibration, TRAIN)
    tokenizer = load_tokenizer(source.folder, trust_remote_code=trust_remote_code)
    tokens, length = settings.calibration_tokens, settings.sequence_length
    return CalibrationText(corpus, token_blocks(corpus, tokenizer, tokens=tokens, sequence_length=length))


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


def calibrate(
    source: Checkpoint,
    layers: Sequence[AttentionLayer],
    settings: ConvertSettings,
    *,
    trust_remote_code: bool = False,
) -> Statistics:
    """Collect the statistics of a source once, for every number of groups and every method that will use them.

    They go into ``settings.statistics``. Where that file exists already, it is opened and checked.

    Args:
        layers: the attention layers whose inputs are measured.

    Raises:
        UsageError: no file is named, or the one there belongs to another checkpoint or other text.
    """
    if settings.statistics is None:
        raise UsageError("No file is named for the statistics.", "Give --statistics FILE.")
    text = read_text(source, settings, trust_remote_code=trust_remote_code)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headfold-")))
        source = stack.enter_context(loadable(source, settings.statistics))
        model = SourceModel(source, settings.device, scratch / "offload", trust_remote_code=trust_remote_code)
        kept = kept_statistics(source, settings, text, len(reading_modules(layers)))
        return kept or new_statistics(model, layers, settings, text, scratch)


def kept_statistics(
    source: Checkpoint, settings: ConvertSettings, text: CalibrationText | None, layers: int
) -> Statistics | None:
    """Open and check the statistics of ``settings.statistics``; None where they have yet to be collected."""
    file = settings.statistics
    if file is not None and file.exists():
        found = Statistics.open(file)
        found.require_source(source.digest(), layers)
        if text is not None and found.metadata.get(IDS) != text.describe()[IDS]:
            raise UsageError(
                f"{file} holds statistics of other text than {text.corpus.spec}.",
                "Name another --statistics file, or leave out --calibration to use this one.",
            )
        info(f"Statistics of {found.tokens:,} tokens from {file}.")
        return found
    if text is None:
        raise UsageError(
            f"There is no statistics file {file}.", "Name calibration text: --calibration stdlib, or a file."
        )
    return None


def new_statistics(
    model: SourceModel,
    layers: Sequence[AttentionLayer],
    settings: ConvertSettings,
    text: CalibrationText | None,
    scratch: Path,
) -> Statistics:
    """Collect the statistics of a source.

    Args:
        layers: the attention layers whose inputs are measured.
        scratch: a folder for the file where the settings name none.
    """
    assert text is not None
    info(f"Calibrating on {text.ids_BT.numel():,} tokens of {text.corpus.spec}.")
    file = scratch / "statistics.safetensors" if settings.statistics is None else settings.statistics
    metadata = {SOURCE: model.source.digest(), **text.describe()}
    if is_pair(model.source.config):
        pairs = cut_spans(text.ids_BT, model.tokenizer())
        with model.reporting_out_of_memory("Calibration"):
            return collect_encoder_decoder_statistics(
                model(), *pairs, file, layers, metadata=metadata, device=model.device
            )
    loaded = model()
    with model.reporting_out_of_memory("Calibration"):
        return collect_statistics(
            loaded, text.ids_BT, file, metadata=metadata, readers=reading_modules(layers), device=model.device
        )


def refuse_missing_device(name: str) -> None:
    """Raise UsageError where torch cannot use the device."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as problem:
        raise UsageError(f"There is no device {name!r} here.", "Try --device cpu.") from problem


def refuse_statistics_inside(statistics: Path | None, out: Path, source: Path) -> None:
    """Raise UsageError where the file would lie in the output, or be written into the source."""
    if statistics is None:
        return
    for folder in (out,) if statistics.exists() else (out, source):
        if folder.resolve() in statistics.resolve().parents:
            raise UsageError(f"The statistics {statistics} would lie in {folder}.", "Choose a path elsewhere.")
