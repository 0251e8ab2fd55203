"""Command-line options: those that several commands share, and those that a settings model describes.

A field of a settings model is declared once, in the model. :func:`with_settings` makes its option from it: name, type,
default, help text and the group it stands in.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import typer
from pydantic import AliasChoices
from pydantic.fields import FieldInfo

from . import console
from .errors import UsageError
from .local_paths import expanded
from .settings import RARE, Flags, OffSwitch, Panel, ReadByModel, Separated, Settings, marks, option_name, validated

Source = Annotated[
    str, typer.Argument(metavar="CHECKPOINT", help="Folder of the checkpoint, or its id on the Hugging Face hub.")
]


def _whole(paths: Any) -> Any:
    """Expand a path, each of several, or none."""
    return [expanded(path) for path in paths] if isinstance(paths, (list, tuple)) else paths and expanded(paths)


def path_option(*names: str, **described: Any) -> Any:
    """Make an option for a path. A leading ``~`` is replaced, as a shell does except behind ``--out=``."""
    return typer.Option(*names, callback=_whole, **described)


def paths_argument(**described: Any) -> Any:
    """Make an argument for several paths, see :func:`path_option`."""
    return typer.Argument(callback=_whole, **described)


Out = Annotated[Path, path_option("--out", "-o", help="Folder to write. It appears whole or not at all.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the output folder if it exists.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be done. Write nothing.")]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the checkpoint.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")]

_Command = TypeVar("_Command", bound=Callable[..., Any])
_CONTEXT = "typer_context"


def with_settings(command_name: str, *, required: tuple[str, ...] = ()) -> Callable[[_Command], _Command]:
    """Give a command the options of a settings model.

    The command has a parameter ``settings``, annotated with the model. Its place in the signature is taken by one
    option per field. Only what stands on the command line is handed to the model, so that the model can tell what was
    given from what was left at its default.

    Args:
        command_name: for messages that point to ``headfold NAME --help``.
        required: fields that have a default elsewhere but must be named on the command line.
    """

    def decorate(command: _Command) -> _Command:
        # eval_str: postponed annotations are strings until then
        signature = inspect.signature(command, eval_str=True)
        model = signature.parameters["settings"].annotation
        options = list(_options(model, required))
        others = [one for name, one in signature.parameters.items() if name != "settings"]
        context = inspect.Parameter(_CONTEXT, inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        # keyword-only parameters may have their defaults in any order
        parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in (*options, *others)]

        @functools.wraps(command)
        def run(**values: Any) -> Any:
            context = values.pop(_CONTEXT)
            fields = {name: values.pop(name) for name in model.model_fields}
            given = {name: value for name, value in fields.items() if _was_given(context, name)}
            for old, name in _renamed(model):
                if (value := values.pop(old)) is not None:
                    console.warn(f"{option_name(old)} is called {option_name(name)} now; the next release drops it.")
                    if name in given:
                        raise UsageError(
                            f"{option_name(old)} and {option_name(name)} are the same option.", "Leave one of them out."
                        )
                    given[name] = value
            for name in [one for one in model.model_fields if values.pop(f"no_{one}", False)]:
                if name in given:
                    raise UsageError(f"--{name} and --no-{name} contradict each other.", "Leave one of them out.")
                given[name] = None
            return command(settings=validated(model, given, command_name), **values)

        # typer reads options from the signature, and their types from the annotations
        run.__signature__ = signature.replace(parameters=[context, *parameters])  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in [context, *parameters]}
        return run  # type: ignore[return-value]

    return decorate


def _was_given(context: Any, name: str) -> bool:
    """Tell whether an option stands on the command line, if only at its default."""
    source = context.get_parameter_source(name)
    # by its name: typer has a copy of click inside and does not export this enumeration
    return source is not None and source.name != "DEFAULT"


def _options(model: type[Settings], required: tuple[str, ...]) -> Iterator[inspect.Parameter]:
    """Make one keyword parameter per field, as typer reads it."""
    for name, panel in _by_panel(model):
        field = model.model_fields[name]
        kind, flags = _kind_and_flags(name, field)
        needed = field.is_required() or name in required
        option = typer.Option(
            *flags,
            help=_help(field, kind, required=needed),
            rich_help_panel=panel,
            show_default=False,
            metavar=_metavar(kind),
        )
        default = inspect.Parameter.empty if needed else _default(field, kind)
        yield _parameter(name, kind, option, default)
        for mark in _marks_of(field):
            if isinstance(mark, OffSwitch):
                switch = typer.Option(f"--no-{name}", help=mark.description, rich_help_panel=panel)
                yield _parameter(f"no_{name}", bool, switch, False)
        for old in _old_names(field):
            yield _parameter(old, kind | None, typer.Option(option_name(old), hidden=True), None)


def _by_panel(model: type[Settings]) -> list[tuple[str, str]]:
    """List (field, its group in ``--help``), group by group. A field without a mark belongs to the group before it."""
    panel, found = "Options", []
    for name, field in model.model_fields.items():
        panel = next((mark.title for mark in _marks_of(field) if isinstance(mark, Panel)), panel)
        found.append((name, panel))
    # the rare options come last, wherever their fields are declared
    order = {title: place for place, title in enumerate((*model.PANELS, RARE))}
    # what is special to this command comes before what it shares with others
    own = vars(model).get("__annotations__", {})
    return sorted(found, key=lambda one: (order[one[1]], one[0] not in own))


def _parameter(name: str, kind: Any, option: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


def _kind_and_flags(name: str, field: FieldInfo) -> tuple[Any, tuple[str, ...]]:
    """Find the type that typer converts to, and the spelling of the option.

    The model checks ranges and reads what typer has no type for: such a field is a string here.
    """
    plain, found = option_name(name), _marks_of(field)
    flags = next((mark.names for mark in found if isinstance(mark, Flags)), (plain,))
    kind, optional = _without_none(field.annotation)
    if kind is bool:
        # without a default there are three states: yes, no, and not given
        return (bool | None, (f"{plain}/--no-{plain[2:]}",)) if optional else (bool, flags)
    if any(isinstance(mark, (Separated, ReadByModel)) for mark in found):
        return str | None if optional else str, flags
    if _is_several(kind):
        return list[str], flags
    return kind | None if optional else kind, flags


def _marks_of(field: FieldInfo) -> list[Any]:
    return [*field.metadata, *marks(field.annotation)]


def _without_none(annotation: Any) -> tuple[Any, bool]:
    """``int | None`` → (int, True)."""
    if get_origin(annotation) is Annotated:
        return get_args(annotation)[0], False
    if get_origin(annotation) not in (Union, UnionType):
        return annotation, False
    parts = [part for part in get_args(annotation) if part is not NoneType]
    optional = len(parts) < len(get_args(annotation))
    several = next((part for part in parts if _is_several(part)), parts[0])  # `str | tuple[str, ...]` may be repeated
    return several, optional


def _is_several(kind: Any) -> bool:
    return get_origin(kind) in (tuple, list)


def _old_names(field: FieldInfo) -> Iterator[str]:
    """List the names of an earlier release."""
    if isinstance(field.validation_alias, AliasChoices):
        yield from map(str, field.validation_alias.choices[1:])


def _renamed(model: type[Settings]) -> Iterator[tuple[str, str]]:
    """List (old name, name) of every renamed field."""
    for name, field in model.model_fields.items():
        yield from ((old, name) for old in _old_names(field))


_METAVARS = {int: "N", float: "X", str: "TEXT", Path: "PATH", list[str]: "TEXT"}
"""Short names of the types, so that ``--help`` has room for its sentences."""


def _metavar(kind: Any) -> str | None:
    """Name the value. The help text lists choices, which would make this column wide."""
    plain = _without_none(kind)[0]
    return "CHOICE" if get_origin(plain) is Literal else _METAVARS.get(plain)


def _help(field: FieldInfo, kind: Any, *, required: bool) -> str:
    """Join description, choices and default. Typer would give the default a line of its own."""
    text = field.description or ""
    plain = _without_none(kind)[0]
    if get_origin(plain) is Literal and not all(choice in text for choice in get_args(plain)):
        text += f" ({', '.join(get_args(plain)[:-1])} or {get_args(plain)[-1]})"
    default = None if required else _default(field, None)
    shown = f" (default {default})" if default not in (None, False, "") else ""
    literal = re.match(r"auto\b|KL\(", text)  # a value, or a name that has its capitals
    return (text if literal else text[:1].upper() + text[1:]) + shown + "."


def _default(field: FieldInfo, kind: Any) -> Any:
    """Find the default as typer shows it: a repeated option is a list, a separated one a string."""
    default = field.get_default(call_default_factory=True)
    if kind == list[str]:
        return [default] if isinstance(default, str) else list(default or [])
    if isinstance(default, (tuple, list)):
        return ",".join(map(str, default))
    return str(default) if kind is str and default is not None else default


def as_options(settings: Settings, *, always: tuple[str, ...] = ()) -> list[str]:
    """Write the command line that gives these settings.

    Args:
        always: fields to name even at their default; all others at their default are left out.
    """
    words: list[str] = []
    for name, field in type(settings).model_fields.items():
        value, option = getattr(settings, name), option_name(name)
        if name not in always and value == field.get_default(call_default_factory=True):
            continue
        # the default was left out above, so switching off must be said
        if value is None or value is False:
            words.append(f"--no-{name.replace('_', '-')}")
        elif value is True:
            words.append(option)
        elif any(isinstance(mark, Separated) for mark in _marks_of(field)):
            words += [option, ",".join(map(str, value))]
        else:
            for one in value if isinstance(value, (tuple, list)) else [value]:
                words += [option, str(one)]
    return words


def numbers(text: str) -> list[int]:
    """``8,4,2,1``."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as problem:
        raise UsageError(f"{text!r} is not a list of numbers.", "Write them as 8,4,2,1.") from problem


def share(text: str) -> float:
    """``2%`` or ``0.02``."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError as problem:
        raise UsageError(f"{text!r} is not a share.", "Write it as 2% or 0.02.") from problem
    # a bare 2 is more likely 2 % than 200 %, so it is refused
    if not math.isfinite(value) or value < 0 or (value >= 1 and not text.endswith("%")):
        raise UsageError(f"{text!r} is not a share.", "Write it as 2% or 0.02.")
    return value
