from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from headfold.errors import UsageError
from headfold.eval.report.sweep import certainty, read_sweep
from headfold.eval.results import SweepResults, SweepRow
from headfold.recipes import sweep as sweep_module
from headfold.recipes.settings import SweepSettings
from headfold.recipes.sweep import sweep
from matplotlib.image import imread
from transformers import OPTConfig, OPTForCausalLM


@pytest.fixture
def settings(text_file):
    def make(methods="mean,folded,folded+refine", groups=(2, 1), **changes):
        values = {
            "data": str(text_file),
            "calibration": str(text_file),
            "calibration_tokens": 1024,
            "sequence_length": 32,
            "refine": 3,
            "tokens": 300,
            "window": 32,
            **changes,
        }
        if "folded" not in methods:  # settings for text are refused where no method reads any
            for name in {"calibration", "calibration_tokens", "sequence_length", "refine"} - changes.keys():
                del values[name]
        return SweepSettings(groups=groups, methods=methods, **values)

    return make


def rows(folder: Path) -> dict[tuple[str, int], dict]:
    return {(row["method"], row["groups"]): row for row in json.loads((folder / "sweep.json").read_text())["rows"]}


def test_every_method_is_measured_at_every_number_of_groups(tiny_checkpoint, settings, tmp_path):
    page = sweep(str(tiny_checkpoint), tmp_path / "out", settings())
    found = rows(tmp_path / "out")
    assert set(found) == {("source", 2), *((m, g) for m in ("mean", "folded", "folded+refine") for g in (2, 1))}
    # 2 layers · keys and values · 2 heads of width 8 · 2 bytes of bfloat16
    assert found["source", 2]["cache_bytes_per_token"] == 2 * 2 * 2 * 8 * 2
    assert found["mean", 1]["cache_bytes_per_token"] == 2 * 2 * 1 * 8 * 2
    assert found["mean", 2]["perplexity"] == pytest.approx(found["source", 2]["perplexity"], rel=1e-6)
    assert found["mean", 1]["perplexity"] != pytest.approx(found["source", 2]["perplexity"], rel=1e-6)
    assert page.read_text().count("<tr>") == 1 + len(found)
    assert page.read_text().count("<svg") == 1
    assert "per target token" not in page.read_text()
    assert "http" not in page.read_text().replace("http-equiv", "")
    picture = (255 * imread(page.with_name("sweep.png"))[..., :3]).round().astype(int).reshape(-1, 3).tolist()
    assert [255, 255, 255] in picture
    assert [0xB4, 0x50, 0x0B] in picture  # the first curve, in the colour that the page gives it in daylight


def test_a_stopped_sweep_goes_on_and_measures_nothing_twice(tiny_checkpoint, settings, tmp_path, monkeypatch):
    real, measured = sweep_module._convert_and_measure, []

    def count(checkpoint, method, wanted, *rest):
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append((method, wanted.groups))
        return real(checkpoint, method, wanted, *rest)

    monkeypatch.setattr(sweep_module, "_convert_and_measure", count)
    with pytest.raises(KeyboardInterrupt):
        sweep(str(tiny_checkpoint), tmp_path / "out", settings("mean,first"))
    before = rows(tmp_path / "out")
    measured.clear()
    monkeypatch.setattr(
        sweep_module,
        "_convert_and_measure",
        lambda c, m, w, *rest: measured.append((m, w.groups)) or real(c, m, w, *rest),
    )
    sweep(str(tiny_checkpoint), tmp_path / "out", settings("mean,first"))
    assert measured == [("mean", 1), ("first", 1)]
    after = rows(tmp_path / "out")
    assert len(after) == 5
    assert all(after[key] == row for key, row in before.items())


def test_a_folder_measured_otherwise_is_refused_and_kept(tiny_checkpoint, settings, tmp_path):
    sweep(str(tiny_checkpoint), tmp_path / "out", settings("mean", (1,)))
    before = (tmp_path / "out" / "sweep.json").read_bytes()
    longer = settings("mean,folded+refine", (1,), sequence_length=64)
    with pytest.raises(UsageError, match="calibration sequence length was 512 and is now 64"):
        sweep(str(tiny_checkpoint), tmp_path / "out", longer)
    with pytest.raises(UsageError, match="tokens was 300 and is now 150"):
        sweep(str(tiny_checkpoint), tmp_path / "out", settings("mean", (1,), tokens=150))
    assert (tmp_path / "out" / "sweep.json").read_bytes() == before


@pytest.mark.parametrize(("window", "says"), [(None, ""), (128, "128 tokens is longer than the 64")])
def test_a_window_longer_than_the_model_is_shortened(window, says, tiny_checkpoint, settings, tmp_path, capfd):
    """The default of 512 was refused for a model of 64 positions."""
    sweep(str(tiny_checkpoint), tmp_path / "out", settings("mean", (1,), window=window))
    assert json.loads((tmp_path / "out" / "sweep.json").read_text())["details"]["window"] == 64
    assert says in " ".join(capfd.readouterr().err.split())


def test_a_window_beyond_a_table_of_positions_is_refused(tmp_path, settings, word_tokenizer):
    folder = tmp_path / "opt"
    config = OPTConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, ffn_dim=32,
        word_embed_proj_dim=32, max_position_embeddings=64,
    )  # fmt: skip
    OPTForCausalLM(config).save_pretrained(folder)
    word_tokenizer.save_pretrained(folder)
    with pytest.raises(UsageError, match="longer than the 64 positions"):
        sweep(str(folder), tmp_path / "out", settings("mean", (4,), window=128))


def sweep_of(**nats: list[float]) -> SweepResults:
    rows = [
        SweepRow(method, 4 if method == "source" else 2, 1.0, float(np.sum(one)), None, None, 0.0, one)
        for method, one in nats.items()
    ]
    return SweepResults(details={}, rows=rows, document_tokens=[100] * len(nats["source"]))


def test_rows_that_the_text_cannot_tell_apart_are_named():
    draw = np.random.default_rng(0)
    source = 100 * draw.normal(3, 0.4, 12)
    best = source + 100 * draw.normal(0.10, 0.02, 12)
    near, far = (best + 100 * draw.normal(more, 0.05, 12) for more in (0.005, 0.3))
    said = certainty(sweep_of(source=list(source), folded=list(best), aligned=list(near), mean=list(far)))
    best_first = "aligned from folded" if best.sum() < near.sum() else "folded from aligned"
    assert len(said) == 1
    assert f"With 2 KV heads, this text (12 documents, effective number 12.0) cannot tell {best_first}" in said[0]
    assert "mean" not in said[0]
    apart = certainty(sweep_of(source=list(source), folded=list(best), mean=list(far)))
    assert "tells the best method at each number of KV heads from all others" in apart[0]


def test_a_text_too_small_for_intervals_says_so():
    said = certainty(sweep_of(source=[300.0] * 3, folded=[310.0, 330, 320], mean=[400.0, 410, 390]))
    assert "too small to tell any two of them apart (3 documents, effective number 3.0)" in said[0]
    assert "at least 5 documents" in said[0]


def test_a_sweep_of_an_earlier_version_is_still_read(tmp_path):
    row = {"method": "source", "groups": 4, "cache_bytes_per_token": 1.0, "perplexity": 20.0}
    old = {"details": {}, "rows": [{**row, "low": 19.0, "high": 21.0, "seconds": 0.0}]}
    (tmp_path / "sweep.json").write_text(json.dumps(old))
    found = read_sweep(tmp_path)
    assert found.rows[0].nll_nats is None
    assert certainty(found) == []


@pytest.mark.parametrize(
    ("methods", "groups", "says"), [("mean,average", (1,), "average"), ("mean", (3,), "cannot be merged into 3 groups")]
)
def test_what_is_impossible_is_refused_before_anything_is_measured(
    methods, groups, says, tiny_checkpoint, settings, tmp_path
):
    with pytest.raises(UsageError, match=says):
        sweep(str(tiny_checkpoint), tmp_path / "out", settings(methods, groups))
    assert not (tmp_path / "out").exists()
