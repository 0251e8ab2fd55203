"""Rules of the house that no linter knows: names, rooms and the one meaning of a word."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import headfold
import pytest

ROOT = Path(headfold.__file__).parent
PACKAGES = ("checkpoint", "corpus", "convert", "uptrain", "eval", "recipes", "libraries")
MODULES = sorted([*ROOT.glob("*.py"), *(file for name in PACKAGES for file in (ROOT / name).rglob("*.py"))])
TESTS = sorted((ROOT / "tests").rglob("*.py"))
FOLDERS = sorted({file.parent for file in MODULES} - {ROOT})


def test_there_are_rooms():
    assert len(MODULES) > 100
    assert len(TESTS) > 60
    assert len(FOLDERS) > 15


def test_no_class_name_stands_for_two_things():
    names = Counter(
        node.name.lstrip("_")
        for file in MODULES
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.relative_to(ROOT).as_posix())
def test_a_room_has_at_most_twelve_entries(folder):
    entries = [one.name for one in folder.iterdir() if one.name not in ("__init__.py", "__pycache__")]
    recipes = [name for name in entries if name.endswith(".yaml")]  # data of one kind count once
    assert len(entries) - max(0, len(recipes) - 1) <= 12, sorted(entries)


def test_no_drawer_for_everything():
    for file in MODULES:
        assert file.stem not in ("utils", "util", "common", "base", "helpers", "misc"), file


def test_names_of_tests_say_the_promise_and_no_number_of_a_case():
    names = [
        node.name
        for file in TESTS
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    assert len(names) > 800
    assert [name for name in names if re.search(r"gq\d", name)] == []


def test_test_files_mirror_the_packages():
    """A folder of tests is called like the room that it tests."""
    for folder in {file.parent for file in TESTS} - {ROOT / "tests"}:
        assert (ROOT / folder.relative_to(ROOT / "tests")).is_dir(), folder


@pytest.mark.parametrize("word", ["hangs on", "won back", "What somebody"])
def test_words_that_read_like_a_translation_stay_out_of_docstrings(word):
    found = []
    for file in MODULES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and word in (
                ast.get_docstring(node) or ""
            ):
                found.append(f"{file.relative_to(ROOT)}: {getattr(node, 'name', 'module')}")
    assert found == []


def test_every_package_is_installed():
    """An editable install would hide a missing one."""
    block = re.search(r"^packages = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE)
    assert block is not None
    listed = re.findall(r'"(headfold[\w.]*)"', block[1])
    folders = [file.parent.relative_to(ROOT) for file in MODULES if file.name == "__init__.py"]
    assert sorted(listed) == sorted(".".join(("headfold", *folder.parts)) for folder in folders)
