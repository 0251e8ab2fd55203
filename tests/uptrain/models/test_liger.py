"""liger-kernel: its refusals, and how it is called, with a module that stands in for it; no GPU is needed."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
from headfold.errors import UnsupportedError, UsageError
from headfold.uptrain.models.liger import apply_liger, refuse_liger
from headfold.uptrain.run import uptrain_checkpoint
from headfold.uptrain.training import opening, preparation


@pytest.fixture
def stand_in(monkeypatch) -> list[tuple[object, dict]]:
    """A stand-in for liger-kernel that knows Llama and records its calls."""
    calls: list[tuple[object, dict]] = []
    modules = {name: ModuleType(name) for name in ("liger_kernel", "liger_kernel.transformers")}
    patch = ModuleType("liger_kernel.transformers.monkey_patch")
    patch.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": None}
    modules["liger_kernel.transformers"]._apply_liger_kernel_to_instance = lambda model, **named: calls.append(
        (model, named)
    )
    for name, module in {**modules, "liger_kernel.transformers.monkey_patch": patch}.items():
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    return calls


def test_without_a_gpu_liger_is_refused_before_anything_is_loaded(tiny_checkpoint, settings, tmp_path, monkeypatch):
    def loaded(*given, **named):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(opening, "build_student", loaded)
    with pytest.raises(UsageError, match="--liger needs a GPU with CUDA"):
        uptrain_checkpoint(tiny_checkpoint, tmp_path / "out", settings(liger=True))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UsageError, match="--liger needs a GPU with CUDA"):  # there is one, and the run is not on it
        uptrain_checkpoint(tiny_checkpoint, tmp_path / "out", settings(liger=True, device="cpu"))
    assert list(tmp_path.glob("out*")) == []


def test_a_missing_liger_kernel_is_named(monkeypatch):
    monkeypatch.setattr("headfold.uptrain.models.liger.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="not installed"):
        refuse_liger("llama", cuda=True)


def test_a_type_that_liger_kernel_does_not_know_is_refused(stand_in):
    refuse_liger("llama", cuda=True)
    with pytest.raises(UnsupportedError, match="no kernels for the type headfold_t5"):
        refuse_liger("headfold_t5", cuda=True)


def test_the_loss_of_liger_kernel_is_not_used(stand_in):
    model = object()
    apply_liger(model)
    assert stand_in == [(model, {"cross_entropy": False, "fused_linear_cross_entropy": False})]


def test_a_run_applies_liger_once_to_the_student_after_attaching_the_loss(
    stand_in, tiny_checkpoint, settings, tmp_path, monkeypatch
):
    """Its kernels cannot run on the CPU, where cutting the loss is tried; the GPU is another stand-in."""
    order = []
    real = preparation.attach_chunked_loss
    monkeypatch.setattr(preparation, "attach_chunked_loss", lambda *given: order.append(len(stand_in)) or real(*given))
    monkeypatch.setattr(opening, "refuse_liger", lambda kind, cuda: order.append((kind, cuda)))
    uptrain_checkpoint(tiny_checkpoint, tmp_path / "out", settings(steps=1, liger=True))
    assert order == [("llama", False), 0]
    assert [type(model).__name__ for model, _ in stand_in] == ["LlamaForCausalLM"]
    uptrain_checkpoint(tiny_checkpoint, tmp_path / "plain", settings(steps=1))
    assert len(stand_in) == 1
