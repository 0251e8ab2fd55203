from __future__ import annotations

import json
from pathlib import Path

import pytest
from eval_models import tiny_llama, word_tokenizer
from headfold.errors import UsageError
from headfold.eval.compare import compare
from headfold.eval.report.merge import read_and_merge
from headfold.eval.report.sweep import SweepRow, write_tradeoff
from headfold.eval.report.write import rebuild_report
from headfold.eval.settings import EvalSettings


@pytest.fixture
def models(save) -> list[str]:
    return [save(name, tiny_llama(seed=seed), word_tokenizer()) for seed, name in enumerate(("source", "one", "two"))]


@pytest.fixture
def run(tmp_path, text_file):
    def compare_here(name: str, models: list[str], **changes) -> Path:
        settings = EvalSettings(
            **{"data": text_file, "window": 32, "device": "cpu", "repeats": 0, "needles": 0, **changes}
        )
        compare(models[0], models[1:], out=tmp_path / name, settings=settings, command=f"eval {name}")
        return tmp_path / name

    return compare_here


def test_two_merged_comparisons_equal_one(run, models, tmp_path):
    source, one, two = models
    (Path(one) / "headfold.json").write_text(json.dumps({"schema": 1, "history": [{"step": "convert"}]}))
    (Path(two) / "headfold.json").write_text(json.dumps({"schema": 1, "history": [{"step": "uptrain"}]}))
    together = read_and_merge([run("all", models)])
    merged = read_and_merge([run("first", [source, one]), run("second", [source, two])])
    assert merged.models == together.models  # what uptraining recovered of the other run's conversion included
    assert merged.models[2].against_source.recovered is not None or (
        merged.models[1].perplexity.value < merged.models[0].perplexity.value
    )
    assert merged.command == "eval first\neval second"
    rebuild_report(merged, tmp_path / "merged")
    page = (tmp_path / "merged" / "report.html").read_text()
    assert "two against source" in page


def test_a_model_in_both_is_shown_once(run, models):
    source, one, two = models
    merged = read_and_merge([run("first", [source, one, two]), run("second", [source, one])])
    assert [model.name for model in merged.models] == ["source", "two", "one"]


def test_comparisons_that_differ_in_protocol_or_source_are_not_merged(run, models, tmp_path):
    first = run("first", models[:2])
    content = json.loads((first / "results.json").read_text())
    second = tmp_path / "second"
    second.mkdir()

    def write(source: dict | None = None, **protocol) -> None:
        models = [{**content["models"][0], **(source or {})}, *content["models"][1:]]
        changed = {**content, "models": models, "protocol": {**content["protocol"], **protocol}}
        (second / "results.json").write_text(json.dumps(changed))

    write()
    assert len(read_and_merge([first, second]).models) == 2
    unlike = {"window": 16, "stride": 3, "dtype": "bfloat16", "device": "cuda", "vocab": 31, "attention": "eager"}
    made = content["protocol"]
    unlike |= {"decode": {**made["decode"], "repeats": 9}, "needle": {**made["needle"], "passages": 9}}
    for name, value in unlike.items():
        write(**{name: value})
        with pytest.raises(UsageError, match=f"{name} differ"):
            read_and_merge([first, second])
    write(ids_sha256="other")
    with pytest.raises(UsageError, match="tokens scored differ"):
        read_and_merge([first, second])
    write({"digest": "other"})
    with pytest.raises(UsageError, match="source differ"):
        read_and_merge([first, second])


def test_the_curve_of_a_sweep_joins_the_page(run, models, tmp_path):
    (tmp_path / "sweep").mkdir()
    rows = [SweepRow("source", 4, 1024.0, 20.0, 19.0, 21.0, 0.0), SweepRow("mean", 2, 512.0, 30.0, 29.0, 31.0, 1.0)]
    write_tradeoff(rows, tmp_path / "sweep", {"checkpoint": "source"}, [100, 200])
    merged = read_and_merge([tmp_path / "sweep", run("first", models[:2])])
    rebuild_report(merged, tmp_path / "page")
    assert "What each number of KV heads costs" in (tmp_path / "page" / "report.html").read_text()
    with pytest.raises(UsageError, match="no results of headfold eval"):
        read_and_merge([tmp_path / "sweep"])
