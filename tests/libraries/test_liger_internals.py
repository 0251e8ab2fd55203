from __future__ import annotations

import inspect

import pytest
from headfold.libraries import liger_internals as internals

pytest.importorskip("liger_kernel")


def test_supported_types_are_known():
    assert internals.is_supported("llama")
    assert not internals.is_supported("headfold_t5")


def test_the_kernels_go_into_a_loaded_model_without_the_loss():
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    assert "model" in inspect.signature(_apply_liger_kernel_to_instance).parameters
