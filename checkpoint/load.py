"""Load a model for running it, and refuse a load that transformers would only warn about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError


def load_causal_lm(
    folder: str | Path,
    *,
    dtype: torch.dtype | str = "auto",
    device_map: str | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """``AutoModelForCausalLM.from_pretrained`` whose every weight really comes from the checkpoint.

    Args:
        folder: checkpoint folder or hub id.
        dtype: of the parameters in memory; ``auto`` is that of the checkpoint.
        device_map: as the library takes it; ``meta`` checks names and shapes and reads no weights.

    Raises:
        CheckpointError: the class finds no weights, or weights are missing or have the wrong shape
            (transformers would fill them with random numbers and go on).
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            device_map=device_map,
            output_loading_info=True,
            trust_remote_code=trust_remote_code,
        )
    except (OSError, ValueError, RuntimeError, KeyError) as problem:
        reason = str(problem).strip().splitlines()[0] if str(problem).strip() else type(problem).__name__
        raise CheckpointError(
            f"{folder} cannot be loaded: {reason}", "Check its files, or fetch it again."
        ) from problem
    model, report = loaded
    wrong = sorted({*report["missing_keys"], *(str(key) for key in report["mismatched_keys"])})
    if wrong:
        raise CheckpointError(
            f"{folder} lacks weights that its class needs, or has them in another shape: {', '.join(wrong[:4])}"
            + (f" and {len(wrong) - 4} more." if len(wrong) > 4 else "."),
            "config.json and the weight files do not belong together; take both from one place.",
        )
    return model


def load_tokenizer(folder: str | Path, *, trust_remote_code: bool = False) -> Any:
    """The checkpoint's own tokenizer.

    Raises:
        CheckpointError: there is none.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as problem:
        raise CheckpointError(
            f"{folder} has no tokenizer that can be loaded: {str(problem).strip().splitlines()[0]}",
            "Put the tokenizer's files (tokenizer.json, tokenizer_config.json) beside the weights.",
        ) from problem
