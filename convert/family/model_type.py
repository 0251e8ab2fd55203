"""What a model class expects: built on the meta device, it has names and shapes but no memory."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ...checkpoint.modelling import own_type, register
from ...checkpoint.source import CONFIG_NAME
from ...errors import CheckpointError, UnsupportedError, first_line
from ...libraries.transformers_internals import from_config
from .sanity import refuse_absurd

_CLASS_TABLES = (
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No warnings and no progress bars of transformers: what matters is checked here and said in our words."""
    library: Any = transformers.utils.logging
    level, bars = library.get_verbosity(), library.is_progress_bar_enabled()
    library.set_verbosity(logging.CRITICAL)
    library.disable_progress_bar()
    try:
        yield
    finally:
        library.set_verbosity(level)
        if bars:
            library.enable_progress_bar()


def known_type(config: dict[str, Any]) -> str:
    """The model type, when transformers has a class of its own for it.

    Raises:
        UnsupportedError: the type is missing or unknown, or lives in the checkpoint's own code.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise UnsupportedError(
            "config.json has no model_type, so its layout is not known.", "Add the right model_type."
        )
    own = own_type(config)
    if own is not None:
        register(own)
    if model_type in CONFIG_MAPPING:
        return model_type
    if "auto_map" in config:
        raise UnsupportedError(
            f"The type {model_type} needs the checkpoint's own code, which headfold does not run to convert.",
            "Re-key the checkpoint to a type of transformers (many such types are Llama or Qwen2 under another name).",
        )
    raise UnsupportedError(
        f"transformers {transformers.__version__} does not know the type {model_type}.",
        "A newer transformers may know it.",
    )


def model_class(config: dict[str, Any]) -> type[PreTrainedModel]:
    """The class that config.json names, else the type's language model class.

    Raises:
        UnsupportedError: there is none.
    """
    model_type = known_type(config)
    own = own_type(config)
    if own is not None:
        return own.classes()[1]  # type: ignore[no-any-return]
    usual = [table[model_type] for table in _CLASS_TABLES if model_type in table]
    named = config.get("architectures")
    for name in [*(named if isinstance(named, list) else ()), *usual]:
        found = getattr(transformers, name, None) if isinstance(name, str) else None
        if not isinstance(found, type) or not issubclass(found, PreTrainedModel):
            continue
        if name in usual or issubclass(CONFIG_MAPPING[model_type], found.config_class or ()):
            return found
    raise UnsupportedError(f"transformers has no language model class for the type {model_type}.")


def resolved_config(config: dict[str, Any]) -> PretrainedConfig:
    """config.json as its class sees it, with the class's defaults.

    Raises:
        CheckpointError: the class refuses the values.
    """
    model_type = known_type(config)
    refuse_absurd(config)
    with quiet_transformers(), tempfile.TemporaryDirectory() as place:
        # Through a file, because the loader decodes more than from_dict does (infinities, old spellings).
        (Path(place) / CONFIG_NAME).write_text(json.dumps(config), encoding="utf-8")
        try:
            return CONFIG_MAPPING[model_type].from_pretrained(place)
        except Exception as problem:  # config classes raise whatever their validators raise
            raise CheckpointError(
                f"config.json is refused by {CONFIG_MAPPING[model_type].__name__}: {first_line(problem)}",
                "Check that this checkpoint loads in transformers.",
            ) from problem


def build(model_class: type[PreTrainedModel], config: dict[str, Any]) -> PreTrainedModel:
    """The model on the meta device.

    Raises:
        UnsupportedError: the class cannot be built with these values.
    """
    resolved = resolved_config(config)
    with quiet_transformers(), torch.device("meta"):
        try:
            return from_config(model_class, resolved)
        except Exception as problem:  # a model class raises whatever its layers raise
            raise UnsupportedError(
                f"{model_class.__name__} cannot be built with these settings: {first_line(problem)}"
            ) from problem
