"""Settings of a sweep: the command and the Python API read this model."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from ..convert.settings import CalibrationSettings
from ..settings import Counts, Names, Panel


class SweepSettings(CalibrationSettings):
    """Conversions to try, and the measurement of each result."""

    groups: Annotated[Counts, Panel("Sweep")] = Field(description="numbers of groups, such as 8,4,2,1")
    methods: Names = Field(
        ("mean", "first", "random", "aligned", "folded", "folded+refine"),
        description="methods; +refine behind a name refines the result",
    )
    refine: int = Field(200, gt=0, description="refinement steps per layer for methods with +refine")
    data: str = Field(description="text to measure on, never the text that calibration reads")
    tokens: int = Field(32_768, gt=0, description="tokens to score")
    window: int = Field(512, gt=1, description="tokens that a model sees at once")

    PANELS: ClassVar[tuple[str, ...]] = ("Sweep", "Calibration and refinement")
