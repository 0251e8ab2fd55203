"""Model types of our own: classes that a checkpoint brings along as a file, where transformers has none with KV heads.

Each ``modeling_headfold_*.py`` here is a module of this package and, byte for byte, the file beside the weights that
config.json's ``auto_map`` names. Our commands run the package's module, so they need no ``--trust-remote-code`` as long
as the checkpoint's file is this one, or one that an earlier headfold wrote.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, UnsupportedError

EARLIER = frozenset(
    {
        "0f36f686b2b028f2cdcd8d7be4188437f8569fd025d8e0052644d1e8f6dbbac7",  # modeling_headfold_t5.py
        "8f6fc75bd3fb82581849fa72470b4b4d8a486621191ef9262eabc06661c913a0",
        "b4f0893ec3d261647e297f8161da5e224c4c44b20e3562afa14ccee5fe42d0d5",  # modeling_headfold_bart.py
        "1ed88407c5420f2969efb1638a01179125e0f55c5311cc1ecd64d2d7b67f9020",
        "574198669d336dc9ae0973b84b01e6b5bad25a5eee1e546983a25eb1265c33e2",  # modeling_headfold_decoder.py
        "c5c94973ca2500f570d8b28f0963a9458a69b0bb6a90f8b95dd222a4e47b221c",
    }
)
"""SHA-256 of the files that earlier versions wrote and that compute what the present ones compute.

Whoever changes a file adds the hash of the one before. Add none whose config.json the present class reads otherwise.
"""


@dataclass(frozen=True)
class OwnModelType:
    """One model type of our own.

    Attributes:
        module: file in this folder and beside the weights, without ``.py``.
        config_class: name of the config class in that file.
        model_class: name of the model class in that file.
        auto_class: Auto class of transformers that loads it.
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
        """Read the file."""
        return (Path(__file__).parent / self.file_name).read_bytes()

    @property
    def auto_map(self) -> dict[str, str]:
        """The entry of config.json that names the classes."""
        return {
            "AutoConfig": f"{self.module}.{self.config_class}",
            self.auto_class: f"{self.module}.{self.model_class}",
        }

    def classes(self) -> tuple[Any, Any]:
        """Import the config class and the model class.

        Raises:
            UnsupportedError: the file was not tested with the installed transformers.
        """
        try:
            found = importlib.import_module(f"{__name__}.{self.module}")
        except ImportError as problem:
            raise UnsupportedError(f"Checkpoints of type {self.model_type} cannot be used here: {problem}") from problem
        return getattr(found, self.config_class), getattr(found, self.model_class)


_ENCODER_DECODER = "modeling_headfold_encoder_decoder"
OWN_TYPES: dict[str, OwnModelType] = {
    own.model_type: own
    for own in (
        OwnModelType(
            "headfold_t5",
            _ENCODER_DECODER,
            "HeadfoldT5Config",
            "HeadfoldT5ForConditionalGeneration",
            "AutoModelForSeq2SeqLM",
        ),
        OwnModelType(
            "headfold_bart",
            _ENCODER_DECODER,
            "HeadfoldBartConfig",
            "HeadfoldBartForConditionalGeneration",
            "AutoModelForSeq2SeqLM",
        ),
        OwnModelType(
            "headfold_decoder",
            "modeling_headfold_decoder",
            "HeadfoldDecoderConfig",
            "HeadfoldDecoderForCausalLM",
            "AutoModelForCausalLM",
        ),
    )
}


def own_type(config: Mapping[str, Any]) -> OwnModelType | None:
    """Return the type of our own that a config.json names, or None."""
    return OWN_TYPES.get(str(config.get("model_type")))


def own_config(own: OwnModelType, config: Mapping[str, Any]) -> dict[str, Any]:
    """Turn ``config`` into a config.json of this type. The caller adds the number of KV heads."""
    named = {"architectures": [own.model_class], "auto_map": own.auto_map, "model_type": own.model_type}
    return {**config, **named}


def code_file(own: OwnModelType, config: Mapping[str, Any]) -> str:
    """Name the file beside the weights that holds the classes; earlier versions gave it other names."""
    named = config.get("auto_map")
    reference = named.get("AutoConfig") if isinstance(named, Mapping) else None
    if not isinstance(reference, str):
        return own.file_name
    # transformers may put "owner/repository--" in front when it saves what it loaded from the hub
    return f"{reference.rpartition('--')[2].partition('.')[0]}.py"


def write_code(config: Mapping[str, Any], folder: Path) -> None:
    """Put the file of the type that ``config`` names into ``folder``. Do nothing for a type of transformers."""
    own = own_type(config)
    # an earlier version's file was copied with the source's other files, and config.json still names it
    if own is not None and (code_file(own, config) == own.file_name or not (folder / code_file(own, config)).exists()):
        (folder / own.file_name).write_bytes(own.code)


def is_ours(own: OwnModelType, config: Mapping[str, Any], folder: Path) -> bool:
    """True if this or an earlier version of headfold wrote the file of code beside the weights."""
    try:
        code = (folder / code_file(own, config)).read_bytes()
    except OSError:
        return False
    return code == own.code or hashlib.sha256(code).hexdigest() in EARLIER


def register(own: OwnModelType) -> None:
    """Tell the Auto classes of this process about the type. Calling it again changes nothing.

    Raises:
        UnsupportedError: the file was not tested with the installed transformers.
    """
    import transformers

    config_class, model_class = own.classes()
    transformers.AutoConfig.register(own.model_type, config_class, exist_ok=True)
    getattr(transformers, own.auto_class).register(config_class, model_class, exist_ok=True)


def register_own_code(config: Mapping[str, Any], folder: Path) -> None:
    """Prepare to load a checkpoint by this package's classes, so that no code runs which the checkpoint brings.

    Do nothing for a type of transformers.

    Raises:
        UnsupportedError: headfold did not write the file beside the weights, or the file was not tested with the
            installed transformers.
        CheckpointError: there is no such file.
    """
    own = own_type(config)
    if own is None:
        return
    file = folder / code_file(own, config)
    if not file.exists():
        raise CheckpointError(f"{folder} lacks {file.name}, the code of its type.", "Fetch the checkpoint again.")
    if not is_ours(own, config, folder):
        raise UnsupportedError(
            f"{file} is not a file that this version of headfold, or an earlier one, writes.",
            "Use the headfold that wrote it (headfold.json has its version). Or read the file, and pass "
            "--trust-remote-code to a command that runs the model.",
        )
    register(own)
