"""Paths of a user: read as they are written, printed to the byte, and kept out of what is published."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from headfold import cli, console
from headfold.checkpoint.folder.hub import push
from headfold.checkpoint.record import known_places, last_entry
from headfold.checkpoint.source import Checkpoint
from headfold.convert.run import convert_checkpoint
from headfold.convert.settings import ConvertSettings
from headfold.errors import UsageError
from headfold.eval.compare import compare
from headfold.eval.models import open_models
from headfold.eval.report.model_card import write_cards
from headfold.eval.report.write import rebuild_report
from headfold.eval.results import read_results
from headfold.eval.settings import EvalSettings
from headfold.local_paths import expanded, public, public_sentence
from headfold.recipes.settings import SweepSettings
from headfold.recipes.sweep import sweep
from headfold.uptrain.models.teacher import converted_from, resolve_teacher
from headfold.uptrain.run import uptrain_checkpoint
from headfold.uptrain.settings import UptrainSettings
from huggingface_hub.utils import DEFAULT_IGNORE_PATTERNS, filter_repo_objects
from tiny import tiny_model

SECRET = "anne"
"""The name of a user in every absolute path of these tests."""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / SECRET
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.fixture
def source(home: Path) -> Path:
    tiny_model("llama", 4, 4).save_pretrained(home / "secret" / "m")
    return home / "secret" / "m"


def _run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    return int(ended.value.code or 0)


def test_a_tilde_behind_an_equals_sign_is_the_home_folder(
    source: Path, home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """B037: a folder that is called ~ invites `rm -rf ~`."""
    assert _run("convert", "~/secret/m", "-g", "2", "--out=~/x") == 0
    assert capfd.readouterr().out.splitlines()[-1] == str(home / "x")
    assert (home / "x" / "config.json").exists()
    assert not Path("~").exists()


def test_a_tilde_is_the_home_folder_in_every_other_path(
    source: Path, home: Path, text_file: Path, tiny_checkpoint: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (home / "text.jsonl").write_bytes(text_file.read_bytes())
    (home / "tiny").symlink_to(tiny_checkpoint, target_is_directory=True)
    assert _run("eval", "~/tiny", "--data=~/text.jsonl", "--tokens=64", "--repeats=0", "--needles=0", "--out=~/r") == 0
    assert _run("report", "~/r", "--out=~/again") == 0
    assert capfd.readouterr().out.splitlines()[-1] == str(home / "again" / "report.html")
    (home / "recipe.yaml").write_text(
        "checkpoint: ~/tiny\nconvert: {groups: 1}\n"
        "uptrain: {data: ~/text.jsonl, steps: 1, sequence_length: 16}\neval: {data: ~/text.jsonl}"
    )
    assert _run("run", "~/recipe.yaml", "--dry-run") == 0
    assert _run("sweep", "~/tiny", "--groups=1", "--methods=mean", "--data=~/text.jsonl", "--tokens=64",
                "--window=16", "--out=~/s") == 0  # fmt: skip
    settings = ConvertSettings(groups=1, calibration="~/text.jsonl", statistics="~/stats", calibration_tokens=64,
                               sequence_length=16, refine=0)  # fmt: skip
    assert convert_checkpoint("~/tiny", "~/y", settings) == home / "y"
    assert (home / "stats").exists()
    assert _run("inspect", "~/tiny", "--groups", "1", "--statistics=~/stats") == 0
    assert UptrainSettings(teacher="~/tiny").teacher == str(home / "tiny")
    assert (home / "s" / "sweep.html").exists()
    assert not Path("~").exists()


def test_the_home_folder_of_nobody_is_one_sentence(source: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ("convert", str(source), "-g", "2", "--out=~nobody-of-this-name/x"),
        ("inspect", "~nobody-of-this-name/m"),
    ):
        assert _run(*arguments) == 2
        said = capfd.readouterr().err
        assert "The home folder in ~nobody-of-this-name/" in said
        assert "Traceback" not in said
    with pytest.raises(UsageError):
        expanded("~nobody-of-this-name")


@pytest.mark.parametrize("name", ["run:100:x", "m[bold]x", "[red]", "a\tb", "x\\", "  two  spaces ", "ü漢"])
def test_the_last_line_is_the_exact_path(
    name: str, source: Path, home: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """B038: `:100:` was printed as an emoji, and a tab would be printed as spaces."""
    source.rename(home / name)
    assert _run("convert", str(home / name), "-g", "2", "-o", f"out {name}") == 0
    printed = capfdbinary.readouterr().out.split(b"\n")[-2]
    assert printed == f"out {name}".encode()
    assert Path(os.fsdecode(printed)).is_dir()


def test_tables_and_messages_print_names_as_they_are(
    source: Path, home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source.rename(home / "m:a:[bold]x")
    assert _run("inspect", str(home / "m:a:[bold]x")) == 0
    assert _run("check", str(home / "m:a:[bold]x")) == 0
    assert _run("convert", str(home / "m:a:[bold]x"), "-g", "2", "-o", "x", "--dry-run") == 0
    assert _run("convert", str(home / "m:a:[bold]x"), "-g", "2", "-o", "[i]x:smile:", "--overwrite") == 0
    assert _run("convert", str(home / "none:100:[red]"), "-g", "2", "-o", "y") == 2
    out, said = capfd.readouterr()
    assert out.count("m:a:[bold]x") == 3
    assert "none:100:[red]" in said
    console.table("t:a:[b]", ["c:100:", "[red]"], [[":smile:", "[x]"]])
    shown = capfd.readouterr().out
    for word in ("t:a:[b]", "c:100:", "[red]", ":smile:", "[x]"):
        assert word in shown


def test_a_progress_bar_shows_its_description_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from io import StringIO

    from rich.console import Console

    stream = StringIO()
    monkeypatch.setattr(
        console, "talk", Console(file=stream, force_terminal=True, emoji=False, markup=False, width=200)
    )
    with console.progress("m:100:[red]x", 2) as advance:
        advance()
    assert "m:100:[red]x" in stream.getvalue()


def test_paths_that_are_not_utf_8_are_no_traceback(source: Path, home: Path) -> None:
    """A byte that is no UTF-8 has no letter on a screen, in JSON or on a card."""
    strange = os.fsencode(home) + b"/m\xff"
    source.rename(os.fsdecode(strange))
    ended = {
        (b"convert", strange, b"-g", b"2", b"-o", b"out"): 0,
        (b"convert", strange, b"-g", b"2", b"-o", b"out\xfe"): 2,
        (b"inspect", b"none\xff"): 2,
        (b"convert", b"out", b"-g", b"1", b"-o", b"x", b"--calibration", b"none\xff.txt"): 2,
        (b"uptrain", b"out", b"--data", b"none\xff.txt", b"--steps", b"1", b"-o", b"u"): 2,
        (b"eval", b"out", b"--data", b"none\xff.txt", b"-o", b"e"): 2,
    }
    for words, code in ended.items():
        done = subprocess.run([os.fsencode(sys.executable), b"-m", b"headfold", *words], capture_output=True)
        assert b"Traceback" not in done.stderr, done.stderr.decode(errors="replace")
        assert done.returncode == code, (words, done.stderr)
    record = json.loads(Path("out", "headfold.json").read_text(encoding="utf-8"))
    assert record["history"][0]["source"] == "m\udcff"
    assert "m\\udcff" in Path("out", "README.md").read_text(encoding="utf-8")


def _texts(folder: Path) -> dict[str, str]:
    """What `hf upload` and git would send, with bytes as they are."""
    files = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    sent = filter_repo_objects(files, ignore_patterns=DEFAULT_IGNORE_PATTERNS)
    return {name: (folder / name).read_bytes().decode("latin-1") for name in sent}


def _names_nobody(folder: Path) -> None:
    found = [name for name, text in _texts(folder).items() if SECRET in text]
    assert found == [], {name: _texts(folder)[name][:2000] for name in found if name.endswith((".md", ".json"))}


def test_what_is_published_of_a_conversion_holds_no_path_of_its_maker(
    source: Path, home: Path, text_file: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B051. The source is known by its name and its digest, and found on this machine all the same."""
    words = ["convert", str(source), "-g", "2", f"--out={home / 'out'}"]
    monkeypatch.setattr(sys, "argv", [str(home / "bin" / "headfold"), *words])
    assert _run(*words) == 0
    _names_nobody(home / "out")
    entry = last_entry(home / "out", "convert")
    assert entry is not None
    assert (entry["source"], entry["source_hub_id"]) == ("m", None)
    assert entry["command"] == "headfold convert m -g 2 --out=out"
    converted = Checkpoint.open(home / "out")
    assert converted_from(converted) == str(source)
    # git leaves the file out as well
    subprocess.run(["git", "init", "-q", str(home / "out")], check=True)
    listed = subprocess.run(["git", "-C", str(home / "out"), "add", "-A", "-n"], capture_output=True, text=True).stdout
    assert "headfold.json" in listed
    assert ".cache" not in listed


def test_what_is_published_of_a_calibrated_and_uptrained_result_holds_no_path_of_its_maker(
    home: Path, text_file: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts, statistics and teacher are named in the settings; the source is found from the uptrained result, too."""
    import shutil

    (home / "text.jsonl").write_bytes(text_file.read_bytes())
    shutil.copytree(tiny_checkpoint, home / "secret" / "m")
    source, text = home / "secret" / "m", str(home / "text.jsonl")
    monkeypatch.setattr(sys, "argv", [str(home / "headfold"), "uptrain", str(source), "--data", text])
    converted = convert_checkpoint(
        source, home / "out", groups=1, calibration=text, statistics=home / "stats", calibration_tokens=64,
        sequence_length=16, refine=0,
    )  # fmt: skip
    settings = UptrainSettings(
        data=text, eval_data=text, eval_tokens=64, steps=2, sequence_length=16, batch=2, teacher=str(source),
        device="cpu", tracker=("none",),
    )  # fmt: skip
    uptrained = uptrain_checkpoint(converted, home / "up", settings)
    for folder in (converted, uptrained):
        _names_nobody(folder)
        assert converted_from(Checkpoint.open(folder)) == str(source)
    entry = last_entry(uptrained, "uptrain")
    assert entry is not None
    assert (entry["source"], entry["settings"]["teacher"], entry["settings"]["data"]) == ("out", "m", "text.jsonl")
    assert resolve_teacher(UptrainSettings(), Checkpoint.open(uptrained)).teacher == str(source)


def test_cards_and_reports_of_an_evaluation_hold_no_path_of_its_maker(
    home: Path, text_file: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    (home / "text.jsonl").write_bytes(text_file.read_bytes())
    for name in ("a", "b"):
        shutil.copytree(tiny_checkpoint, home / name / "m")
    converted = convert_checkpoint(home / "a" / "m", home / "out", groups=1)
    monkeypatch.setattr(sys, "argv", ["headfold", "eval", str(home / "a" / "m"), "--data", str(home / "text.jsonl")])
    settings = EvalSettings(
        data=str(home / "text.jsonl"), tokens=64, repeats=0, needles=0, source_cache=str(home / "cache")
    )
    others = [home / "b" / "m", converted]
    results = compare(home / "a" / "m", others, out=home / "report", settings=settings)
    write_cards(results)
    assert "Evaluation" in (converted / "README.md").read_text()
    rebuild_report(read_results(home / "report"), home / "again")
    for folder in (converted, home / "report", home / "again"):
        _names_nobody(folder)
    assert [model.name for model in results.models] == ["a/m", "b/m", "out"]
    page = sweep(home / "a" / "m", home / "sweep", SweepSettings(groups=(1,), methods=("mean",), tokens=64, window=16,
                 data=str(home / "text.jsonl")))  # fmt: skip
    assert SECRET not in page.read_text()


def test_a_record_of_an_earlier_version_is_cleaned_when_it_is_carried_on(source: Path, home: Path) -> None:
    half = convert_checkpoint(source, home / "half", groups=2)
    record = json.loads((half / "headfold.json").read_text())
    record["history"][0] = {
        **record["history"][0],
        "source": str(source),
        "source_folder": str(source),
        "command": f"headfold convert {source} -g 2 --out={home / 'half'} '{home}/a b'",
        "notes": [f"something about {source}/config.json, and 1/2 or and/or https://arxiv.org/abs/2305.13245"],
    }
    del record["history"][0]["source_hub_id"]
    (half / "headfold.json").write_text(json.dumps(record))
    (half / ".cache" / "huggingface" / "headfold.json").unlink()
    out = convert_checkpoint(half, home / "out", groups=1)
    _names_nobody(out)
    first = json.loads((out / "headfold.json").read_text())["history"][0]
    assert first["command"] == "headfold convert m -g 2 --out=half 'a b'"
    assert first["notes"] == ["something about config.json, and 1/2 or and/or https://arxiv.org/abs/2305.13245"]
    assert str(source) in known_places(out).values()


def test_a_source_and_its_result_that_were_moved_together_find_each_other(source: Path, home: Path) -> None:
    convert_checkpoint(source, source.parent / "out", groups=2)
    source.parent.rename(home / "moved")
    assert converted_from(Checkpoint.open(home / "moved" / "out")) == str(home / "moved" / "m")
    (home / "moved" / "m").rename(home / "gone")
    with pytest.raises(UsageError, match="m, is not where it was"):
        resolve_teacher(UptrainSettings(teacher="source"), Checkpoint.open(home / "moved" / "out"))


def test_a_source_of_the_hub_is_named_by_its_id(source: Path, home: Path) -> None:
    snapshot = home / "hub" / "models--me--mine" / "snapshots" / "0123abc"
    snapshot.parent.mkdir(parents=True)
    source.rename(snapshot)
    out = convert_checkpoint(snapshot, home / "out", groups=2)
    _names_nobody(out)
    assert "https://huggingface.co/me/mine" in (out / "README.md").read_text()
    entry = last_entry(out, "convert")
    assert entry is not None
    assert (entry["source"], entry["source_hub_id"]) == ("me/mine", "me/mine")


def test_a_push_names_files_of_the_source_that_hold_a_path(
    source: Path, home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from huggingface_hub import HfApi

    monkeypatch.setattr(HfApi, "create_repo", lambda *_, **__: None)
    monkeypatch.setattr(HfApi, "upload_folder", lambda *_, **__: "done")
    config = json.loads((source / "config.json").read_text())
    out = convert_checkpoint(source, home / "out", groups=2)
    push(out, "me/mine")
    assert "folders of yours" not in capfd.readouterr().err
    (out / "config.json").write_text(json.dumps({**config, "_name_or_path": f"{home}/secret/m"}))
    push(out, "me/mine")
    assert "warning: These files name folders of yours, and go to the hub as they are: config.json." in (
        capfd.readouterr().err
    )


def test_models_of_one_name_are_told_apart_without_a_path(source: Path, home: Path) -> None:
    import shutil

    shutil.copytree(source, home / "other" / "m")
    os.chdir(home)
    models = open_models(str(source), ["other/m"], trust_remote_code=False)
    assert [model.name for model in models] == ["secret/m", "other/m"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/anne/secret/m", "m"),
        ("/home/anne/secret/m/", "m"),
        ("~/secret/a.jsonl#train", "a.jsonl#train"),
        ("/home/anne/a.jsonl=3", "a.jsonl=3"),
        ("file:///home/anne/x", "x"),
        (r"C:\Users\anne\m", "m"),
        ("org/name", "org/name"),
        ("models/m", "models/m"),
        ("../m", "../m"),
        ("stdlib", "stdlib"),
        ("", ""),
        ("/", "/"),
        ("a\\b", "a\\b"),
    ],
)
def test_the_last_part_of_an_absolute_path_is_published(text: str, shown: str) -> None:
    assert public([{"x": (text, 1, None, 0.5)}]) == [{"x": [shown, 1, None, 0.5]}]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("lies in /home/anne/m.", "lies in m."),
        ("`/home/anne/secret/m` and '~/x/y'", "`m` and 'y'"),
        ("https://huggingface.co/a/b is/was 3/4", "https://huggingface.co/a/b is/was 3/4"),
    ],
)
def test_paths_within_a_sentence_are_shortened(text: str, shown: str) -> None:
    assert public_sentence(text) == shown
