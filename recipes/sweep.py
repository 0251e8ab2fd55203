"""Convert a checkpoint in many ways and measure each result without uptraining, to choose G."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..checkpoint.load import is_seq2seq, load_language_model, load_tokenizer
from ..checkpoint.source import Checkpoint
from ..console import counted, info, warn
from ..convert.calibration.calibrate import calibrate
from ..convert.family.model_type import ModelType
from ..convert.methods.table import METHODS
from ..convert.run import convert_checkpoint, plan_conversion
from ..convert.settings import CalibrationSettings, ConvertSettings
from ..corpus import HELDOUT, TEXT, TRAIN, Columns, Corpus, open_corpus, refuse_idle_column, refuse_unknown_ids
from ..errors import UnsupportedError
from ..eval.measures.intervals import ratio_estimate
from ..eval.measures.kv_cache import measure_cache
from ..eval.report.sweep import PAGE_NAME, SweepRow, read_rows, write_tradeoff
from ..eval.scoring.limits import choose_window, has_learned_positions, position_limit
from ..eval.scoring.perplexity import score
from ..eval.scoring.targets import TargetSettings, target_text
from ..eval.scoring.windows import ScoredDocument, tokenize_text
from ..local_paths import expanded
from ..output_lock import only_run
from .settings import REFINED, SweepSettings

SOURCE = "source"


def sweep(checkpoint: str | Path, out: str | Path, settings: SweepSettings) -> Path:
    """Measure every method at every number of groups. A sweep that was stopped continues.

    Methods that cannot convert this checkpoint are left out with a warning. Converted checkpoints are deleted.

    Returns:
        the path of the page.

    Raises:
        UsageError: a method is unknown, a number of groups does not divide the KV heads, or a text is missing.
    """
    folder = expanded(out)
    with only_run(folder):
        return _sweep(str(checkpoint), folder, settings)


def _sweep(checkpoint: str, out: Path, settings: SweepSettings) -> Path:
    source = Checkpoint.open(checkpoint)
    # refuse what is impossible before anything is measured
    plans = [plan_conversion(source, groups=groups) for groups in settings.groups]
    # held-out by default, because calibration reads the training split
    columns = Columns(settings.text_column)
    corpus = open_corpus(settings.data, HELDOUT, columns)
    read = corpus if settings.calibration is None else open_corpus(settings.calibration, TRAIN, columns)
    refuse_idle_column([corpus, read], columns)
    if read.plain:  # the column is that of the other text
        settings = settings.model_copy(update={"text_column": TEXT.text})
    tokenizer = load_tokenizer(source.folder)
    window = _window(source, tokenizer, settings)
    documents = _documents(source, tokenizer, corpus, settings, window)
    embeddings = int(ModelType(source.config).resolved.get_text_config().vocab_size)
    refuse_unknown_ids(max(document.highest for document in documents), embeddings)
    tokens = [document.scored for document in documents]
    details = _details(source, settings, window, corpus.describe())
    rows = read_rows(out, details)
    out.mkdir(parents=True, exist_ok=True)
    done = {row.key for row in rows}
    if rows:
        info(f"{counted(len(rows), 'row')} measured already.")
    if SOURCE not in {row.method for row in rows}:
        rows.append(_measure(source.folder, SOURCE, documents, window, 0.0))
    statistics = out / "statistics.safetensors"  # one pass over the calibration text serves every row
    if any(METHODS[method.removesuffix(REFINED)].reads_text for method in settings.methods):
        wanted = _conversion(settings, "folded", plans[0].groups, statistics)
        calibrate(plans[0].source, plans[0].family.layers, wanted)
    for groups in settings.groups:
        for method in settings.methods:
            if (method, groups) not in done:
                wanted = _conversion(settings, method, groups, statistics)
                rows += _convert_and_measure(checkpoint, method, wanted, documents, window)
                # after each row, so that a sweep that is stopped loses one conversion at most
                write_tradeoff(rows, out, details, tokens)
    write_tradeoff(rows, out, details, tokens)
    return out / PAGE_NAME


def _window(source: Checkpoint, tokenizer: Any, settings: SweepSettings) -> int:
    """Choose the window as ``headfold eval`` does."""
    limit = position_limit(ModelType(source.config).resolved, tokenizer)
    too_long = settings.window is not None and limit is not None and settings.window > limit
    # building the model's skeleton takes seconds, so it is built only where the answer matters
    learned = too_long and has_learned_positions(load_language_model(source.folder, device_map="meta"))
    return choose_window(settings.window, limit, learned)


def _documents(
    source: Checkpoint, tokenizer: Any, corpus: Corpus, settings: SweepSettings, window: int
) -> Sequence[ScoredDocument]:
    """Cut the text into documents, or into pairs by span corruption for an encoder-decoder."""
    if is_seq2seq(ModelType(source.config).resolved):
        return target_text(tokenizer, corpus, TargetSettings(window), max_tokens=settings.tokens).documents
    return tokenize_text(tokenizer, corpus, max_tokens=settings.tokens).documents


def _conversion(settings: SweepSettings, method: str, groups: int, statistics: Path) -> ConvertSettings:
    """Make the settings of one conversion. A method that looks at no text is given none."""
    name, refined = method.removesuffix(REFINED), method.endswith(REFINED)
    if not refined and not METHODS[name].reads_text:
        return ConvertSettings(groups=groups, method=name)
    return ConvertSettings(
        groups=groups,
        method=name,
        refine=settings.refine if refined else 0,
        statistics=statistics if METHODS[name].reads_text else None,
        **{field: getattr(settings, field) for field in CalibrationSettings.model_fields},
    )


def _convert_and_measure(
    checkpoint: str,
    method: str,
    wanted: ConvertSettings,
    documents: Sequence[ScoredDocument],
    window: int,
) -> list[SweepRow]:
    """Measure one conversion, and return no row if the method refuses this checkpoint."""
    # checkpoints are large, so only one exists at a time
    with tempfile.TemporaryDirectory(prefix="headfold-") as scratch:
        folder = Path(scratch) / "converted"
        began = time.perf_counter()
        try:
            convert_checkpoint(checkpoint, folder, wanted, measure=False)
        except UnsupportedError as problem:
            warn(f"{method} with {counted(wanted.groups, 'group')} is left out: {problem.message}")
            return []
        return [_measure(folder, method, documents, window, time.perf_counter() - began)]


def _measure(folder: Path, method: str, documents: Sequence[ScoredDocument], window: int, seconds: float) -> SweepRow:
    # float32, since rounding to bf16 could hide the difference between two methods
    model = load_language_model(folder, dtype=torch.float32)
    parts = score(model, documents, window=window).per_document()
    nats, tokens = (np.array([getattr(part, name) for part in parts], float) for name in ("nll_nats", "tokens"))
    estimate = ratio_estimate(nats, tokens).map(math.exp)
    cache = measure_cache(model)
    row = SweepRow(
        method,
        max(cache.kv_heads),
        # measured in float32, while a server will use the checkpoint's own dtype
        cache.bytes_per_token * Checkpoint.open(folder).element_bytes / 4,
        estimate.value,
        estimate.low,
        estimate.high,
        seconds,
        nats.tolist(),
    )
    info(f"{method} · {counted(row.groups, 'KV head')} · perplexity {row.perplexity:.3f}")
    return row


def _details(source: Checkpoint, settings: SweepSettings, window: int, text: dict[str, str]) -> dict[str, Any]:
    """List what determines the numbers. A sweep continues only where all of it is the same."""
    targets = {"perplexity": "per target token: spans cut out of the text, sentinels and EOS"}
    return {
        "checkpoint": source.spec,
        "weights": source.digest()[-16:],
        "text": f"{text['corpus']} ({text['revision']}), sha256 {text.get('sha256', 'unknown')[:16]}",
        "tokens": settings.tokens,
        "window": window,
        "calibration": settings.calibration,
        "calibration tokens": settings.calibration_tokens,
        "calibration sequence length": settings.sequence_length,
        "refinement steps per layer": settings.refine,
        **(targets if is_seq2seq(ModelType(source.config).resolved) else {}),
    }
