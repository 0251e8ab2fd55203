"""Look up on how many tokens a checkpoint was pretrained, so that ``--fraction`` alone sets the length of a run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ...checkpoint.record import last_entry, read_record
from ...checkpoint.source import Checkpoint
from ...console import info
from ..settings import UptrainSettings


@dataclass(frozen=True)
class Pretraining:
    """Number of tokens, and the source of that number."""

    tokens: int
    source: str


# Base models by name: the end of a hub id or of a folder's name. The first match counts. Chat and instruct versions
# match too, because it is their base that was pretrained.
_KNOWN: dict[str, tuple[float, str]] = {
    r"llama-2-\d+b": (2.0e12, "Touvron et al. 2023, arXiv 2307.09288, table 1"),
    r"llama-(7|13)b": (1.0e12, "Touvron et al. 2023, arXiv 2302.13971, table 2"),
    r"llama-(30|33|65)b": (1.4e12, "Touvron et al. 2023, arXiv 2302.13971, table 2"),
    r"olmo-7b": (2.5e12, "the model card of allenai/OLMo-7B"),
    r"olmo-1b": (3.0e12, "the model card of allenai/OLMo-1B"),
    r"olmoe-1b-7b(-\d+)?": (5.1e12, "Muennighoff et al. 2024, arXiv 2409.02060"),
    r"smollm2-1\.7b": (11e12, "Ben Allal et al. 2025, arXiv 2502.02737"),
    r"smollm2-360m": (4e12, "the model card of HuggingFaceTB/SmolLM2-360M"),
    r"smollm2-135m": (2e12, "the model card of HuggingFaceTB/SmolLM2-135M"),
    r"pythia-(70m|160m|410m|1b|1\.4b|2\.8b|6\.9b|12b)": (299_892_736_000, "Biderman et al. 2023, arXiv 2304.01373"),
    r"gemma-7b": (6e12, "Gemma team 2024, arXiv 2403.08295"),
    r"gemma-2b": (3e12, "Gemma team 2024, arXiv 2403.08295"),
    r"deepseek-llm-(7|67)b": (2e12, "DeepSeek-AI 2024, arXiv 2401.02954"),
    r"stablelm-3b-4e1t": (4e12, "the model card of stabilityai/stablelm-3b-4e1t"),
    r"t5-(small|base|large|3b|11b)": (1_048_576_000_000, "Raffel et al. 2020, arXiv 1910.10683, section 3.7"),
    r"t5-v1_1-(small|base|large|xl|xxl)": (1_048_576_000_000, "Raffel et al. 2020, arXiv 1910.10683, section 3.7"),
    r"phi-2": (1.4e12, "the model card of microsoft/phi-2"),
}
_SUFFIX = r"([-_](hf|base|chat|instruct|it|deduped|v\d.*|gqa.*|mqa.*|g\d+|hfmodel))*"


def known_pretraining(checkpoint: str | Path, source: Checkpoint | None = None) -> Pretraining | None:
    """Look in the checkpoint's own record, then for its name, then for the name of the source it was converted from.

    Args:
        checkpoint: as the user named it.
        source: the opened checkpoint, if it is at hand.
    """
    names = [str(checkpoint)]
    if source is not None:
        pretrained = last_entry(source.folder, "pretrain")
        if pretrained is not None:
            return Pretraining(int(pretrained["tokens"]), "the checkpoint's own record")
        # a converted checkpoint has a name of its own, and its source the known one
        names += [str(entry["source"]) for entry in read_record(source.folder)["history"] if entry.get("source")]
        names.append(str(source.config.get("_name_or_path") or ""))
    for name in names:
        # some repositories of Meta are called Meta-Llama-…
        short = name.rstrip("/").rpartition("/")[2].lower().removeprefix("meta-")
        for pattern, (tokens, reference) in _KNOWN.items():
            if re.fullmatch(pattern + _SUFFIX, short):
                return Pretraining(int(tokens), reference)
    return None


def resolve_pretraining(
    settings: UptrainSettings, checkpoint: str | Path, source: Checkpoint | None = None
) -> UptrainSettings:
    """Fill in ``pretraining_tokens`` if a fraction was given without them and they are known, and tell the user."""
    if settings.fraction is None or settings.pretraining_tokens is not None:
        return settings
    known = known_pretraining(checkpoint, source)
    if known is None:
        return settings
    info(f"Pretraining tokens: {known.tokens:,} ({known.source}).")
    return settings.model_copy(update={"pretraining_tokens": known.tokens})
