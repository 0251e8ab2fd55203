from __future__ import annotations

from pathlib import Path

import pytest
from eval_models import tiny_llama, word_tokenizer
from headfold.eval import runner
from headfold.eval.compare import compare
from headfold.eval.report.write import html
from headfold.eval.settings import EvalSettings
from safetensors.torch import load_file, save_file


@pytest.fixture
def models(save) -> list[str]:
    return [save(name, tiny_llama(seed=seed), word_tokenizer()) for seed, name in enumerate(("source", "one", "two"))]


@pytest.fixture
def run(tmp_path, text_file, monkeypatch):
    """Compare with a cache of the source, and return the results and the names of the models that were loaded."""
    loaded: list[str] = []
    load = runner.Runner._load
    monkeypatch.setattr(runner.Runner, "_load", lambda self, model: loaded.append(model.name) or load(self, model))

    def compare_here(models, **changes):
        loaded.clear()
        quick = {"contexts": [8], "decode_batches": [1], "new_tokens": 2, "repeats": 1, "needles": 2}
        settings = EvalSettings(
            **{
                "data": text_file,
                "window": 32,
                "device": "cpu",
                "source_cache": str(tmp_path / "cache"),
                **quick,
                **changes,
            }
        )
        found = compare(models[0], models[1:], out=tmp_path / "report", settings=settings, overwrite=True)
        return found, list(loaded)

    return compare_here


def test_the_source_is_not_run_twice(run, models, tmp_path):
    first, loaded = run([models[0], models[1]])
    assert loaded == ["source", "one"]
    again, loaded = run([models[0], models[1]])
    assert loaded == ["one"]
    assert again.protocol.source_from_cache is True
    assert again.models[0].nll_nats == first.models[0].nll_nats
    before, after = (found.models[1].against_source for found in (first, again))
    for name in ("perplexity_ratio", "same_top_token", "by_context", "worst_documents", "needle", "cache_ratio"):
        assert getattr(after, name) == getattr(before, name), name
    assert before.kl_nats is not None
    assert after.kl_nats is None  # the source's whole distributions are not cached
    assert after.speedup == []
    assert len(again.models[1].decode) == 1
    assert "no KL and no speed" in html(again)


def test_a_source_whose_late_rows_changed_is_scored_again(run, models):
    """Row B058: rows behind the first 4 KiB of the head were trained, and the cache gave the old perplexity."""
    before, _ = run([models[0], models[1]])
    file = Path(models[0]) / "model.safetensors"
    tensors = load_file(file)
    name = max(tensors, key=lambda name: tensors[name].nbytes)
    tensors[name][-1] += 1
    save_file(tensors, file, metadata={"format": "pt"})
    after, loaded = run([models[0], models[1]])
    assert loaded == ["source", "one"]
    assert after.models[0].nll_nats != before.models[0].nll_nats


@pytest.mark.parametrize("changes", [{"window": 16}, {"tokens": 100}, {"bos": True}, {"needles": 3}])
def test_scores_of_another_protocol_are_not_used(run, models, changes):
    run([models[0], models[1]])
    assert run([models[0], models[2]], **changes)[1] == ["source", "two"]


def test_a_damaged_entry_is_measured_again(run, models, tmp_path, capsys):
    run([models[0], models[1]])
    (file,) = (tmp_path / "cache").iterdir()
    file.write_bytes(file.read_bytes()[:-200])
    found, loaded = run([models[0], models[1]])
    assert loaded == ["source", "one"]
    assert "measured again" in capsys.readouterr().err
    assert found.to_json()


def test_a_stopped_comparison_continues_with_a_cache_made_since(run, models, monkeypatch):
    """The saved scores have rows for the source's logits, and a comparison from the cache has none."""
    expected, _ = run([models[0], models[1]], source_cache=None)
    monkeypatch.setattr(runner.Runner, "_time", _interrupted)
    with pytest.raises(KeyboardInterrupt):
        run([models[0], models[1]], source_cache=None)
    monkeypatch.undo()
    run([models[0], models[2]])
    monkeypatch.setattr(runner.Runner, "_time", _interrupted)
    with pytest.raises(KeyboardInterrupt):
        run([models[0], models[1]])
    monkeypatch.undo()
    found, _ = run([models[0], models[1]])
    assert found.models[1].nll_nats == expected.models[1].nll_nats


def _interrupted(*_arguments: object) -> None:
    raise KeyboardInterrupt
