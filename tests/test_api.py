from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import headfold
import pytest


def test_every_public_name_can_be_imported():
    assert len(headfold.__all__) > 8
    for name in headfold.__all__:
        assert getattr(headfold, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        headfold.nonsense  # noqa: B018


def test_dir_shows_the_public_names_and_no_others():
    assert dir(headfold) == sorted(headfold.__all__)


def test_type_checkers_see_the_real_functions():
    """The imports under TYPE_CHECKING, which editors read, are those that happen on first use."""
    tree = ast.parse(Path(headfold.__file__).read_text())
    (typed,) = [node for node in tree.body if isinstance(node, ast.If)]
    declared = {
        alias.name: f".{node.module}" for node in typed.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert declared == headfold._MODULES
    assert {*declared, "__version__"} == set(headfold.__all__)
    for name, module in declared.items():
        assert getattr(headfold, name) is getattr(importlib.import_module(f"headfold{module}"), name)
        assert getattr(headfold, name).__doc__


def test_importing_the_package_imports_no_torch():
    probe = "import sys, headfold; assert not {'torch', 'transformers', 'pydantic'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe]).returncode == 0
