"""Settings of a conversion: the command, recipes, `sweep` and the Python API all read this model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, Field, field_validator

from ..console import parse_bytes
from ..corpus import TEXT
from ..errors import UsageError
from ..local_paths import expanded
from ..settings import RARE, Flags, NoEffect, Panel, Settings, Tokens
from .methods.table import METHODS

Grouping = Literal["contiguous", "similarity"]

_METHODS = "; ".join(f"{row.name}: {row.summary}" for row in METHODS.values())


def _reads_no_text(settings: ConvertSettings) -> bool:
    """Return True if nothing in these settings reads text."""
    method = METHODS[settings.resolved_method]
    if method.reads_text or settings.refine:
        return False
    return (settings.grouping or method.default_grouping) == "contiguous"


class CalibrationSettings(Settings):
    """Fields of every step that reads calibration text."""

    calibration: Annotated[str | None, Panel("Calibration and refinement")] = Field(
        None, description="text for the method and for refinement; never the text that you evaluate on"
    )
    text_column: str = Field(TEXT.text, description="column of its records that holds the text")
    calibration_tokens: Tokens = Field(131_072, description="tokens of that text to read")
    sequence_length: int = Field(
        512,
        gt=0,
        validation_alias=AliasChoices("sequence_length", "block"),
        description="tokens of one calibration sequence; best as many as the model will read at once",
    )
    device: str = Field("cpu", description="where calibration and refinement run: cpu, cuda, …")


class ConvertSettings(CalibrationSettings):
    """Everything that the result of a conversion depends on besides the source."""

    groups: Annotated[int, Panel("Conversion"), Flags(("--groups", "-g"))] = Field(
        gt=0, description="KV heads of the result (G); divides those of the source (K)"
    )
    method: str | None = Field(
        None, description=f"how a group of KV heads becomes one; default folded with text, else mean. {_METHODS}"
    )
    grouping: Grouping | None = Field(
        None,
        description="which heads form a group: neighbours, or those that share best; default depends on the method",
    )
    encoder: bool = Field(False, description="convert the encoder of an encoder-decoder as well as its decoder")

    refine: Annotated[int | None, Panel("Calibration and refinement")] = Field(
        None, ge=0, description="training steps per layer that fit it to the source; 0: none; default 200 for folded"
    )
    statistics: Path | None = Field(
        None, description="file that keeps the statistics of the text, or holds those of an earlier run"
    )

    rescale: Annotated[bool, Panel(RARE)] = Field(
        False, description="with method aligned: give the averaged head the mean norm of its members"
    )
    seed: int = Field(0, ge=0, description="seed of method random and of the order of text in refinement")
    max_shard_size: str | None = Field(
        None, description="largest weight file, such as 5GB; default: the boundaries of the source's files"
    )

    PANELS: ClassVar[tuple[str, ...]] = ("Conversion", "Calibration and refinement")
    NO_EFFECT: ClassVar[tuple[NoEffect, ...]] = (
        NoEffect(
            ("text_column", "calibration_tokens", "sequence_length"),
            lambda one: one.calibration is None,
            "there is no calibration text",
            "add --calibration",
        ),
        NoEffect(
            ("device",),
            lambda one: not one.looks_at_text,
            "without text the weights alone are read",
            "add --calibration",
        ),
        NoEffect(
            ("seed",),
            lambda one: one.resolved_method != "random" and not one.may_be_refined,
            "nothing here is random",
            "take --method random, or refine",
        ),
        NoEffect(
            ("rescale",),
            lambda one: one.rescale and one.method not in ("aligned", "aligned+rescale"),
            "it belongs to --method aligned",
            "add --method aligned",
        ),
        NoEffect(
            ("calibration", "statistics"),
            _reads_no_text,
            "this method with this grouping looks at no text",
            "take --method folded",
        ),
    )

    @field_validator("method")
    @classmethod
    def _known_method(cls, method: str | None) -> str | None:
        if method is not None and method not in METHODS:
            raise UsageError(f"There is no method {method}.", f"Methods: {', '.join(METHODS)}.")
        return method

    @field_validator("max_shard_size")
    @classmethod
    def _readable_size(cls, size: str | None) -> str | None:
        if size is not None:
            parse_bytes(size, "shard")
        return size

    @field_validator("statistics")
    @classmethod
    def _whole_path(cls, file: Path | None) -> Path | None:
        return None if file is None else expanded(file)

    def model_post_init(self, context: Any, /) -> None:
        if self.refine and self.calibration is None:
            raise UsageError(
                "Refinement fits to text, and there is none.", "Name some: --calibration stdlib, or a file."
            )

    @property
    def may_be_refined(self) -> bool:
        """Return True if the result is fitted to text after the method, unless its type forbids it."""
        if self.calibration is None:
            return False
        return METHODS[self.resolved_method].refined_by_default if self.refine is None else self.refine > 0

    @property
    def looks_at_text(self) -> bool:
        """Return True if text, or the statistics of text, is at hand."""
        return self.calibration is not None or self.statistics is not None

    @property
    def resolved_method(self) -> str:
        """A key of the table of methods."""
        method = self.method or ("folded" if self.looks_at_text else "mean")
        return "aligned+rescale" if self.rescale and method == "aligned" else method
