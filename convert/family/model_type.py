"""A model type as one config.json describes it: its class, its resolved config, and the class on the meta device."""

from __future__ import annotations

import json
import logging
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ...checkpoint.modelling import OwnModelType, own_type, register
from ...checkpoint.source import CONFIG_NAME
from ...errors import CheckpointError, UnsupportedError, reason
from ...libraries.transformers_internals import from_config

KV_KEY = "num_key_value_heads"

_CLASS_TABLES = (
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
)
_LIMITS = (
    (re.compile(r"(num|n)_\w*layers?|n_layer|num_blocks|depths?"), 2_000),
    (re.compile(r"(num|n)_\w*(heads?|experts|groups|codebooks)|n_head"), 100_000),
)
"""Keys of config.json, and a number an order of magnitude above the largest model's."""


class ModelType:
    """A model type with the settings of one config.json. It is made where a checkpoint is opened, and handed on.

    Whatever takes long (resolving the config, building the class) is done once, when it is first needed.

    Attributes:
        config: config.json, parsed.
        name: its ``model_type``.
        own: the type of headfold's own with this name; None for a type of transformers.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        """Recognise the type.

        Raises:
            UnsupportedError: transformers has no class of its own for it.
        """
        self.config = config
        self.own: OwnModelType | None = own_type(config)
        self.name = _known_name(config, self.own)
        self._models: dict[str, PreTrainedModel] = {}

    @cached_property
    def resolved(self) -> PretrainedConfig:
        """config.json with the defaults of its class; it is shared, so nobody may change it.

        Raises:
            CheckpointError: the class refuses the values.
        """
        return _resolved(self.name, _without_null(self.config))

    @cached_property
    def text(self) -> Any:
        """The part of the resolved config that describes the text decoder."""
        return self.resolved.get_text_config(decoder=True)

    @cached_property
    def model_class(self) -> type[PreTrainedModel]:
        """The class that config.json names, else the language model class of the type.

        Raises:
            UnsupportedError: there is none.
        """
        if self.own is not None:
            return self.own.classes()[1]  # type: ignore[no-any-return]
        usual = [table[self.name] for table in _CLASS_TABLES if self.name in table]
        named = self.config.get("architectures")
        for name in [*(named if isinstance(named, list) else ()), *usual]:
            found = getattr(transformers, name, None) if isinstance(name, str) else None
            if not isinstance(found, type) or not issubclass(found, PreTrainedModel):
                continue
            if name in usual or issubclass(CONFIG_MAPPING[self.name], found.config_class or ()):
                return found
        raise UnsupportedError(f"transformers has no language model class for the type {self.name}.")

    @property
    def is_encoder_decoder(self) -> bool:
        """True for encoder-decoders that have a number of KV heads; all of them are types of headfold's own."""
        return self.own is not None and self.own.auto_class == "AutoModelForSeq2SeqLM"

    def side(self, module: str) -> str:
        """Say whose keys an attention module reads: ``self`` and ``cross`` in the decoder, or ``encoder``."""
        if not self.is_encoder_decoder:
            return "self"
        if ".encoder." in f".{module}":
            return "encoder"
        return "cross" if module.endswith(("EncDecAttention", "encoder_attn")) else "self"

    def on_meta(self, config: dict[str, Any] | None = None) -> PreTrainedModel:
        """Build the class on the meta device, where it has names and shapes but no memory.

        Args:
            config: a variant of config.json, for example with fewer KV heads.

        Raises:
            UnsupportedError: the class cannot be built with these values.
        """
        config = self.config if config is None else config
        key = json.dumps(config)
        if key not in self._models:
            # Each variant is resolved anew: config classes derive further settings from the number of KV heads.
            self._models[key] = _built(self.model_class, _resolved(self.name, config))
        return self._models[key]


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers: headfold checks what matters, and says it in its own words."""
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


def _known_name(config: dict[str, Any], own: OwnModelType | None) -> str:
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise UnsupportedError(
            "config.json has no model_type, so its layout is not known.", "Add the right model_type."
        )
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


def _resolved(name: str, config: dict[str, Any]) -> PretrainedConfig:
    _refuse_absurd(config)
    with quiet_transformers(), tempfile.TemporaryDirectory() as folder:
        # Through a file, because the loader decodes more than from_dict does (infinities, old spellings).
        (Path(folder) / CONFIG_NAME).write_text(json.dumps(config), encoding="utf-8")
        try:
            return CONFIG_MAPPING[name].from_pretrained(folder)
        except Exception as problem:  # config classes raise whatever their validators raise
            raise CheckpointError(
                f"config.json is refused by {CONFIG_MAPPING[name].__name__}: {reason(problem)}",
                "Check that this checkpoint loads in transformers.",
            ) from problem


def _built(model_class: type[PreTrainedModel], resolved: PretrainedConfig) -> PreTrainedModel:
    with quiet_transformers(), torch.device("meta"):
        try:
            return from_config(model_class, resolved)
        except Exception as problem:  # a model class raises whatever its layers raise
            raise UnsupportedError(
                f"{model_class.__name__} cannot be built with these settings: {reason(problem)}"
            ) from problem


def _without_null(config: dict[str, Any]) -> dict[str, Any]:
    """Drop an explicit null for KV heads, which some config classes refuse; it means "as many as query heads"."""
    return {
        key: _without_null(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if not (key == KV_KEY and value is None)
    }


def _refuse_absurd(config: dict[str, Any]) -> None:
    """Refuse numbers of layers, heads and experts that no model has, before a class spends an hour on building it."""
    for key, value in config.items():
        if isinstance(value, dict):
            _refuse_absurd(value)
        elif isinstance(value, (int, float)) and any(
            value > limit and pattern.fullmatch(key) for pattern, limit in _LIMITS
        ):
            raise CheckpointError(f"config.json says {key} = {value:,}, which no model has.", "Repair config.json.")
