"""Parts of liger-kernel that headfold relies on although they are private (tested with 0.8.5)."""

from __future__ import annotations

from typing import Any


def is_supported(model_type: str) -> bool:
    """Return whether liger-kernel has kernels for a ``model_type``."""
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    return model_type in MODEL_TYPE_TO_APPLY_LIGER_FN


def replace_layers(model: Any) -> None:
    """Put the kernels into the layers of a loaded model, and leave its loss alone.

    The public functions patch the class, for models that are loaded afterwards. Only this private one takes a model.
    """
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model=model, cross_entropy=False, fused_linear_cross_entropy=False)
