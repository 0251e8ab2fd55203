"""Use the kernels of liger-kernel (Hsu et al. 2024, arXiv 2410.10989) for norms, rotation and MLPs, on CUDA.

Its loss is not used: headfold computes the loss in chunks already (:mod:`headfold.uptrain.loss.chunked`).
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from ...errors import UnsupportedError, UsageError
from ...libraries import liger_internals


def refuse_liger(model_type: str, cuda: bool) -> None:
    """Check that liger-kernel can help, before anything is loaded.

    Raises:
        UsageError: the run is not on a GPU with CUDA, or liger-kernel is not installed.
        UnsupportedError: liger-kernel does not know the type.
    """
    if not cuda:
        raise UsageError("--liger needs a GPU with CUDA, and this run has none.", "Leave --liger out.")
    if find_spec("liger_kernel") is None:
        raise UsageError("liger-kernel is not installed.", "pip install 'headfold[liger]'")
    if not liger_internals.is_supported(model_type):
        raise UnsupportedError(f"liger-kernel has no kernels for the type {model_type}.", "Leave --liger out.")


def apply_liger(model: Any) -> None:
    """Put liger-kernel's kernels into the layers of a model.

    The kernels run on the GPU alone, so call this after everything that is tried on the CPU. liger-kernel also replaces
    functions of the module that defines the class, which stay replaced for other models of the type in this process:
    the teacher's.
    """
    liger_internals.replace_layers(model)
