"""The base of all settings models, and the marks that place their fields on the command line."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar, Union, get_args, get_origin

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from .corpus import TEXT, Columns
from .errors import UsageError
from .spans import MEAN_SPAN, NOISE_DENSITY

RARE = "Rarely needed"
"""Last group of options in ``--help``."""


# Passed as the context of pydantic, which reaches the validators and no field.
_RESTORED = "restored from a dump"
_Model = TypeVar("_Model", bound="Settings")


@dataclass(frozen=True)
class Panel:
    """Start a group of options in ``--help``: this field and those that follow it."""

    title: str


@dataclass(frozen=True)
class Flags:
    """Spell the option in these ways instead of by the field's name."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class OffSwitch:
    """Offer ``--no-FIELD`` for a field that may be None but is not by default."""

    description: str


@dataclass(frozen=True)
class Separated:
    """Take all values from one option, separated by commas (``8,4,2``)."""


@dataclass(frozen=True)
class ReadByModel:
    """Hand the option to the model as it was typed: the model reads it better than the command line would."""


class NoEffect(NamedTuple):
    """Fields that change nothing while a condition holds.

    Attributes:
        fields: their names.
        condition: True for settings under which they change nothing.
        reason: completes "… would change nothing: …".
        remedy: completes "Leave … out, or …".
    """

    fields: tuple[str, ...]
    condition: Callable[[Any], bool]
    reason: str
    remedy: str


class Settings(BaseModel):
    """The settings of one step: command line, recipe and Python API all use this one model.

    Raises:
        UsageError: a field was given that changes nothing, see :attr:`NO_EFFECT`.
        pydantic.ValidationError: an unknown field, or a value that does not fit (see :func:`validated`).
    """

    # frozen, since settings become part of records and identities
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, allow_inf_nan=False)

    PANELS: ClassVar[tuple[str, ...]] = ()
    """Groups of options in the order of ``--help``. :data:`RARE` is always the last."""
    NO_EFFECT: ClassVar[tuple[NoEffect, ...]] = ()
    """Combinations to refuse, since whoever gives an option expects an effect."""

    @model_validator(mode="after")
    def _refuse_given_fields_without_effect(self, info: ValidationInfo) -> Any:
        if info.context != _RESTORED:
            self.refuse_without_effect(self.model_fields_set)
        return self

    def refuse_without_effect(self, given: Collection[str]) -> None:
        """Check :attr:`NO_EFFECT` for the fields that somebody gave.

        Raises:
            UsageError: names those that change nothing.
        """
        for row in self.NO_EFFECT:
            idle = [name for name in row.fields if name in given]
            if idle and row.condition(self):
                options = " and ".join(map(option_name, idle))
                raise UsageError(
                    f"{options} would change nothing: {row.reason}.", f"Leave {options} out, or {row.remedy}."
                )

    @classmethod
    def restored(cls: type[_Model], values: dict[str, Any]) -> _Model:
        """Make settings from a dump. It contains every field, so the no-effect check is skipped."""
        return cls.model_validate(values, context=_RESTORED)


def marks(annotation: Any) -> Iterator[Any]:
    """List the marks within a type, also where it is one side of ``X | None``."""
    if get_origin(annotation) is Annotated:
        yield from annotation.__metadata__
    elif get_origin(annotation) in (Union, UnionType):
        for part in get_args(annotation):
            yield from marks(part)


def option_name(field: str) -> str:
    """``sequence_length`` → ``--sequence-length``."""
    return "--" + field.replace("_", "-")


def validated(model: type[Settings], values: dict[str, Any], command: str) -> Any:
    """Make settings from options.

    Raises:
        UsageError: names the first option that does not fit.
    """
    try:
        return model(**values)
    except ValidationError as problem:
        # one fault at a time reads better than a list, and the next call shows the next one
        fault = problem.errors()[0]
        option = option_name(str(fault["loc"][0])) if fault["loc"] else command
        # pydantic puts this in front of the words of our own validators
        message = fault["msg"].removeprefix("Value error, ")
        raise UsageError(f"{option} {fault['input']}: {message}.", f"See `headfold {command} --help`.") from problem


def _whole(value: Any) -> Any:
    """Read 2e12, as people write numbers of tokens."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError as problem:
            raise ValueError(f"{value!r} is not a number of tokens") from problem
    if isinstance(value, float):
        if not value.is_integer():  # also false for inf and nan
            raise ValueError(f"{value} is not a whole number of tokens")
        return int(value)
    return value


def _split(value: Any) -> Any:
    """Read ``8,4,2`` as the command line gives it."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _split_numbers(value: Any) -> Any:
    """Read ``8,4,2`` as the command line gives it."""
    parts = _split(value)
    # a minus passes here, because the range check of the field explains it better
    if isinstance(value, str) and not (parts and all(part.lstrip("-").isdigit() for part in parts)):
        raise ValueError(f"{value!r} is not a list of numbers, such as 8,4,2")
    return parts


Tokens = Annotated[int, BeforeValidator(_whole), Field(gt=0), ReadByModel()]
"""A number of tokens, for which ``2e12`` is understood."""

Counts = Annotated[tuple[Annotated[int, Field(gt=0)], ...], BeforeValidator(_split_numbers), Separated()]
"""Positive whole numbers, written as ``8,4,2`` on the command line."""

Names = Annotated[tuple[str, ...], BeforeValidator(_split), Separated()]
"""Names, written as ``mean,folded`` on the command line."""


class RecordSettings(Settings):
    """Fields of every step that reads records: their columns, and what an encoder-decoder is given of them."""

    text_column: Annotated[str, Panel("Text")] = Field(
        TEXT.text,
        validation_alias=AliasChoices("text_column", "source_column"),
        description="column of the records with the text that a model reads",
    )
    target_column: str | None = Field(
        None, description="column with the text that an encoder-decoder writes; default span corruption"
    )
    noise_density: Annotated[float, Panel(RARE)] = Field(
        NOISE_DENSITY, gt=0, lt=1, description="share of the tokens that span corruption cuts out"
    )
    mean_span: float = Field(MEAN_SPAN, ge=1, description="mean tokens of a span in span corruption")

    NO_EFFECT: ClassVar[tuple[NoEffect, ...]] = (
        NoEffect(
            ("noise_density", "mean_span"),
            lambda one: one.target_column is not None,
            "with a target column no spans are cut out",
            "leave --target-column out",
        ),
    )

    @property
    def columns(self) -> Columns:
        """Columns of the records to read."""
        return Columns(self.text_column, self.target_column)
