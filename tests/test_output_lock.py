"""Two runs on one output: the second is refused, the first goes on as if nothing had been."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import headfold.output_lock as locks
import pytest
from headfold import cli
from headfold.checkpoint.publish import publishing
from headfold.checkpoint.record import write_record
from headfold.convert.run import convert_checkpoint
from headfold.errors import UsageError
from headfold.eval.compare import compare
from headfold.eval.report.model_card import write_cards
from headfold.eval.settings import EvalSettings
from headfold.output_lock import only_run
from headfold.recipes.run import run_recipe
from headfold.recipes.schema import Recipe
from headfold.recipes.settings import SweepSettings
from headfold.recipes.sweep import sweep
from headfold.uptrain.run import uptrain_checkpoint
from headfold.uptrain.settings import UptrainSettings
from tiny import tiny_model

REFUSED = "is being written by another run"

# A conversion that stops itself in the midst of its writing, as a user does with Ctrl-Z.
STOPPED = """
import os, signal, sys
from headfold.convert import run
from headfold import cli
real = run.write_weights
def write_weights(*arguments):
    os.kill(os.getpid(), signal.SIGSTOP)
    real(*arguments)
run.write_weights = write_weights
cli.main(sys.argv[1:])
"""
HOLDER = """
import sys, time
from pathlib import Path
from headfold.output_lock import only_run
with only_run(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@contextmanager
def _held_elsewhere(out: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process holds the lock of ``out``."""
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(out)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        yield holder
        holder.kill()


def _wait_until_stopped(process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        found, status = os.waitpid(process.pid, os.WNOHANG | os.WUNTRACED)
        if found and os.WIFSTOPPED(status):
            return
        assert not found, "it ended"
        time.sleep(0.05)
    pytest.fail("it did not stop")


def test_a_second_conversion_is_refused_while_the_first_is_stopped_and_the_first_then_finishes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """B045: the second one deleted the unfinished folder of the first."""
    tiny_model("llama", 4, 4).save_pretrained(tmp_path / "m")
    arguments = ["convert", str(tmp_path / "m"), "-g", "2", "-o", str(tmp_path / "out")]
    first = subprocess.Popen([sys.executable, "-c", STOPPED, *arguments], stderr=subprocess.PIPE, text=True)
    try:
        _wait_until_stopped(first)
        with pytest.raises(SystemExit) as ended:
            cli.main([*arguments, "--overwrite"])
        assert ended.value.code == 2
        said = " ".join(capfd.readouterr().err.split())
        assert f"{tmp_path / 'out'} {REFUSED} (process {first.pid} on " in said
        assert "Wait until it ends" in said
        os.kill(first.pid, signal.SIGCONT)
        assert first.wait(timeout=120) == 0, first.stderr
    finally:
        first.kill()
        first.wait()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_key_value_heads"] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "out"]


def test_uptraining_is_refused_and_the_saves_of_the_other_run_stay(tiny_checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    save = tmp_path / "out.training" / "step-00000005"
    save.mkdir(parents=True)
    with _held_elsewhere(out), pytest.raises(UsageError, match=REFUSED):
        uptrain_checkpoint(tiny_checkpoint, out, UptrainSettings(steps=1), resume="never")
    assert save.exists()


def test_a_comparison_is_refused_and_the_measurements_of_the_other_run_stay(
    tiny_checkpoint: Path, text_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "report"
    partial = tmp_path / "report.partial"
    partial.mkdir()
    (partial / "identity.json").write_text("{}")
    with _held_elsewhere(out), pytest.raises(UsageError, match=REFUSED):
        compare(tiny_checkpoint, [], out=out, settings=EvalSettings(data=str(text_file)))
    assert (partial / "identity.json").exists()


def test_every_other_writer_is_refused_as_well(tiny_checkpoint: Path, text_file: Path, tmp_path: Path) -> None:
    out, text = tmp_path / "out", str(text_file)
    recipe = Recipe.model_validate(
        {
            "checkpoint": str(tiny_checkpoint),
            "convert": {"groups": 1},
            "uptrain": {"data": text, "steps": 1},
            "eval": {"data": text},
        }
    )
    with _held_elsewhere(out):
        for start in (
            lambda: run_recipe(recipe, out),
            lambda: sweep(tiny_checkpoint, out, SweepSettings(groups=(1,), methods=("mean",), data=text)),
            lambda: publishing(out).__enter__(),  # `headfold report -o`
            lambda: convert_checkpoint(tiny_checkpoint, f"{out}/../out", groups=1),
        ):
            with pytest.raises(UsageError, match=REFUSED):
                start()
    assert not out.exists()


def test_a_card_is_not_written_into_a_folder_that_is_being_replaced(tmp_path: Path) -> None:
    from types import SimpleNamespace

    write_record(tmp_path, tmp_path, {"step": "convert", "kv_heads": 2})
    results = SimpleNamespace(others=[SimpleNamespace(path=str(tmp_path), name="m")])
    with _held_elsewhere(tmp_path), pytest.raises(UsageError, match=REFUSED):
        write_cards(results)  # type: ignore[arg-type]
    assert not (tmp_path / "README.md").exists()


def test_the_lock_of_a_dead_process_blocks_nobody(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with _held_elsewhere(out) as holder:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        assert (tmp_path / ".out.lock").exists()
        with publishing(out) as folder:
            (folder / "a").write_text("x")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("content", [b"", b"{", b'{"process": 1}', b"\xff"])
def test_a_lock_without_words_is_still_a_lock(content: bytes, tmp_path: Path) -> None:
    import fcntl

    with (tmp_path / ".out.lock").open("wb") as stream:
        stream.write(content)
        stream.flush()
        fcntl.flock(stream, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match=REFUSED), only_run(tmp_path / "out"):
            pass
    with only_run(tmp_path / "out"):
        pass


def test_a_run_holds_its_own_lock_and_another_thread_does_not(tmp_path: Path) -> None:
    out = tmp_path / "out"
    told: list[BaseException | None] = []

    def other() -> None:
        try:
            with only_run(out):
                told.append(None)
        except UsageError as problem:
            told.append(problem)

    with only_run(out):
        with only_run(out):
            pass
        with only_run(tmp_path / "another"):
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
    assert isinstance(told[0], UsageError)
    other()
    assert told[1] is None
    assert list(tmp_path.iterdir()) == []


def test_outputs_of_one_name_through_a_link_have_one_lock(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real", target_is_directory=True)
    with (
        _held_elsewhere(tmp_path / "real" / "out"),
        pytest.raises(UsageError, match=REFUSED),
        only_run(tmp_path / "link" / "out"),
    ):
        pass


def test_processes_of_one_run_do_not_lock_each_other_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with _held_elsewhere(tmp_path / "out"):
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", "1")
        with only_run(tmp_path / "out"):
            pass


def test_a_file_system_without_locks_is_said_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(locks.fcntl, "flock", refuse)
    with publishing(tmp_path / "out") as folder:
        (folder / "a").write_text("x")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert "cannot be locked (No locks available)" in capfd.readouterr().err


def test_a_system_without_such_locks_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(locks, "fcntl", None)
    with only_run(tmp_path / "out"):
        assert list(tmp_path.iterdir()) == []
    assert "start no second run" in capfd.readouterr().err


def test_a_refused_run_leaves_no_folders(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), only_run(tmp_path / "a" / "b" / "out"):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_conversion_is_refused_after_another_has_finished_in_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output was free at the first look. While the lock was waited for, it became whole."""
    from headfold.checkpoint import publish

    real = publish.only_run

    @contextmanager
    def late(out: Path) -> Iterator[None]:
        with real(out):
            out.mkdir()
            (out / "a").write_text("x")
            yield

    monkeypatch.setattr(publish, "only_run", late)
    with pytest.raises(UsageError, match="not empty"), publish.publishing(tmp_path / "out"):
        pass
    assert (tmp_path / "out" / "a").read_text() == "x"
