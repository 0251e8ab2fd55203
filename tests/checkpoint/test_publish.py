from __future__ import annotations

import errno
import stat
from pathlib import Path

import pytest
from headfold.checkpoint import publish
from headfold.checkpoint.publish import publishing
from headfold.checkpoint.record import last_entry, read_record, write_record
from headfold.errors import HeadfoldError, UsageError


def test_the_folder_appears_when_the_block_ends_well(tmp_path):
    out = tmp_path / "deep" / "out"
    with publishing(out) as folder:
        (folder / "a").write_text("x")
        assert not out.exists()
        assert folder.parent == out.parent
    assert (out / "a").read_text() == "x"
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert stat.S_IMODE(out.stat().st_mode) & 0o055 == 0o055


def test_a_block_that_fails_leaves_nothing(tmp_path):
    def fail() -> None:
        with publishing(tmp_path / "out") as folder:
            (folder / "a").write_text("x")
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path):
    with pytest.raises(HeadfoldError, match="No space left"), publishing(tmp_path / "out"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_the_way_is_replaced_only_when_told_and_only_at_the_end(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").write_text("old")
    with pytest.raises(UsageError, match="not empty"), publishing(out):
        pass
    with pytest.raises(RuntimeError), publishing(out, overwrite=True):
        raise RuntimeError
    assert (out / "old").exists()
    with publishing(out, overwrite=True) as folder:
        (folder / "new").write_text("new")
    assert [path.name for path in out.iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_empty_folder_is_not_in_the_way(tmp_path):
    (tmp_path / "out").mkdir()
    with publishing(tmp_path / "out") as folder:
        (folder / "a").write_text("x")
    assert (tmp_path / "out" / "a").exists()


@pytest.mark.parametrize("kind", ["file", "link"])
def test_files_and_links_are_never_replaced(kind, tmp_path):
    out = tmp_path / "out"
    if kind == "file":
        out.write_text("mine")
    else:
        (tmp_path / "real").mkdir()
        out.symlink_to(tmp_path / "real")
    with pytest.raises(UsageError, match="is not a folder"), publishing(out, overwrite=True):
        pass


def test_what_a_killed_run_left_is_removed_by_the_next(tmp_path):
    left = tmp_path / ".out.unfinished-abc"
    left.mkdir()
    (left / "half").write_text("x")
    other = tmp_path / ".other.unfinished-abc"
    other.mkdir()
    with publishing(tmp_path / "out"):
        pass
    assert not left.exists()
    assert other.exists()


def test_records_accumulate_and_damaged_ones_count_as_none(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    write_record(first, tmp_path / "nothing", {"step": "convert", "groups": 2})
    write_record(second, first, {"step": "uptrain", "tokens": 5})
    assert [entry["step"] for entry in read_record(second)["history"]] == ["convert", "uptrain"]
    found = last_entry(second, "convert")
    assert found is not None
    assert found["groups"] == 2
    assert "python" in found["versions"]
    assert last_entry(second, "eval") is None
    (second / "headfold.json").write_text("{")
    assert read_record(second)["history"] == []


def test_a_name_with_glob_characters_matches_itself_and_nothing_else(tmp_path):
    out, others = tmp_path / "m[ab]", tmp_path / ".ma.replaced-x"
    others.mkdir()
    for content in ("1", "2"):
        with publishing(out, overwrite=True) as folder:
            (folder / "a").write_text(content)
    assert (out / "a").read_text() == "2"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".ma.replaced-x", "m[ab]"]


def test_the_working_folder_cannot_be_the_output(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for out in (Path(), tmp_path, tmp_path.parent):
        with pytest.raises(UsageError, match="cannot be replaced"), publishing(out, overwrite=True):
            pass
    assert list(tmp_path.iterdir()) == []


def test_entries_of_a_record_that_are_none_are_passed_over(tmp_path):
    (tmp_path / "headfold.json").write_text('{"schema": 1, "history": ["x", {"step": "convert"}]}')
    assert read_record(tmp_path)["history"] == [{"step": "convert"}]


def test_every_byte_is_on_the_disk_before_the_result_has_its_name(tmp_path, monkeypatch):
    """A crash of the machine after the rename would leave a whole folder with empty files."""
    flushed: list[str] = []
    real = publish.flush
    monkeypatch.setattr(publish, "flush", lambda file: (flushed.append(file.name), real(file)))
    at_rename: list[list[str]] = []
    rename = Path.rename
    monkeypatch.setattr(Path, "rename", lambda self, to: (at_rename.append(list(flushed)), rename(self, to))[1])
    with publishing(tmp_path / "out") as folder:
        (folder / "sub").mkdir()
        for name in ("a.bin", "sub/b.bin"):
            (folder / name).write_bytes(b"x")
    assert [sorted(names) for names in at_rename] == [["a.bin", "b.bin"]]
