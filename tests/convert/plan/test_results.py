"""A kind of result is one class and one row: planning, running and inspecting need to know nothing else about it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from headfold.checkpoint.record import last_entry
from headfold.checkpoint.source import Checkpoint
from headfold.convert.family.model_type import ModelType
from headfold.convert.inspect import inspect_checkpoint
from headfold.convert.plan import Action, results
from headfold.convert.plan.another_type import AnotherType
from headfold.convert.plan.fewer_heads import FewerHeads
from headfold.convert.plan.result_attention import Prospect
from headfold.convert.run import plan_conversion, run_plan
from tiny import tiny_model, tiny_pair


@dataclass(frozen=True)
class Labelled(FewerHeads):
    """Fewer heads, with words, a cache and an action of its own."""

    @classmethod
    def prospect(cls, checkpoint: Checkpoint, model_type: ModelType) -> Prospect:
        return replace(super().prospect(checkpoint, model_type), route="Labelled on the way.")

    def actions(self, method: Any, grouping: str) -> dict[str, Action]:
        found = super().actions(method, grouping)
        return {name: replace(one, kind="compute") if one.kind == "copy" else one for name, one in found.items()}

    def kv_bytes_per_token(self, side: str = "self") -> tuple[int, int]:
        return 4096, 1024

    def describe(self) -> list[tuple[str, str, str]]:
        return [("label", "without", "with")]

    def record(self) -> dict[str, Any]:
        return {**super().record(), "label": "with"}

    def finish(self, folder: Path) -> None:
        (folder / "label.txt").write_text("with")


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    tiny_model("llama", 4, 4).save_pretrained(tmp_path / "m")
    return tmp_path / "m"


def test_a_third_kind_of_result_is_one_row(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "RESULTS", (Labelled, *results.RESULTS))
    plan = plan_conversion(llama, groups=2)
    rows = plan.describe()
    assert rows[0] == ("label", "without", "with")
    assert ("KV cache per token", "4.00 KiB", "1.00 KiB") in rows
    out = run_plan(plan, tmp_path / "out")
    entry = last_entry(out, "convert")
    assert entry is not None
    assert entry["label"] == "with"
    assert (out / "label.txt").exists()
    assert inspect_checkpoint(llama).route == "Labelled on the way."


def test_a_type_with_a_kv_setting_keeps_its_class(llama: Path) -> None:
    assert type(plan_conversion(llama, groups=2).result) is FewerHeads


@pytest.mark.parametrize("model_type", ["gpt2", "t5"])
def test_a_type_without_a_kv_setting_becomes_another(model_type: str, tmp_path: Path) -> None:
    model = tiny_pair("t5") if model_type == "t5" else tiny_model("gpt2", 4)
    model.save_pretrained(tmp_path / "m")
    plan = plan_conversion(tmp_path / "m", groups=1)
    assert type(plan.result) is AnotherType
    assert plan.describe()[0][1] == model_type
    assert plan.result.original.config["model_type"] == model_type


def test_each_config_is_resolved_once(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One config for the source, one for each of the two classes that are compared."""
    from headfold.convert.family import model_type

    resolve, calls = model_type._resolved, []
    monkeypatch.setattr(model_type, "_resolved", lambda name, config: (calls.append(name), resolve(name, config))[1])
    plan_conversion(llama, groups=2)
    assert calls == ["llama"] * 3
