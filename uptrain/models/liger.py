"""The kernels of liger-kernel (Hsu et al. 2024, arXiv 2410.10989) in a model's layers: norms, rotation, MLP; on CUDA.

Its loss is left out: the loss is computed in chunks already (:mod:`headfold.uptrain.loss.chunked`).
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from ...errors import UnsupportedError, UsageError


def refuse_liger(model_type: str, cuda: bool) -> None:
    """Raise where liger-kernel cannot help, before anything is loaded.

    Raises:
        UsageError: no GPU of CUDA's, or it is not installed. UnsupportedError: it does not know the type.
    """
    if not cuda:
        raise UsageError("--liger needs a GPU with CUDA, and this run has none.", "Leave --liger out.")
    if find_spec("liger_kernel") is None:
        raise UsageError("liger-kernel is not installed.", "pip install 'headfold[liger]'")
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    if model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise UnsupportedError(f"liger-kernel has no kernels for the type {model_type}.", "Leave --liger out.")


def apply_liger(model: Any) -> None:
    """Put its kernels into the layers of a model.

    They run on the GPU alone, so this comes after whatever is tried on the CPU. It replaces functions of the module
    that defines the class, too, and these stay replaced for other models of the type in this process: the teacher's.
    """
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model=model, cross_entropy=False, fused_linear_cross_entropy=False)
