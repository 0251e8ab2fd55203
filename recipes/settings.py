"""Settings of a sweep: the command and the Python API read this model."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field, field_validator, model_validator

from ..convert.methods.table import METHODS
from ..convert.settings import CalibrationSettings
from ..errors import UsageError
from ..settings import Counts, Names, NoEffect, Panel

REFINED = "+refine"
"""Suffix of a method whose result is refined."""


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

    @field_validator("methods")
    @classmethod
    def _known_methods(cls, methods: tuple[str, ...]) -> tuple[str, ...]:
        for method in methods:
            if method.removesuffix(REFINED) not in METHODS:
                known = ", ".join(METHODS)
                raise UsageError(f"There is no method {method}.", f"Methods: {known}, each also with {REFINED}.")
        return methods

    @model_validator(mode="after")
    def _text_for_methods_that_read_it(self) -> Any:
        if self.reads_text and self.calibration is None:
            raise UsageError(
                "Some of these methods read calibration text.", "Name some: --calibration stdlib, or a file."
            )
        return self

    @property
    def reads_text(self) -> bool:
        """Return True if any of the conversions reads calibration text."""
        return any(one.endswith(REFINED) or METHODS[one].reads_text for one in self.methods)

    NO_EFFECT: ClassVar[tuple[NoEffect, ...]] = (
        NoEffect(
            ("refine",),
            lambda one: not any(method.endswith(REFINED) for method in one.methods),
            "no method is refined",
            f"add {REFINED} to a method",
        ),
        NoEffect(
            tuple(name for name in CalibrationSettings.model_fields if name != "text_column"),
            lambda one: not one.reads_text,
            "none of the methods reads text",
            "add a method that does",
        ),
    )
    PANELS: ClassVar[tuple[str, ...]] = ("Sweep", "Calibration and refinement")
