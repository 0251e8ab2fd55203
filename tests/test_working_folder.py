from __future__ import annotations

import pytest
from headfold.working_folder import WorkingFolder, changes, describe, write_json, writing_whole


def test_an_identity_is_found_again_and_tuples_in_it_are_no_change(tmp_path):
    work = WorkingFolder(tmp_path / "a" / "work", {"groups": (2, 1), "text": "x"})
    assert work.found() is None
    assert not work.matches()
    work.begin()
    assert WorkingFolder(work.path, {"groups": (2, 1), "text": "x"}).matches()
    assert not WorkingFolder(work.path, {"groups": (2, 2), "text": "x"}).matches()
    assert not WorkingFolder(work.path, {"groups": (2, 1)}).matches()


def test_begin_leaves_only_the_identity_and_adopt_leaves_the_rest(tmp_path):
    work = WorkingFolder(tmp_path / "work", {"a": 1}, "recipe.json")
    work.begin()
    (work.path / "half.bin").write_bytes(b"1")
    WorkingFolder(work.path, {"a": 2}, "recipe.json").adopt()
    assert sorted(file.name for file in work.path.iterdir()) == ["half.bin", "recipe.json"]
    assert WorkingFolder(work.path, {"a": 2}, "recipe.json").matches()
    work.begin()
    assert [file.name for file in work.path.iterdir()] == ["recipe.json"]


def test_only_a_folder_with_an_identity_is_removed(tmp_path):
    work = WorkingFolder(tmp_path / "work", {})
    assert not work.is_foreign  # nothing is there
    work.path.mkdir()
    assert not work.is_foreign  # an empty folder is free
    (work.path / ".unfinished-1.identity.json").write_text("{")
    assert not work.is_foreign  # a run was killed as it began
    (work.path / "thesis.txt").write_text("mine")
    assert work.is_foreign
    work.remove()
    assert (work.path / "thesis.txt").exists()
    file = WorkingFolder(work.path / "thesis.txt", {})
    assert file.is_foreign
    work.adopt()
    work.remove()
    assert not work.path.exists()


def test_an_identity_that_cannot_be_read_does_not_match(tmp_path):
    work = WorkingFolder(tmp_path, {})
    for content in ("{", "[]"):
        (tmp_path / "identity.json").write_text(content)
        assert not work.matches()
        with pytest.raises(ValueError, match=r"JSON|Expecting"):
            work.found()


def test_changes_are_told_by_name():
    before, now = {"seed": 1, "steps": 5, "old": True}, {"seed": 2, "steps": 5, "new": None}
    assert changes(before, now) == {"seed": [1, 2], "old": [True, None]}
    assert changes(before, now, ["steps", "seed"]) == {"seed": [1, 2]}
    assert describe(changes(before, now, ["seed"])) == "seed was 1 and is now 2"


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    file = tmp_path / "x.json"
    write_json(file, {"a": 1})
    with pytest.raises(ZeroDivisionError):
        _write_half(file)
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("x.json", '{"a": 1}\n')]


def _write_half(file):
    with writing_whole(file) as temporary:
        temporary.write_text("half")
        assert file.read_text() == '{"a": 1}\n'
        assert 1 / 0
