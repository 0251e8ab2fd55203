"""Files of text in the forms that users have: endings, compression, byte-order marks, nulls, damage."""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from headfold.corpus import TEXT, Columns, Corpus, is_local, open_corpus
from headfold.corpus.readers import READERS
from headfold.errors import DataError, UsageError

WORDS = [f"text number {number}, with a comma" for number in range(10)]
RECORDS = [{"id": number, "text": text} for number, text in enumerate(WORDS)]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS)


def texts(corpus: Corpus) -> list[str]:
    return [document.text for document in corpus]


def read(file: Path, columns: Columns = TEXT) -> list[str]:
    return texts(open_corpus(str(file), columns=columns))


def table(delimiter: str) -> str:
    stream = io.StringIO()
    rows = csv.DictWriter(stream, ["id", "text"], delimiter=delimiter)
    rows.writeheader()
    rows.writerows(RECORDS)
    return stream.getvalue()


@pytest.mark.parametrize("name", ["D.JSONL", "d.ndjson", "d.jsonlines", "d.Json"])
def test_json_lines_have_many_endings(name, tmp_path):
    """Row B023: these were one document of braces and quotes."""
    (tmp_path / name).write_text(LINES)
    assert read(tmp_path / name) == WORDS


@pytest.mark.parametrize(("name", "delimiter"), [("d.csv", ","), ("D.CSV", ","), ("d.tsv", "\t")])
def test_tables_have_a_row_for_each_text(name, delimiter, tmp_path):
    (tmp_path / name).write_text(table(delimiter))
    assert read(tmp_path / name) == WORDS


def test_a_field_of_a_table_may_hold_line_ends_and_be_long(tmp_path):
    long = "a line\n" * 40_000
    stream = io.StringIO()
    rows = csv.writer(stream)
    rows.writerows([["text"], [long], ["short"]])
    (tmp_path / "d.csv").write_text(stream.getvalue(), newline="")
    assert read(tmp_path / "d.csv") == [long, "short"]


@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_file_may_be_one_array_of_records(indent, tmp_path):
    """Row B027: data sets come as one array, on one line or pretty-printed."""
    (tmp_path / "d.json").write_text(json.dumps(RECORDS, indent=indent))
    assert read(tmp_path / "d.json") == WORDS


def test_a_json_file_may_be_one_record_over_many_lines_or_one_a_line(tmp_path):
    (tmp_path / "one.json").write_text(json.dumps(RECORDS[0], indent=2))
    assert read(tmp_path / "one.json") == WORDS[:1]
    (tmp_path / "lines.json").write_text(LINES)
    assert read(tmp_path / "lines.json") == WORDS


def _zstd(content: bytes) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return bytes(sink.getvalue())


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": _zstd,
}  # fmt: skip


@pytest.mark.parametrize("ending", PACKERS)
@pytest.mark.parametrize("alone", [True, False])
def test_compressed_files_are_unpacked_alone_and_in_a_folder(ending, alone, tmp_path):
    (tmp_path / f"d.jsonl.{ending}").write_bytes(PACKERS[ending](LINES.encode()))
    assert read(tmp_path / f"d.jsonl.{ending}" if alone else tmp_path) == WORDS


@pytest.mark.parametrize("ending", PACKERS)
def test_a_packed_file_that_is_cut_short_is_damaged(ending, tmp_path):
    (tmp_path / f"d.txt.{ending}").write_bytes(PACKERS[ending](bytes(range(32, 127)) * 5000)[:-20])
    with pytest.raises(DataError, match=rf"d\.txt\.{ending} is damaged"):
        read(tmp_path / f"d.txt.{ending}")


@pytest.mark.parametrize(
    ("mark", "encoding"),
    [
        (codecs.BOM_UTF8, "utf-8"),
        (codecs.BOM_UTF16_LE, "utf-16-le"),
        (codecs.BOM_UTF16_BE, "utf-16-be"),
        (codecs.BOM_UTF32_LE, "utf-32-le"),
    ],
)
@pytest.mark.parametrize(("name", "content"), [("d.txt", "plain é text"), ("d.jsonl", LINES), ("d.csv", table(","))])
def test_a_byte_order_mark_is_no_text(mark, encoding, name, content, tmp_path):
    """Rows B021 and B022: the mark was scored, or the first line was refused as JSON."""
    (tmp_path / name).write_bytes(content.encode())
    plain = read(tmp_path / name)
    (tmp_path / name).write_bytes(mark + content.encode(encoding))
    assert read(tmp_path / name) == plain


@pytest.mark.parametrize("name", ["page.html", "book.docx", "d.arrow", "d.jsonl.zip", "d.parquet.gz"])
def test_an_ending_that_could_be_misread_is_refused_with_the_known_ones(name, tmp_path):
    (tmp_path / name).write_text("text")
    with pytest.raises(UsageError, match="ending that is not known") as problem:
        read(tmp_path / name)
    assert all(ending in str(problem.value.hint) for ending in READERS)


def test_a_name_without_an_ending_is_plain_text(tmp_path):
    (tmp_path / "corpus").write_text("text")
    assert read(tmp_path / "corpus") == ["text"]


def test_a_cloned_data_set_is_its_records_and_nothing_beside_them(tmp_path, capfd):
    """Row B025: the card and stale copies of a notebook server were read as text."""
    (tmp_path / "data").mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"text": WORDS}), tmp_path / "data" / "train.parquet")
    for name in (
        *("README.md", "LICENSE.txt", "notes.md", "dataset_infos.json", "data/metadata.jsonl", "code.py"),
        *(".git/x.txt", ".ipynb_checkpoints/x.jsonl", "data/.hidden.txt", "__pycache__/x.txt"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "not in the data set"}')
    assert read(tmp_path) == WORDS
    shown = capfd.readouterr().err.replace("\n", " ")
    assert "1 .parquet; passed over: LICENSE.txt, README.md" in shown


def test_a_folder_of_pages_is_text_and_its_readme_is_not(tmp_path):
    (tmp_path / "README.md").write_text("about")
    (tmp_path / "a.md").write_text("first")
    (tmp_path / "b.txt").write_text("second")
    assert read(tmp_path) == ["first", "second"]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv"])
def test_a_null_text_counts_as_empty(kind, tmp_path):
    """Row B028: one null ended the run."""
    values = ["one", None, "three"]
    file = tmp_path / f"d.{kind}"
    if kind == "jsonl":
        file.write_text("".join(json.dumps({"text": value}) + "\n" for value in values))
    elif kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": values}), file)
    else:
        file.write_text('text\n"one"\n""\n"three"\n')
    assert read(file) == ["one", "", "three"]


def test_a_null_on_the_way_to_a_column_counts_as_empty_and_a_missing_column_is_refused(tmp_path):
    file = tmp_path / "d.jsonl"
    file.write_text('{"a": {"b": "one"}}\n{"a": null}\n{"a": {"b": null}}\n')
    assert read(file, Columns("a.b")) == ["one", "", ""]
    with pytest.raises(DataError, match=r"line 1 of .*Its fields are a\.") as problem:
        read(file, Columns("a.c"))
    assert "--text-column" in str(problem.value.hint)


def _parquet(file: Path) -> bytes:
    pyarrow.parquet.write_table(pyarrow.table({"text": WORDS * 500}), file, use_dictionary=False)
    return file.read_bytes()


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "another file"])
def test_a_damaged_parquet_file_is_named_and_not_called_text(damage, tmp_path):
    """Row B030: the advice was to re-save it as UTF-8."""
    file = tmp_path / "d.parquet"
    whole = _parquet(file)
    middle = len(whole) // 3
    changed = {
        "flipped": whole[:middle] + bytes(255 - byte for byte in whole[middle : middle + 400]) + whole[middle + 400 :],
        "cut": whole[: len(whole) // 2],
        "empty": b"",
        "another file": LINES.encode(),
    }
    file.write_bytes(changed[damage])
    with pytest.raises(DataError, match=r"d\.parquet is damaged") as problem:
        read(file)
    assert "UTF-8" not in str(problem.value.hint)


def test_a_broken_table_names_its_line(tmp_path):
    (tmp_path / "d.csv").write_text('text\n"one"\n"two"x"\n')
    with pytest.raises(DataError, match="Line 3"):
        read(tmp_path / "d.csv")


@pytest.mark.parametrize("line", ['{"text": "a"', '{"text": ' + "9" * 5000 + "}", "[" * 100_000])
def test_a_broken_line_of_json_is_one_sentence(line, tmp_path):
    (tmp_path / "d.jsonl").write_text(f'{{"text": "fine"}}\n{line}\n')
    with pytest.raises(DataError, match=r"(?i)line 2 of"):
        read(tmp_path / "d.jsonl")


@pytest.mark.parametrize("folder", ["C#", "a#b:c@d", "x=y"])
def test_a_path_that_exists_is_opened_before_its_signs_are_read(folder, tmp_path, monkeypatch):
    """Row B031: "C#/train.jsonl" was read as the split /train.jsonl of C."""
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "train.jsonl").write_text(LINES)
    monkeypatch.chdir(tmp_path)
    for name in (f"{folder}/train.jsonl", folder, str(tmp_path / folder / "train.jsonl")):
        assert is_local(name)
        assert texts(open_corpus(name)) == WORDS


def test_a_missing_file_below_such_a_folder_is_named_whole(tmp_path):
    with pytest.raises(UsageError, match=r"C#/missing\.jsonl"):
        open_corpus(f"{tmp_path}/C#/missing.jsonl")
    assert is_local("C#/missing.jsonl")
    assert not is_local("org/name#validation")
