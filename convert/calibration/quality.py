"""Say what a conversion did to the quality of a model: measured on held-out text, exact, or unknown.

No interval stands behind these numbers, because a few sequences of few documents allow none. ``headfold eval`` gives
numbers with intervals.
"""

from __future__ import annotations

import hashlib
import math
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from ...checkpoint.source import Checkpoint
from ...console import human_bytes, info, warn
from ...local_paths import public, public_sentence
from ..family.model_type import ModelType
from ..methods.table import Method
from .encoder_decoder import cut_spans
from .held_out import HeldOutText, loss_per_token
from .offload import load_or_offload
from .out_of_memory import reporting_out_of_memory
from .source_model import SourceModel
from .text import CalibrationText

_SEED = 1
"""Seed of the spans that are cut out of held-out text for an encoder-decoder."""
SOURCE_STAGE, CONVERTED, REFINED = "source", "converted", "refined"


@dataclass(frozen=True)
class Quality:
    """The change of quality by a conversion, as headfold.json keeps it.

    Attributes:
        kind: ``measured`` on held-out text; ``exact``, the result computes what its source computes; else ``unknown``.
        summary: the same in words.
        advice: what the user may do next; empty for nothing.
        text: the held-out text: its corpus, size and a hash of its token ids; empty where nothing was measured.
        perplexity: by stage (``source``, ``converted``, ``refined``) in this order; None for one that is not finite.
        nats_per_token: the mean loss behind each perplexity.
    """

    kind: Literal["measured", "exact", "unknown"]
    summary: str
    advice: str = ""
    text: dict[str, Any] = field(default_factory=dict)
    perplexity: dict[str, float | None] = field(default_factory=dict)
    nats_per_token: dict[str, float | None] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """Make its entry of headfold.json, which is published."""
        found = asdict(self)
        return {**public(found), "summary": public_sentence(self.summary), "advice": public_sentence(self.advice)}

    def say(self) -> None:
        """Print it: a warning where nobody knows how good the result is."""
        (warn if self.kind == "unknown" else info)(f"{self.summary} {self.advice}".strip())


class HeldOutCheck:
    """Measures perplexity on the held-out part of calibration text, of a source and of what becomes of it.

    Args:
        text: with a held-out part.
        tokenizer: of an encoder-decoder, which fills in spans of the text; None for a decoder.
        device: where models run.
    """

    def __init__(self, text: CalibrationText, tokenizer: Any, device: str, *, trust_remote_code: bool) -> None:
        assert text.held_out_BT is not None
        self._corpus, self._ids_BT = text.corpus, text.held_out_BT
        self._device, self._trust = device, trust_remote_code
        if tokenizer is None:
            self._scored = HeldOutText(self._ids_BT)
        else:
            read_BS, written_BT = cut_spans(self._ids_BT, tokenizer, _SEED)
            self._scored = HeldOutText(written_BT, read_BS)
        self._losses: dict[str, float] = {}

    def measure_source(self, model: SourceModel) -> None:
        loaded = model()
        with model.reporting_out_of_memory("Measuring the source"):
            self._losses[SOURCE_STAGE] = loss_per_token(loaded, self._scored, device=self._device)

    def measure(self, stage: str, folder: Path) -> None:
        """Measure the checkpoint in ``folder``. Weights stay on disk where those of the source would."""
        size = Checkpoint.open(folder).weight_bytes
        needs = f"its weights take {human_bytes(size)}"
        with (
            tempfile.TemporaryDirectory(prefix="headfold-") as scratch,
            reporting_out_of_memory(self._device, "Measuring the result", lambda: needs),
        ):
            model = load_or_offload(
                folder, size, Path(scratch), device=self._device, trust_remote_code=self._trust
            ).eval()
            self._losses[stage] = loss_per_token(model, self._scored, device=self._device)

    def quality(self) -> Quality:
        return Quality(
            "measured",
            self._summary(),
            "`headfold eval` gives one with an interval.",
            self._describe_text(),
            {stage: _finite(_perplexity(loss)) for stage, loss in self._losses.items()},
            {stage: _finite(loss) for stage, loss in self._losses.items()},
        )

    def _summary(self) -> str:
        stages = " → ".join(f"{_shown(_perplexity(loss))} {stage}" for stage, loss in self._losses.items())
        kind = "Perplexity" if self._scored.read_BS is None else "Perplexity of targets, spans cut out of the text,"
        source, *_, last = self._losses.values()
        return (
            f"{kind} on {self._ids_BT.numel():,} held-out tokens of {self._corpus.spec}: {stages} "
            f"({_change(last - source)}). This is a rough figure, without an interval."
        )

    def _describe_text(self) -> dict[str, Any]:
        ids = hashlib.sha256(self._ids_BT.numpy().tobytes()).hexdigest()
        sequences, length = self._ids_BT.shape
        return {
            "corpus": self._corpus.spec,
            "revision": self._corpus.revision,
            "tokens": self._ids_BT.numel(),
            "sequences": sequences,
            "sequence_length": length,
            "scored_tokens": self._scored.scored,
            "ids_sha256": ids,
        }


def exact(reason: str) -> Quality:
    """Describe a result that computes what its source computes."""
    return Quality("exact", f"{reason}, so the result computes what its source computes.")


def without_text(method: Method, model_type: ModelType, *, queries_may_change: bool) -> Quality:
    """Describe a result that was made from weights alone.

    Args:
        queries_may_change: methods that rewrite queries are exact for this model.
    """
    if model_type.is_encoder_decoder:
        advice = "Uptrain it. Where the tokenizer has sentinels, as T5's has, --calibration TEXT makes a better start"
    elif queries_may_change:
        advice = "With --calibration TEXT the method folded fits the heads to text, and the change is measured"
    else:
        advice = "With --calibration TEXT --refine 200 each layer is fitted to text, and the change is measured"
    return Quality("unknown", f"{method.without_text}. Nothing was measured.", f"{advice}.")


def from_saved_statistics(file: Path) -> Quality:
    """Describe a result of statistics in a file, with no text at hand to measure on."""
    return Quality(
        "unknown",
        f"Nothing was measured: {file} holds statistics and no text.",
        "Name the text as well, with --calibration, or compare by `headfold eval`.",
    )


def too_little_text(corpus: str) -> Quality:
    """Describe a result of text so short that none of it was held out."""
    return Quality(
        "unknown",
        f"Nothing was measured: {corpus} gives too few tokens to hold any out.",
        "Give more text, or compare by `headfold eval`.",
    )


def not_asked_for() -> Quality:
    """Describe a result that its caller measures."""
    return Quality("unknown", "Nothing was measured.")


def _perplexity(loss: float) -> float:
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _shown(perplexity: float) -> str:
    return f"{perplexity:,.2f}" if perplexity < 1000 else f"{perplexity:,.0f}"


def _change(difference: float) -> str:
    """Show a difference of losses as a change of perplexity: a share, and a factor where it more than doubles."""
    if not math.isfinite(difference):
        return "not a number"
    factor = _perplexity(difference)
    return f"{factor - 1:+.1%}".replace("%", " %") if factor < 2 else f"{factor:,.3g} times"
