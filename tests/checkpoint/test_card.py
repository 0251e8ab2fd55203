from __future__ import annotations

from pathlib import Path

import pytest
from headfold.checkpoint.card import write_card
from headfold.checkpoint.record import write_record
from headfold.convert.run import convert_checkpoint
from headfold.errors import HeadfoldError
from huggingface_hub import ModelCard
from tiny import tiny_model

SOURCE_CARD = """---
license: apache-2.0
language: [en]
tags: [code]
---
# Mine

All about it.
"""


def test_a_conversion_brings_a_card_and_keeps_that_of_the_source(tmp_path: Path) -> None:
    tiny_model("llama", 4, 4).save_pretrained(tmp_path / "m")
    (tmp_path / "m" / "README.md").write_text(SOURCE_CARD)
    half = convert_checkpoint(tmp_path / "m", tmp_path / "half", groups=2)
    out = convert_checkpoint(half, tmp_path / "out", groups=1, method="first")
    for folder in (half, out):
        assert (folder / "README.source.md").read_text() == SOURCE_CARD
        data = ModelCard.load(folder / "README.md").data
        assert (data.license, data.language, data.library_name) == ("apache-2.0", ["en"], "transformers")
        assert data.tags == ["headfold", "grouped-query-attention", "code"]
        assert data.base_model is None  # a local folder is no name on the hub
    text = (out / "README.md").read_text()
    assert "# llama, KV heads: 1" in text
    assert text.count("### Convert") == 2
    assert "| method | first |" in text
    assert "README.source.md" in text
    assert "The class of its source" not in text


@pytest.mark.parametrize(
    ("source", "groups", "type_and_class", "loads"),
    [
        ("gpt_neox", 2, "`phi` (`PhiForCausalLM`)", "loads like any checkpoint of its type"),
        ("gpt2", 1, "`gpt_bigcode` (`GPTBigCodeForCausalLM`)", "loads like any checkpoint of its type"),
        ("gpt2", 2, "`headfold_decoder` (`HeadfoldDecoderForCausalLM`)", "trust_remote_code=True"),
    ],
)
def test_another_type_than_the_source_s_is_said(
    source: str, groups: int, type_and_class: str, loads: str, tmp_path: Path
) -> None:
    tiny_model(source).save_pretrained(tmp_path / "m")
    text = (convert_checkpoint(tmp_path / "m", tmp_path / "out", groups=groups) / "README.md").read_text()
    made = " ".join(text.split())
    assert f"The class of its source, `{source}`, cannot hold fewer KV heads" in made
    assert f"so it is written as {type_and_class}, which computes the same." in made
    assert loads in made
    assert "llama.cpp" in made


@pytest.mark.parametrize(
    ("source", "folder"),
    [
        ("owner/model", "/anywhere"),
        ("/cache/x", "/home/u/.cache/huggingface/hub/models--owner--model/snapshots/0123abc"),
    ],
)
def test_the_base_model_is_named_where_it_has_a_name(source: str, folder: str, tmp_path: Path) -> None:
    write_record(tmp_path, tmp_path, {"step": "convert", "source": source, "source_folder": folder, "kv_heads": 2})
    write_card(tmp_path)
    assert ModelCard.load(tmp_path / "README.md").data.base_model == "owner/model"


def test_an_evaluation_is_shown_and_a_second_card_replaces_the_first(tmp_path: Path) -> None:
    write_record(tmp_path, tmp_path, {"step": "convert", "kv_heads": 2, "notes": ["a note"]})
    write_card(tmp_path)
    write_card(tmp_path, [["", "source", "converted"], ["Perplexity", "22.1", "a|b"]])
    text = (tmp_path / "README.md").read_text()
    assert "| Perplexity | 22.1 | a\\|b |" in text
    assert "- a note" in text
    assert not (tmp_path / "README.source.md").exists()


def test_strange_cards_do_not_stop_a_conversion(tmp_path: Path) -> None:
    for number, content in enumerate((b"---\n: : :\n---\n", b"---\ntags: 3\n---\n", b"\xff\xfe", b"")):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_record(folder, folder, {"step": "convert", "kv_heads": 2})
        (folder / "README.md").write_bytes(content)
        write_card(folder)
        assert (folder / "README.source.md").read_bytes() == content


def test_a_folder_without_a_record_gets_no_card(tmp_path: Path) -> None:
    with pytest.raises(HeadfoldError, match="has no headfold"):
        write_card(tmp_path)
