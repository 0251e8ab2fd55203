from __future__ import annotations

import builtins
import json
from pathlib import Path

import pytest
import torch
from eval_models import WORDS, tiny_llama, word_tokenizer
from headfold.errors import DataError, UsageError
from headfold.eval.compare import compare
from headfold.eval.measures.tasks import TaskSettings, _rows, find_tasks, task_identity
from headfold.eval.settings import EvalSettings

CHOICES = ["sat", "dog"]


@pytest.fixture
def task(tmp_path) -> Path:
    """Twelve questions of two words, each with two words to choose from, in a file beside the task."""
    questions = [{"question": f"{WORDS[n]} {WORDS[n + 1]}", "choices": CHOICES, "answer": n % 2} for n in range(12)]
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in questions))
    file = tmp_path / "mine.yaml"
    file.write_text(
        "task: next_word\n"
        "dataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {data}}}}}\n"
        "test_split: test\noutput_type: multiple_choice\n"
        "doc_to_text: '{{question}}'\ndoc_to_target: answer\ndoc_to_choice: '{{choices}}'\n"
        "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
    )
    return file


def accuracy(model) -> list[float]:
    """Compute from the logits whether the model prefers the right word after each question."""
    tokenizer = word_tokenizer()
    wanted = [tokenizer.convert_tokens_to_ids(word) for word in CHOICES]
    right = []
    for n in range(12):
        ids = torch.tensor([[tokenizer.convert_tokens_to_ids(word) for word in WORDS[n : n + 2]]])
        with torch.no_grad():
            right.append(float(int(model(ids).logits[0, -1, wanted].argmax()) == n % 2))
    return right


def test_a_local_task_is_answered_by_the_models_logits(save, text_file, task, tmp_path):
    models = tiny_llama(), tiny_llama(seed=1)
    folders = [save(name, model, word_tokenizer()) for name, model in zip(("source", "other"), models, strict=True)]
    settings = EvalSettings(data=text_file, window=32, device="cpu", tasks=[str(task)], repeats=0, needles=0)
    results = compare(folders[0], folders[1:], out=tmp_path / "report", settings=settings)
    before, after = (accuracy(model) for model in models)
    assert before != after
    for row, expected in zip((model.tasks[0] for model in results.models), (before, after), strict=True):
        assert (row.task, row.measure, row.questions) == ("next_word", "acc", 12)
        assert row.mean.value == pytest.approx(sum(expected) / 12)
        assert row.standard_error == pytest.approx(torch.tensor(expected).std().item() / 12**0.5)
    (paired,) = results.models[1].against_source.tasks
    assert paired.difference.value == pytest.approx((sum(after) - sum(before)) / 12)
    assert paired.difference.low < paired.difference.value < paired.difference.high
    assert "next_word: acc" in (tmp_path / "report" / "report.md").read_text()


def test_tasks_that_do_not_exist_are_refused(task, tmp_path):
    assert find_tasks(TaskSettings((str(task),)))[1] == ["next_word"]
    assert find_tasks(TaskSettings((str(task.parent),)))[1] == ["next_word"]
    with pytest.raises(UsageError, match=r"no_such\.yaml"):
        find_tasks(TaskSettings((str(tmp_path / "no_such.yaml"),)))
    (tmp_path / "empty.yaml").write_text("dataset_path: json\n")
    with pytest.raises(UsageError, match="defines no task"):
        find_tasks(TaskSettings((str(tmp_path / "empty.yaml"),)))


def test_missing_task_data_is_an_error_in_one_sentence(save, text_file, task, tmp_path):
    (tmp_path / "questions.jsonl").unlink()
    settings = EvalSettings(data=text_file, window=32, device="cpu", tasks=[str(task)], repeats=0, needles=0)
    with pytest.raises(DataError, match="next_word"):
        compare(save("source", tiny_llama(), word_tokenizer()), [], out=tmp_path / "report", settings=settings)
    assert not (tmp_path / "report").exists()


def test_without_lm_eval_the_hint_names_the_extra(monkeypatch, task):
    own = builtins.__import__

    def without(name, *rest, **more):
        if name.split(".")[0] == "lm_eval":
            raise ImportError(name)
        return own(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UsageError) as refused:
        find_tasks(TaskSettings((str(task),)))
    assert "headfold[harness]" in refused.value.hint


def test_each_filter_is_a_measure_and_measures_that_are_not_means_are_left_out(capfd):
    """lm-eval logs gsm8k with a sample for each filter, and lambada with log-likelihoods named perplexity."""
    samples = [
        {"doc_id": n, "filter": name, "exact_match": float(right), "perplexity": -2.0 - n, "metrics": metrics}
        for name, rights in (("strict", (0, 0, 1)), ("flexible", (0, 1, 1)))
        for n, right in enumerate(rights)
        for metrics in [["exact_match", "perplexity"]]
    ]
    totals = {"exact_match,strict": 1 / 3, "exact_match,flexible": 2 / 3, "perplexity,strict": 20.1}
    results = {"results": {"task": totals}, "higher_is_better": {"task": {"exact_match": True, "perplexity": False}}}
    rows = _rows("task", samples, results)
    assert {row.measure: row.values for row in rows} == {
        "exact_match (strict)": [0, 0, 1],
        "exact_match (flexible)": [0, 1, 1],
    }
    assert "perplexity (strict)" in capfd.readouterr().err


def test_an_edited_task_file_is_another_task(task):
    before = task_identity(TaskSettings((str(task),)))
    assert before == task_identity(TaskSettings((str(task),)))
    task.write_text(task.read_text() + "# a change\n")
    assert task_identity(TaskSettings((str(task),))) != before
