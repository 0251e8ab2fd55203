"""A conversion that looks at text: statistics for the method, then refinement, in one call."""

from __future__ import annotations

import hashlib
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.load import load_tokenizer
from ..checkpoint.publish import refuse_occupied, refuse_overlap
from ..checkpoint.source import Checkpoint
from ..console import info, warn
from ..corpus import TRAIN, Corpus, open_corpus
from ..errors import DataError, UnsupportedError, UsageError
from .calibration import collect_statistics, load_for_calibration, token_blocks
from .fit import RefineSettings
from .plan import Plan
from .refit import reading_modules, refine_folder
from .rewrites.materialise import loadable, model_folder
from .run import run_plan
from .statistics import SOURCE, Statistics
from .work import LayerFit, RefineWork, remove_work

IDS = "ids_sha256"
"""Key of the metadata of statistics: the hash of the token ids they are of."""


@dataclass(frozen=True)
class Calibration:
    """The text that a method may look at, and what to do with it.

    Attributes:
        data: corpus name, see :mod:`headfold.corpus`; its train split unless the name says otherwise. None: no text,
            so ``statistics`` must be there already and nothing is refined.
        tokens: how much of it is read.
        block: tokens of one block.
        refine: AdamW steps per layer after the method (zero: none). None: :data:`RefineSettings.steps` for ``folded``
            where there is text and the model can be refined, else none.
        statistics: file to keep the statistics in, or to take them from when it is there; one pass serves every
            number of groups and every method.
        device: where the model runs.
    """

    data: str | None = "stdlib"
    tokens: int = 131_072
    block: int = 512
    refine: int | None = None
    statistics: Path | None = None
    device: str = "cpu"


@dataclass(frozen=True)
class Text:
    """Calibration text: where it is from, and its token ids (N blocks of T tokens)."""

    corpus: Corpus
    blocks_NT: Tensor

    def describe(self) -> dict[str, str]:
        """Where the text is from, and a hash of the very token ids that are looked at."""
        ids = hashlib.sha256(self.blocks_NT.numpy().tobytes()).hexdigest()
        known = {"corpus": self.corpus.spec, "revision": self.corpus.revision}
        return {**known, "tokens": str(self.blocks_NT.numel()), "block": str(self.blocks_NT.shape[1]), IDS: ids}


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

    steps = _refine_steps(plan, calibration)
    work = RefineWork.beside(out)

    def refine(folder: Path) -> dict[str, Any] | None:
        assert text is not None
        try:
            return _refined(plan, folder, text, RefineSettings(steps, seed=seed), work, calibration, trust_remote_code)
        except (UnsupportedError, DataError) as problem:
            if calibration.refine is not None:
                raise
            warn(f"The result is not refined: {problem.message}")
            return None

    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headfold-")))
        plan = replace(plan, source=stack.enter_context(loadable(plan.source, out)))
        statistics = None
        if plan.rewrites_queries:
            readers = reading_modules(plan.family.blocks)
            statistics = source_statistics(plan.source, calibration, text, readers, scratch, trust_remote_code)
        run_plan(
            plan,
            out,
            statistics=statistics,
            refine=refine if steps else None,
            overwrite=overwrite,
            seed=seed,
        )
    if steps and work.exists():
        remove_work(work)
    return out


def _refuse_statistics_inside(statistics: Path | None, out: Path, source: Path) -> None:
    """A file in the output would be in its way, and the source is never written to."""
    if statistics is None:
        return
    for folder in (out,) if statistics.exists() else (out, source):
        if folder.resolve() in statistics.resolve().parents:
            raise UsageError(f"The statistics {statistics} would lie in {folder}.", "Choose a path elsewhere.")


def _refine_steps(plan: Plan, calibration: Calibration) -> int:
    """Steps per layer, where the user left it open as well."""
    if not plan.changes:
        return 0
    if calibration.refine is not None:
        return calibration.refine
    return RefineSettings.steps if plan.method_name == "folded" and calibration.data is not None else 0


def _refined(
    plan: Plan,
    folder: Path,
    text: Text,
    settings: RefineSettings,
    work: Path,
    calibration: Calibration,
    trust_remote_code: bool,
) -> dict[str, Any]:
    """Refine a converted folder; what the record says about it."""
    # little text makes small batches, so that there is more than one
    settings = replace(settings, batch_tokens=min(settings.batch_tokens, text.blocks_NT.numel() // 8))
    info(f"Refining {len(plan.family.blocks)} layers, {settings.steps} steps each.")
    fits = refine_folder(
        model_folder(plan.source),
        folder,
        plan.family.blocks,
        text.blocks_NT,
        settings,
        work=work,
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
        return source_statistics(source, calibration, text, readers, scratch, trust_remote_code)


def source_statistics(
    source: Checkpoint,
    calibration: Calibration,
    text: Text | None,
    readers: list[str],
    scratch: Path,
    trust_remote_code: bool,
) -> Statistics:
    """The statistics of a source: those of ``calibration.statistics`` when the file is there, else collected now.

    Args:
        readers: the modules whose input is the attention's, in layer order.
        scratch: a folder for files that are needed only meanwhile.
    """
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
    info(f"Calibrating on {text.blocks_NT.numel():,} tokens of {text.corpus.spec}.")
    (scratch / "offload").mkdir(exist_ok=True)
    model = load_for_calibration(
        model_folder(source),
        source.weight_bytes,
        scratch / "offload",
        device=calibration.device,
        trust_remote_code=trust_remote_code,
    )
    return collect_statistics(
        model,
        text.blocks_NT,
        file if file is not None else scratch / "statistics.safetensors",
        metadata={SOURCE: source.digest(), **text.describe()},
        readers=readers,
        device=calibration.device,
    )


def _refuse_no_device(name: str) -> None:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as problem:
        raise UsageError(f"There is no device {name!r} here.", "Try --device cpu.") from problem


def read_text(source: Checkpoint, calibration: Calibration, trust_remote_code: bool) -> Text | None:
    """The calibration text in the source's own tokens; None where no text is given."""
    if calibration.data is None:
        return None
    corpus = open_corpus(calibration.data, TRAIN)
    tokenizer = load_tokenizer(source.folder, trust_remote_code=trust_remote_code)
    return Text(corpus, token_blocks(corpus, tokenizer, tokens=calibration.tokens, block=calibration.block))


def _fit_entry(fit: LayerFit) -> dict[str, float]:
    return {"layer": fit.layer, "error_before": round(fit.error_before, 6), "error_after": round(fit.error_after, 6)}
