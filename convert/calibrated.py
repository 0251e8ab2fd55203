"""A conversion that looks at text: statistics for the method, then refinement, in one call."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.load import load_tokenizer
from ..checkpoint.publish import refuse_occupied, refuse_overlap
from ..checkpoint.source import Checkpoint
from ..console import human_bytes, info, warn
from ..corpus import TRAIN, Corpus, open_corpus
from ..errors import DataError, UnsupportedError, UsageError
from .calibration.collect import collect_statistics, load_for_calibration, token_blocks
from .calibration.encoder_decoder import collect_pair_statistics, corrupted
from .calibration.statistics import SOURCE, Statistics
from .family.attention_layer import AttentionLayer
from .plan import Plan
from .refinement.fit import RefineSettings
from .refinement.on_disk import identity_of, reading_modules, refine_folder, require_refinable
from .refinement.out_of_memory import fitting
from .refinement.resume import LayerFit, RefineWork, remove_work
from .rewrites.encoder_decoder import is_pair, refuse_refinement
from .rewrites.materialise import loadable, model_folder
from .run import run_plan

IDS = "ids_sha256"
"""Key of the metadata of statistics: the hash of the token ids they are of."""


@dataclass(frozen=True)
class Calibration:
    """The text that a method may look at, and what to do with it.

    Attributes:
        data: corpus name, see :mod:`headfold.corpus`; its train split unless the name says otherwise. None: no text,
            so ``statistics`` must be there already and nothing is refined.
        tokens: how much of it is read.
        block: tokens of one block, best as many as the model will read at once.
        refine: AdamW steps per layer after the method (zero: none). None: :data:`RefineSettings.steps` for ``folded``
            where there is text and the model can be refined, else none.
        statistics: file to keep the statistics in, or to take them from when it is there; one pass serves every
            number of groups and every method.
        device: where the model runs.
    """

    data: str | None = "stdlib"
    tokens: int = 131_072
    sequence_length: int = 512
    refine: int | None = None
    statistics: Path | None = None
    device: str = "cpu"


@dataclass(frozen=True)
class CalibrationText:
    """Calibration text: where it is from, and its token ids (N blocks of T tokens)."""

    corpus: Corpus
    blocks_NT: Tensor

    def describe(self) -> dict[str, str]:
        """Where the text is from, and a hash of the very token ids that are looked at."""
        ids = hashlib.sha256(self.blocks_NT.numpy().tobytes()).hexdigest()
        known = {"corpus": self.corpus.spec, "revision": self.corpus.revision}
        return {
            **known,
            "tokens": str(self.blocks_NT.numel()),
            "sequence_length": str(self.blocks_NT.shape[1]),
            IDS: ids,
        }


def convert_calibrated(
    plan: Plan,
    out: Path,
    calibration: Calibration,
    *,
    overwrite: bool = False,
    seed: int = 0,
    trust_remote_code: bool = False,
) -> Path:
    """Execute ``plan`` with statistics of calibration text, and refine the result where that is asked for.

    A refinement that was killed goes on after its last finished layer when it is called again; its work lies in
    ``OUT.refinement`` until ``out`` is published.

    Returns:
        ``out``.

    Raises:
        UsageError: no text where some is needed, or statistics of another checkpoint.
        DataError: too little text. UnsupportedError: the class cannot be calibrated or refined.
    """
    refuse_occupied(out, overwrite)
    refuse_overlap(plan.source.folder, out)
    _refuse_statistics_inside(calibration.statistics, out, plan.source.folder)
    _refuse_no_device(calibration.device)
    text = read_text(plan.source, calibration, trust_remote_code)
    if calibration.refine and text is None:
        raise UsageError("Refinement fits to text, and there is none.", "Name some: --calibration stdlib, or a file.")

    settings = _refine_settings(plan, calibration, text, seed)
    work = RefineWork.beside(out)

    def refine(folder: Path) -> dict[str, Any]:
        assert text is not None
        assert settings is not None
        return _refined(plan, folder, text, settings, work, calibration, trust_remote_code)

    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headfold-")))
        plan = replace(plan, source=stack.enter_context(loadable(plan.source, out)))
        load = _Source(plan.source, calibration.device, scratch / "offload", trust_remote_code)
        readers = reading_modules(plan.family.blocks)
        statistics = _kept_statistics(plan.source, calibration, text, readers) if plan.rewrites_queries else None
        if settings is not None and text is not None:
            asked = calibration.refine is not None
            settings = _refinable(plan, text, settings, work, load, asked=asked)
        if plan.rewrites_queries and statistics is None:
            statistics = _new_statistics(plan.source, plan.family.blocks, calibration, text, scratch, load)
        load.forget()
        run_plan(
            plan,
            out,
            statistics=statistics,
            refine=None if settings is None else refine,
            overwrite=overwrite,
            seed=seed,
        )
    if settings is not None and work.exists():
        remove_work(work)
    return out


class _Source:
    """The source as a model, loaded when it is first needed."""

    def __init__(self, source: Checkpoint, device: str, scratch: Path, trust_remote_code: bool) -> None:
        self.device = device
        self._source, self._scratch, self._trust = source, scratch, trust_remote_code
        self._model: Any = None

    def __call__(self) -> Any:
        if self._model is None:
            self._scratch.mkdir()
            with fitting(self.device, "Loading the source", self.describe):
                self._model = load_for_calibration(
                    model_folder(self._source),
                    self._source.weight_bytes,
                    self._scratch,
                    device=self.device,
                    trust_remote_code=self._trust,
                ).eval()
        return self._model

    def tokenizer(self) -> Any:
        return load_tokenizer(self._source.folder, trust_remote_code=self._trust)

    def describe(self) -> str:
        return f"the source's weights take {human_bytes(self._source.weight_bytes)}"

    def forget(self) -> None:
        """Give its memory back."""
        self._model = None


def _refuse_statistics_inside(statistics: Path | None, out: Path, source: Path) -> None:
    """A file in the output would be in its way, and the source is never written to."""
    if statistics is None:
        return
    for folder in (out,) if statistics.exists() else (out, source):
        if folder.resolve() in statistics.resolve().parents:
            raise UsageError(f"The statistics {statistics} would lie in {folder}.", "Choose a path elsewhere.")


def _refine_settings(
    plan: Plan, calibration: Calibration, text: CalibrationText | None, seed: int
) -> RefineSettings | None:
    """How to refine, None for not at all: `folded` is refined where there is text, unless the user says otherwise."""
    steps = calibration.refine
    if steps:
        refuse_refinement(plan.source.config)
    if steps is None:
        steps = RefineSettings.steps if plan.method.refined_by_default and not is_pair(plan.source.config) else 0
    if not plan.changes or steps == 0 or text is None:
        return None
    # little text makes small batches, so that there is more than one
    return RefineSettings(steps, seed=seed, batch_tokens=min(RefineSettings.batch_tokens, text.blocks_NT.numel() // 8))


def _refinable(
    plan: Plan, text: CalibrationText, settings: RefineSettings, work: Path, load: _Source, *, asked: bool
) -> RefineSettings | None:
    """The settings, or None where nobody asked for refinement and it is not possible; nothing was computed by then."""
    source = Checkpoint.open(model_folder(plan.source))
    found = RefineWork(work, identity_of(source, text.blocks_NT, settings, _conversion(plan)))
    blocks = plan.family.blocks
    try:
        with fitting(load.device, "A look at the source", load.describe):
            require_refinable(load, source, blocks, text.blocks_NT, settings, found, device=load.device)
    except (UnsupportedError, DataError) as problem:
        if asked:
            raise
        warn(f"The result will not be refined: {problem.message}")
        return None
    return settings


def _conversion(plan: Plan) -> dict[str, Any]:
    """What a refinement starts from, by the names of the options."""
    return {"number of groups": plan.groups, "method": plan.method_name, "grouping": plan.grouping}


def _refined(
    plan: Plan,
    folder: Path,
    text: CalibrationText,
    settings: RefineSettings,
    work: Path,
    calibration: Calibration,
    trust_remote_code: bool,
) -> dict[str, Any]:
    """Refine a converted folder; what the record says about it."""
    info(f"Refining {len(plan.family.blocks)} layers, {settings.steps} steps each.")
    fits = refine_folder(
        model_folder(plan.source),
        folder,
        plan.family.blocks,
        text.blocks_NT,
        settings,
        work=work,
        conversion=_conversion(plan),
        device=calibration.device,
        trust_remote_code=trust_remote_code,
    )
    return {"settings": asdict(settings), "text": text.describe(), "layers": [_fit_entry(fit) for fit in fits]}


def calibrate(plan: Plan, calibration: Calibration, *, trust_remote_code: bool = False) -> Statistics:
    """Collect the statistics of ``plan``'s source, for every number of groups and every method to use.

    They go into ``calibration.statistics``; where that file is there already, it is opened and checked.

    Raises:
        UsageError: no file is named, or the one there is of another checkpoint or other text.
    """
    if calibration.statistics is None:
        raise UsageError("No file is named for the statistics.", "Give --statistics FILE.")
    readers = reading_modules(plan.family.blocks)
    text = read_text(plan.source, calibration, trust_remote_code)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headfold-")))
        source = stack.enter_context(loadable(plan.source, calibration.statistics))
        load = _Source(source, calibration.device, scratch / "offload", trust_remote_code)
        kept = _kept_statistics(source, calibration, text, readers)
        return kept or _new_statistics(source, plan.family.blocks, calibration, text, scratch, load)


def _kept_statistics(
    source: Checkpoint, calibration: Calibration, text: CalibrationText | None, readers: list[str]
) -> Statistics | None:
    """The statistics of ``calibration.statistics``, checked; None when they have yet to be collected."""
    file = calibration.statistics
    if file is not None and file.exists():
        found = Statistics.open(file)
        found.require_source(source.digest(), len(readers))
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


def _new_statistics(
    source: Checkpoint,
    blocks: Sequence[AttentionLayer],
    calibration: Calibration,
    text: CalibrationText | None,
    scratch: Path,
    load: _Source,
) -> Statistics:
    """Collect the statistics of a source.

    Args:
        blocks: the attention blocks whose inputs are looked at.
        scratch: a folder for files that are needed only meanwhile.
        load: gives the model.
    """
    assert text is not None
    file = calibration.statistics
    info(f"Calibrating on {text.blocks_NT.numel():,} tokens of {text.corpus.spec}.")
    file = scratch / "statistics.safetensors" if file is None else file
    metadata = {SOURCE: source.digest(), **text.describe()}
    if is_pair(source.config):
        pairs = corrupted(text.blocks_NT, load.tokenizer())
        with fitting(load.device, "Calibration", load.describe):
            return collect_pair_statistics(load(), *pairs, file, blocks, metadata=metadata, device=load.device)
    model = load()
    with fitting(load.device, "Calibration", load.describe):
        return collect_statistics(
            model,
            text.blocks_NT,
            file,
            metadata=metadata,
            readers=reading_modules(blocks),
            device=load.device,
        )


def _refuse_no_device(name: str) -> None:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as problem:
        raise UsageError(f"There is no device {name!r} here.", "Try --device cpu.") from problem


def read_text(source: Checkpoint, calibration: Calibration, trust_remote_code: bool) -> CalibrationText | None:
    """The calibration text in the source's own tokens; None where no text is given."""
    if calibration.data is None:
        return None
    corpus = open_corpus(calibration.data, TRAIN)
    tokenizer = load_tokenizer(source.folder, trust_remote_code=trust_remote_code)
    return CalibrationText(
        corpus, token_blocks(corpus, tokenizer, tokens=calibration.tokens, sequence_length=calibration.sequence_length)
    )


def _fit_entry(fit: LayerFit) -> dict[str, float]:
    return {"layer": fit.layer, "error_before": round(fit.error_before, 6), "error_after": round(fit.error_after, 6)}
