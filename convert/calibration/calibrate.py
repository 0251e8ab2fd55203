"""Calibrate: read the text, and collect the statistics of the source on it, or open those in a file."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from ...checkpoint.source import Checkpoint
from ...console import info
from ...errors import UsageError
from ..family.attention_layer import AttentionLayer
from ..rewrites.materialise import loadable
from ..settings import ConvertSettings
from .collect import collect_statistics, reading_modules
from .encoder_decoder import collect_encoder_decoder_statistics, cut_spans
from .source_model import SourceModel
from .statistics import SOURCE, Statistics
from .text import IDS, CalibrationText, read_text


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
        saved = saved_statistics(source, settings, text, len(reading_modules(layers)))
        return saved or new_statistics(model, layers, settings, text, scratch)


def saved_statistics(
    source: Checkpoint, settings: ConvertSettings, text: CalibrationText | None, layers: int
) -> Statistics | None:
    """Open and check the statistics of ``settings.statistics``, or return None where they have yet to be collected."""
    file = settings.statistics
    if file is not None and file.exists():
        found = Statistics.open(file)
        # Moments of other weights could have the same shapes, and would mislead in silence.
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
    if any(layer.side == "cross" for layer in layers):
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
    # torch raises an AssertionError where it was built without CUDA.
    except (RuntimeError, AssertionError) as problem:
        raise UsageError(f"There is no device {name!r} here.", "Try --device cpu.") from problem


def refuse_statistics_inside(statistics: Path | None, out: Path, source: Path) -> None:
    """Raise UsageError where the file would lie in the output, or be written into the source."""
    if statistics is None:
        return
    # A file that exists is only read, so it may lie in the source.
    for folder in (out,) if statistics.exists() else (out, source):
        if folder.resolve() in statistics.resolve().parents:
            raise UsageError(f"The statistics {statistics} would lie in {folder}.", "Choose a path elsewhere.")
