"""liger-kernel needs triton and a GPU to run, so its source is read: `make` installs it without what it depends on."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest
from headfold.libraries import liger_internals


@pytest.fixture(scope="module")
def source() -> ast.Module:
    """The module of liger-kernel that both functions take their parts from."""
    found = importlib.util.find_spec("liger_kernel")
    assert found is not None, "pip install --no-deps liger-kernel"
    assert found.submodule_search_locations
    file = Path(found.submodule_search_locations[0]) / "transformers" / "monkey_patch.py"
    return ast.parse(file.read_text())


def test_supported_types_stand_in_a_table_by_model_type(source):
    (table,) = [
        node.value
        for node in source.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MODEL_TYPE_TO_APPLY_LIGER_FN"
    ]
    assert isinstance(table, ast.Dict)
    types = [ast.literal_eval(key) for key in table.keys if key is not None]
    assert "llama" in types
    assert "headfold_t5" not in types  # the control
    assert "MODEL_TYPE_TO_APPLY_LIGER_FN" in Path(liger_internals.__file__).read_text()


def test_the_kernels_go_into_a_loaded_model_without_the_loss(source):
    """We pass the model, and say no to both losses; the function of every type must know these words."""
    functions = {node.name: node.args for node in source.body if isinstance(node, ast.FunctionDef)}
    entry = functions["_apply_liger_kernel_to_instance"]
    assert [argument.arg for argument in entry.args] == ["model"]
    assert entry.kwarg is not None  # hands the words on
    words = {argument.arg for argument in functions["apply_liger_kernel_to_llama"].args}
    assert {"model", "cross_entropy", "fused_linear_cross_entropy"} <= words
