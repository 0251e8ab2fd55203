"""Every command that reads text takes its column by name, and refuses tokens that the model has no embedding for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from headfold.cli import main
from headfold.corpus import Encoder, refuse_unknown_ids
from headfold.errors import DataError
from headfold.spans import plain_ids

COMMANDS = {
    "convert": ["convert", "SOURCE", "-g", "1", "--calibration", "TEXT", "--calibration-tokens", "1024",
                "--sequence-length", "32", "--refine", "0", "-o", "OUT"],
    "uptrain": ["uptrain", "SOURCE", "--data", "TEXT", "--steps", "1", "--sequence-length", "32", "--batch", "2",
                "--no-teacher", "--device", "cpu", "-o", "OUT"],
    "uptrain --dry-run": ["uptrain", "SOURCE", "--data", "TEXT", "--steps", "1", "--sequence-length", "32",
                          "--batch", "2", "--no-teacher", "--device", "cpu", "-o", "OUT", "--dry-run"],
    "eval": ["eval", "SOURCE", "--data", "TEXT", "--tokens", "200", "--repeats", "0", "--needles", "0", "-o", "OUT"],
    "sweep": ["sweep", "SOURCE", "--groups", "1", "--methods", "mean,aligned", "--calibration", "TEXT",
              "--calibration-tokens", "1024", "--sequence-length", "32", "--data", "TEXT", "--tokens", "200",
              "--window", "32", "-o", "OUT"],
}  # fmt: skip


def _run(command: str, source: Path, text: Path, out: Path, *more: str) -> int:
    places = {"SOURCE": str(source), "TEXT": str(text), "OUT": str(out)}
    with pytest.raises(SystemExit) as ended:
        main([*(places.get(word, word) for word in COMMANDS[command]), *more])
    return int(ended.value.code or 0)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("column", ["content", "page.body"])
def test_the_column_of_the_text_can_be_named(command, column, tiny_checkpoint, text_file, tmp_path, capfd):
    """Row B033: calibration took the column "text" alone."""
    lines = []
    for line in text_file.read_text().splitlines():
        text = json.loads(line)["text"]
        lines.append(json.dumps({"content": text} if column == "content" else {"page": {"body": text}}))
    (tmp_path / "d.jsonl").write_text("\n".join(lines))
    assert _run(command, tiny_checkpoint, tmp_path / "d.jsonl", tmp_path / "out") == 1
    assert "--text-column names another one" in capfd.readouterr().err.replace("\n", " ")
    assert not (tmp_path / "out").exists()
    assert _run(command, tiny_checkpoint, tmp_path / "d.jsonl", tmp_path / "out", "--text-column", column) == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_a_column_of_plain_text_is_refused(command, tiny_checkpoint, tmp_path, capfd):
    (tmp_path / "d.txt").write_text("alpha beta gamma delta " * 500)
    assert _run(command, tiny_checkpoint, tmp_path / "d.txt", tmp_path / "out", "--text-column", "content") == 2
    assert "is plain text and has no columns" in capfd.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("where", ["first", "last"])
def test_a_token_without_an_embedding_is_refused_with_its_id(command, where, tiny_checkpoint, tmp_path, capfd):
    """Row B034: an IndexError, in the middle of the work."""
    source = Path(shutil.copytree(tiny_checkpoint, tmp_path / "m"))
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append(
        {"id": 10, "content": "<new>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
    )  # fmt: skip
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    texts = ["alpha beta gamma delta epsilon"] * (40 if command != "convert" else 400)
    texts.insert(0 if where == "first" else 35, "alpha <new> beta")
    (tmp_path / "d.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    assert _run(command, source, tmp_path / "d.jsonl", tmp_path / "out") == 1
    said = capfd.readouterr().err.replace("\n", " ")
    assert "The text holds token id 10, but " in said
    assert "has 10 embeddings" in said
    assert "Traceback" not in said
    assert not (tmp_path / "out").exists()


def test_the_largest_id_that_a_model_has_is_taken(word_tokenizer):
    refuse_unknown_ids(9, 10)
    with pytest.raises(DataError, match="token id 10, but m has 10 embeddings"):
        refuse_unknown_ids(10, 10, "m")
    highest = max(word_tokenizer("alpha theta")["input_ids"])
    assert Encoder(word_tokenizer, highest + 1)("alpha theta")
    assert plain_ids(word_tokenizer, "alpha theta", highest + 1)
    for encode in (Encoder(word_tokenizer, highest), lambda text: plain_ids(word_tokenizer, text, highest)):
        with pytest.raises(DataError, match=f"token id {highest}"):
            encode("alpha theta")
