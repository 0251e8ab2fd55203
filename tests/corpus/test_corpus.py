from __future__ import annotations

import json

import pytest
from headfold.corpus import Corpus, Document, open_corpus
from headfold.errors import DataError, UsageError


def texts(corpus: Corpus) -> list[str]:
    return [document.text for document in corpus]


def test_json_lines_are_documents(tmp_path):
    file = tmp_path / "some.jsonl"
    file.write_text('{"text": "one"}\n\n{"text": "two", "id": 7}\n')
    assert texts(open_corpus(str(file))) == ["one", "two"]


def test_parquet_rows_are_documents(tmp_path):
    import pyarrow
    import pyarrow.parquet

    file = tmp_path / "some.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["one", "two", "three"]}), file)
    assert texts(open_corpus(str(file))) == ["one", "two", "three"]


def test_a_plain_file_is_one_document_and_a_wikitext_file_its_articles(tmp_path):
    plain = tmp_path / "plain.txt"
    plain.write_text("a\n\nb\n")
    assert texts(open_corpus(str(plain))) == ["a\n\nb\n"]
    wiki = tmp_path / "wiki.txt"
    wiki.write_text(" \n = First = \n\n text \n = = A section = = \n more \n = Second = \n\n end \n")
    articles = texts(open_corpus(str(wiki)))
    assert len(articles) == 2
    assert "A section" in articles[0]
    assert articles[1].startswith(" = Second = ")


def test_a_folder_is_its_files_in_order(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "ignored.bin").write_bytes(b"\x00")
    assert texts(open_corpus(str(tmp_path))) == ["first", "second"]


def test_a_local_folder_of_a_datasets_id_would_be_streamed(tmp_path, monkeypatch):
    """The library's own call, with what the name says; offline it cannot fetch anything."""
    import datasets

    seen = {}

    def load_dataset(path, config, **named):
        seen.update(path=path, config=config, **named)
        return [{"text": "from the hub"}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    corpus = open_corpus("org/name:config@abc123#validation")
    assert texts(corpus) == ["from the hub"]
    assert seen == {
        "path": "org/name",
        "config": "config",
        "split": "validation",
        "revision": "abc123",
        "streaming": True,
    }
    assert corpus.revision == "abc123"
    open_corpus("org/name", "heldout")
    assert seen["split"] == "validation"


@pytest.mark.parametrize(
    ("name", "content", "error", "says"),
    [
        ("empty.txt", b"", DataError, "holds no text"),
        ("blank.jsonl", b'{"text": "  "}\n', DataError, "holds no text"),
        ("latin.txt", b"caf\xe9", DataError, "UTF-8"),
        ("broken.jsonl", b'{"text": "a"}\n{"text": \n', DataError, "Line 2"),
        ("other.jsonl", b'{"content": "a"}\n', DataError, "field 'text'"),
        ("number.jsonl", b'{"text": 7}\n', DataError, "no text in line 1"),
        ("damaged.parquet", b"PAR1 no", DataError, "is damaged"),
    ],
)
def test_text_that_cannot_be_used_is_refused_by_name(name, content, error, says, tmp_path):
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(error) as problem:
        list(open_corpus(str(file)))
    assert says in problem.value.message + (problem.value.hint or "")


def test_half_a_surrogate_pair_is_replaced(tmp_path):
    file = tmp_path / "some.jsonl"
    file.write_text('{"text": "a\\ud800b"}\n')
    assert texts(open_corpus(str(file))) == ["a?b"]


@pytest.mark.parametrize("name", ["./missing.txt", "missing.jsonl", "", "#train", "stdlib#test"])
def test_names_that_lead_nowhere_are_wrong_usage(name):
    with pytest.raises(UsageError):
        open_corpus(name)


def test_a_file_has_no_splits(tmp_path):
    file = tmp_path / "some.txt"
    file.write_text("text")
    with pytest.raises(UsageError, match="no split 'train'"):
        open_corpus(f"{file}#train")


def test_the_hash_follows_names_texts_and_order():
    def corpus(*documents: tuple[str, str]) -> Corpus:
        return Corpus("c", "1", lambda: iter([Document(*document) for document in documents]))

    one = corpus(("a", "x"), ("b", "y"))
    assert one.sha256 == corpus(("a", "x"), ("b", "y")).sha256
    others = [corpus(("b", "y"), ("a", "x")), corpus(("a", "xb"), ("", "y")), corpus(("a", "x"), ("b", "z"))]
    assert one.sha256 not in [other.sha256 for other in others]
    assert json.loads(json.dumps(one.describe())) == {"corpus": "c", "revision": "1", "sha256": one.sha256}
