"""Load models and tokenizers to run them. What transformers would only warn about is an error here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError, HeadfoldError, reason
from .modelling import OwnModelType, is_ours, own_type, register_own_code


def load_language_model(
    folder: str | Path,
    *,
    dtype: torch.dtype | str = "auto",
    device_map: str | dict[str, str] | None = None,
    offload_folder: Path | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """Load a checkpoint, and make sure that every weight comes from it.

    The class is the one that ``AutoModelForSeq2SeqLM`` chooses for an encoder-decoder, and ``AutoModelForCausalLM``
    for any other type.

    Args:
        folder: checkpoint folder or hub id.
        dtype: of the parameters in memory; ``auto`` takes the checkpoint's dtype.
        device_map: as transformers takes it; ``meta`` checks names and shapes without reading weights.
        offload_folder: an empty folder for weights that stay on disk in another form than the files have.

    Raises:
        CheckpointError: weights are missing or have the wrong shape (transformers would fill them with random numbers),
            or a class refuses the files.
    """
    config = load_config(folder, trust_remote_code=trust_remote_code)
    own = _brought(folder, trust_remote_code)
    with _refusals_of_classes(folder):
        loader: Any = _auto_class(config) if own is None else _brought_class(own, own.auto_class, folder)
        loaded: Any = loader.from_pretrained(
            folder,
            dtype=dtype,
            device_map=device_map,
            offload_folder=offload_folder,
            output_loading_info=True,  # missing weights are reported nowhere else
            trust_remote_code=trust_remote_code,
        )
    model, report = loaded
    wrong = sorted({*report["missing_keys"], *(str(key) for key in report["mismatched_keys"])})
    if wrong:
        raise CheckpointError(
            f"{folder} lacks weights that its class needs, or has them in another shape: {', '.join(wrong[:4])}"
            + (f" and {len(wrong) - 4} more." if len(wrong) > 4 else "."),
            "config.json and the weight files do not belong together; take both from one place.",
        )
    return model


def blank_language_model(
    folder: str | Path, *, dtype: torch.dtype | None = None, trust_remote_code: bool = False
) -> Any:
    """Make a model of the checkpoint's class with new weights, from config.json alone; on ``meta`` without weights.

    Raises:
        CheckpointError: config.json is missing or does not describe a language model.
    """
    config = load_config(folder, trust_remote_code=trust_remote_code)
    with _refusals_of_classes(folder):
        return _auto_class(config).from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)


def load_config(folder: str | Path, *, trust_remote_code: bool = False) -> Any:
    """Read the config of a checkpoint, of a type of transformers or of headfold.

    Raises:
        CheckpointError: it is missing or cannot be read.
        UnsupportedError: its type is headfold's, but the code beside it is not.
    """
    from transformers import AutoConfig
    from transformers.utils import logging

    # its bars and warnings would mix with headfold's own; what matters of them is an error below
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    own = _brought(folder, trust_remote_code)
    with _refusals_of_classes(folder):
        if own is not None:
            return _brought_class(own, "AutoConfig", folder).from_pretrained(folder)
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)


def generation_in_config(folder: Path) -> Any:
    """Read the settings of generation that config.json itself holds, as old checkpoints have them.

    Raises:
        CheckpointError: the class refuses them.
    """
    from transformers import GenerationConfig

    with _refusals_of_classes(folder):
        return GenerationConfig.from_pretrained(folder, config_file_name="config.json")


def _brought(folder: str | Path, trust_remote_code: bool) -> OwnModelType | None:
    """Return headfold's own type if the checkpoint brings other code for it that may run; else register the type.

    Once a type is registered, the Auto classes run this package's code in place of the checkpoint's.
    """
    config = _config_json(folder)
    own = own_type(config)
    if own is not None and trust_remote_code and not is_ours(own, config, Path(folder)):
        return own
    register_own_code(config, Path(folder))
    return None


def _brought_class(own: OwnModelType, auto_class: str, folder: str | Path) -> Any:
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    # an earlier version of headfold gave the file another name, so config.json is asked first
    named = {**own.auto_map, **(_config_json(folder).get("auto_map") or {})}
    return get_class_from_dynamic_module(named[auto_class], str(folder))


def _config_json(folder: str | Path) -> dict[str, Any]:
    """Read config.json of a folder; empty where it is missing, as for a hub id."""
    try:
        content = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8-sig"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


@contextmanager
def _refusals_of_classes(folder: str | Path) -> Iterator[None]:
    """Turn what config, model and generation classes raise into one sentence. They raise whatever their parts raise.

    Running out of memory says nothing about the files, and goes on as it is.
    """
    try:
        yield
    except (HeadfoldError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as problem:
        raise CheckpointError(
            f"{folder} cannot be loaded: {reason(problem)}", "Check its files, or fetch it again."
        ) from problem


def is_seq2seq(config: Any) -> bool:
    """Tell whether a config is an encoder-decoder's.

    Its own mark is not enough: some decoders that were cut out of an encoder-decoder still carry it.
    """
    from transformers import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING

    if not getattr(config, "is_encoder_decoder", False):
        return False
    brings_class = _SEQ2SEQ in (getattr(config, "auto_map", None) or {})
    return brings_class or type(config) in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING


_SEQ2SEQ = "AutoModelForSeq2SeqLM"


def _auto_class(config: Any) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    return AutoModelForSeq2SeqLM if is_seq2seq(config) else AutoModelForCausalLM


def load_tokenizer(folder: str | Path, *, trust_remote_code: bool = False) -> Any:
    """Load the checkpoint's own tokenizer.

    Raises:
        CheckpointError: it is missing, or needs a package that is not installed.
    """
    from transformers import AutoTokenizer

    if not trust_remote_code:
        register_own_code(_config_json(folder), Path(folder))
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except ImportError as problem:
        said = " ".join(str(problem).split()).split(". ")[0]  # what follows is how to restart a notebook
        raise CheckpointError(
            f"The tokenizer of {folder} needs a package that is not installed: {said}.",
            "Install it (often: pip install sentencepiece), or put a tokenizer.json beside the weights.",
        ) from problem
    except Exception as problem:  # the library in Rust raises nothing more special
        raise CheckpointError(
            f"{folder} has no tokenizer that can be loaded: {reason(problem)}",
            "Put the tokenizer's files (tokenizer.json, tokenizer_config.json) beside the weights. Those of a newer "
            "version may need newer packages: pip install -U tokenizers transformers.",
        ) from problem
