"""Model types of our own: classes that a checkpoint brings along as a file, where transformers has none with KV heads.

Each ``modeling_headfold_*.py`` here is a module of this package and, byte for byte, the file beside the weights that
config.json's ``auto_map`` names. In this package it is used directly, so none of our commands needs
``--trust-remote-code`` as long as the checkpoint's file is ours.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, UnsupportedError


@dataclass(frozen=True)
class OwnType:
    """One model type.

    Attributes:
        module: file in this folder and beside the weights, without ``.py``.
        config_class, model_class: in that file.
        auto_class: the Auto class of transformers that loads it.
    """

    model_type: str
    module: str
    config_class: str
    model_class: str
    auto_class: str

    @property
    def file_name(self) -> str:
        return f"{self.module}.py"

    @property
    def code(self) -> bytes:
        """The file."""
        return (Path(__file__).parent / self.file_name).read_bytes()

    @property
    def auto_map(self) -> dict[str, str]:
        """How config.json names the classes."""
        return {
            "AutoConfig": f"{self.module}.{self.config_class}",
            self.auto_class: f"{self.module}.{self.model_class}",
        }

    def classes(self) -> tuple[Any, Any]:
        """(config class, model class).

        Raises:
            UnsupportedError: the installed transformers is none that the file was tested with.
        """
        try:
            found = importlib.import_module(f"{__name__}.{self.module}")
        except ImportError as problem:
            raise UnsupportedError(f"Checkpoints of type {self.model_type} cannot be used here: {problem}") from problem
        return getattr(found, self.config_class), getattr(found, self.model_class)


OWN_TYPES: dict[str, OwnType] = {
    own.model_type: own
    for own in (
        OwnType(
            "headfold_t5",
            "modeling_headfold_t5",
            "HeadfoldT5Config",
            "HeadfoldT5ForConditionalGeneration",
            "AutoModelForSeq2SeqLM",
        ),
        OwnType(
            "headfold_bart",
            "modeling_headfold_bart",
            "HeadfoldBartConfig",
            "HeadfoldBartForConditionalGeneration",
            "AutoModelForSeq2SeqLM",
        ),
        OwnType(
            "headfold_decoder",
            "modeling_headfold_decoder",
            "HeadfoldDecoderConfig",
            "HeadfoldDecoderForCausalLM",
            "AutoModelForCausalLM",
        ),
    )
}


def own_type(config: Mapping[str, Any]) -> OwnType | None:
    """The type of our own that a config.json names, or None."""
    return OWN_TYPES.get(str(config.get("model_type")))


def own_config(own: OwnType, config: Mapping[str, Any]) -> dict[str, Any]:
    """The contents of ``config`` as a config.json of this type; the number of KV heads is the caller's to add."""
    named = {"architectures": [own.model_class], "auto_map": own.auto_map, "model_type": own.model_type}
    return {**config, **named}


def write_code(config: Mapping[str, Any], folder: Path) -> None:
    """Put the file of the type that ``config`` names into ``folder``; nothing for a type of transformers."""
    own = own_type(config)
    if own is not None:
        (folder / own.file_name).write_bytes(own.code)


def is_ours(own: OwnType, folder: Path) -> bool:
    """True when the file beside the weights is the one of this package."""
    try:
        return (folder / own.file_name).read_bytes() == own.code
    except OSError:
        return False


def register(own: OwnType) -> None:
    """Tell the Auto classes of this process about the type; done once, done again it changes nothing.

    Raises:
        UnsupportedError: the installed transformers is none that the file was tested with.
    """
    import transformers

    config_class, model_class = own.classes()
    transformers.AutoConfig.register(own.model_type, config_class, exist_ok=True)
    getattr(transformers, own.auto_class).register(config_class, model_class, exist_ok=True)


def admit(config: Mapping[str, Any], folder: Path) -> None:
    """Get ready to load a checkpoint without running any code that it brings; nothing for a type of transformers.

    Raises:
        UnsupportedError: the file beside the weights is not the one of this package, or the installed transformers is
            none that it was tested with.
        CheckpointError: there is no such file.
    """
    own = own_type(config)
    if own is None:
        return
    if not (folder / own.file_name).exists():
        raise CheckpointError(f"{folder} lacks {own.file_name}, the code of its type.", "Fetch the checkpoint again.")
    if not is_ours(own, folder):
        raise UnsupportedError(
            f"{folder / own.file_name} is not the file that this version of headfold writes.",
            "Use the headfold that wrote it (headfold.json has its version); or read the file, and pass "
            "--trust-remote-code to a command that runs the model.",
        )
    register(own)
