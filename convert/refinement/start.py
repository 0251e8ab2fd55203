"""Decide whether and how a result is refined, refuse what cannot be, and refine a converted folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...checkpoint.source import Checkpoint
from ...console import counted, info, warn
from ...errors import DataError, UnsupportedError
from ..calibration.source_model import SourceModel
from ..calibration.text import CalibrationText
from ..family.attention_layer import AttentionLayer
from ..family.model_type import ModelType
from ..rewrites.materialise import model_folder
from ..settings import ConvertSettings
from .fit import RefineSettings
from .on_disk import identity_of, refine_folder, require_refinable
from .resume import LayerFit, RefinementFolder


@dataclass(frozen=True)
class Refinement:
    """A refinement that can be done, with nothing done yet.

    Attributes:
        layers: the attention layers to fit.
        work: folder beside the output, from which a killed refinement continues.
        conversion: how the result is converted, by the names of the options; part of the identity of the work.
    """

    layers: Sequence[AttentionLayer]
    text: CalibrationText
    settings: RefineSettings
    work: Path
    conversion: dict[str, Any]
    device: str
    trust_remote_code: bool

    def run(self, source: Checkpoint, folder: Path) -> dict[str, Any]:
        """Refine a converted folder in place.

        Returns:
            The entry for the record.
        """
        info(f"Refining {counted(len(self.layers), 'layer')}, {counted(self.settings.steps, 'step')} each.")
        fits = refine_folder(
            model_folder(source),
            folder,
            self.layers,
            self.text.ids_BT,
            self.settings,
            work=self.work,
            conversion=self.conversion,
            device=self.device,
            trust_remote_code=self.trust_remote_code,
        )
        return {
            "settings": asdict(self.settings),
            "text": self.text.describe(),
            "layers": [_entry(fit) for fit in fits],
        }

    def require_possible(self, model: SourceModel) -> None:
        """Look at a few tokens in the source, and raise what refinement would raise after the conversion.

        Raises:
            HeadfoldError: see :func:`.on_disk.require_refinable`.
        """
        source = Checkpoint.open(model_folder(model.source))
        identity = identity_of(source, self.text.ids_BT, self.settings, self.conversion)
        work = RefinementFolder(self.work, identity)
        with model.reporting_out_of_memory("A look at the source"):
            require_refinable(model, source, self.layers, self.text.ids_BT, self.settings, work, device=model.device)


def refinement_steps(settings: ConvertSettings, model_type: ModelType) -> int:
    """Decide on the steps per layer, 0 for no refinement.

    Raises:
        UnsupportedError: refinement was requested, and the model is an encoder-decoder.
    """
    if settings.refine and model_type.is_encoder_decoder:
        # It fits one layer after the other to one text, and cross-attention reads two.
        raise UnsupportedError(
            f"Refinement is not offered for encoder-decoders ({model_type.name}).",
            "Leave --refine out, and uptrain the result.",
        )
    if not settings.may_be_refined or model_type.is_encoder_decoder:
        return 0
    return settings.refine or RefineSettings.steps


def fit_settings(steps: int, seed: int, text: CalibrationText) -> RefineSettings:
    """Make batches small where there is little text, so that there is more than one."""
    return RefineSettings(steps, seed=seed, batch_tokens=min(RefineSettings.batch_tokens, text.ids_BT.numel() // 8))


def settled(refinement: Refinement, model: SourceModel, *, requested: bool) -> Refinement | None:
    """Check that a refinement is possible, before anything is computed.

    Returns:
        None, with a warning, where it is not and it is only the default.

    Raises:
        HeadfoldError: it was requested and is not possible.
    """
    try:
        refinement.require_possible(model)
    except (UnsupportedError, DataError) as problem:
        if requested:
            raise
        warn(f"The result will not be refined: {problem.message}")
        return None
    return refinement


def _entry(fit: LayerFit) -> dict[str, float]:
    return {"layer": fit.layer, "error_before": round(fit.error_before, 6), "error_after": round(fit.error_after, 6)}
