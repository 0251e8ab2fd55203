"""A method is one row: the table alone tells plan, conversion, record and dry run everything about it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from headfold import cli
from headfold.checkpoint.record import last_entry
from headfold.checkpoint.source import Checkpoint
from headfold.convert.methods.attention import Attention
from headfold.convert.methods.context import MethodContext
from headfold.convert.methods.table import METHODS, AllowedTurns, Method
from headfold.convert.run import plan_conversion, run_plan
from tiny import tiny_model


def _second_head(attention: Attention, groups: int, context: MethodContext) -> Attention:
    """Take the second head of each group, with keys twice as large and queries half as large."""
    members = attention.kv_heads // groups
    return replace(
        attention,
        q_HDC=attention.q_HDC / 2,
        k_KDC=attention.k_KDC[1::members] * 2,
        v_KDC=attention.v_KDC[1::members],
    )


def _second_pooled(heads: torch.Tensor, groups: int, context: MethodContext) -> torch.Tensor:
    return heads[1 :: heads.shape[0] // groups].clone()


@pytest.fixture
def toy_row(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Add a row and a module with its function, and nothing else."""

    def add(**changes: Any) -> Method:
        module = ModuleType("toy_methods")
        module.second_head, module.second_pooled = _second_head, _second_pooled  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "toy_methods", module)
        fields: dict[str, Any] = {
            "name": "toy",
            "function": "toy_methods:second_head",
            "summary": "take the second head of a group",
            "rewrites_queries": True,
            "reads_text": False,
            "without_text": "The second heads are a toy",
            "turns": AllowedTurns(of_planes="a factor of two", of_rows="nothing"),
            "norms": "averaged",
            "default_grouping": "contiguous",
            "refined_by_default": False,
        }
        row = Method(**{**fields, **changes})
        monkeypatch.setitem(METHODS, "toy", row)
        return row

    return add


@pytest.fixture
def source(tmp_path: Path) -> Path:
    tiny_model("llama", 4, 4).save_pretrained(tmp_path / "source")
    return tmp_path / "source"


TURNED = "keys: a factor of two per rotary plane; values: nothing"


def test_a_new_method_on_whole_layers_is_planned_run_and_recorded(toy_row: Any, source: Path, tmp_path: Path) -> None:
    toy_row()
    plan = plan_conversion(source, groups=2, method="toy", grouping=None)
    assert plan.grouping == "contiguous"
    assert ("turned in the heads", "", TURNED) in plan.describe()
    replaced = {name.split("self_attn.")[1] for name, action in plan.actions.items() if action.kind == "replace"}
    assert replaced == {"q_proj.weight", "o_proj.weight"}
    out = run_plan(plan, tmp_path / "out")
    before, after = Checkpoint.open(source), Checkpoint.open(out)
    layer = "model.layers.1.self_attn"
    for side, factor in (("q", 0.5), ("k", 2.0), ("v", 1.0)):
        heads = before.read(f"{layer}.{side}_proj.weight").unflatten(0, (4, -1)) * factor
        expected = heads if side == "q" else heads[[1, 3]]
        assert torch.equal(after.read(f"{layer}.{side}_proj.weight"), expected.flatten(0, 1)), side
    entry = last_entry(out, "convert")
    assert entry is not None
    assert (entry["method"], entry["grouping"], entry["turned"]) == ("toy", "contiguous", [TURNED])


def test_its_default_grouping_counts(toy_row: Any, source: Path) -> None:
    toy_row(default_grouping="similarity", turns=None)
    plan = plan_conversion(source, groups=2, method="toy", grouping=None)
    assert plan.grouping == "similarity"
    assert plan.turns() == []


def test_text_is_read_only_by_methods_that_say_so(toy_row: Any, source: Path) -> None:
    toy_row()
    assert not plan_conversion(source, groups=2, method="toy").reads_text
    assert plan_conversion(source, groups=2, method="toy", grouping="similarity").reads_text
    toy_row(reads_text=True)
    assert plan_conversion(source, groups=2, method="toy").reads_text


def test_a_dry_run_shows_it(toy_row: Any, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toy_row()
    arguments = ["convert", str(source), "--groups", "2", "--method", "toy", "-o", str(tmp_path / "out"), "--dry-run"]
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert not ended.value.code
    assert "toy" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("norms", ["pooled", "fresh"])
def test_a_new_method_on_single_tensors_needs_a_row_and_a_function(
    norms: str, toy_row: Any, source: Path, tmp_path: Path
) -> None:
    """The keys of this Cohere have norms with weights of every head."""
    tiny_model("cohere", 4, 4, use_qk_norm=True).save_pretrained(source)
    toy_row(function="toy_methods:second_pooled", rewrites_queries=False, turns=None, norms=norms)
    plan = plan_conversion(source, groups=2, method="toy")
    assert {action.kind for action in plan.actions.values()} == {"copy", "merge"}
    before, after = Checkpoint.open(source), Checkpoint.open(run_plan(plan, tmp_path / "out"))
    layer = "model.layers.0.self_attn"
    keys = before.read(f"{layer}.k_proj.weight").unflatten(0, (4, -1))[[1, 3]].flatten(0, 1)
    assert torch.equal(after.read(f"{layer}.k_proj.weight"), keys)
    assert torch.equal(after.read(f"{layer}.q_proj.weight"), before.read(f"{layer}.q_proj.weight"))
    weights = before.read(f"{layer}.k_norm.weight")[[1, 3]]
    expected = weights if norms == "pooled" else torch.ones_like(weights)
    assert torch.equal(after.read(f"{layer}.k_norm.weight"), expected)


def test_a_row_that_contradicts_itself_or_leaves_a_question_open_is_refused() -> None:
    fields = {name: getattr(METHODS["folded"], name) for name in METHODS["folded"].__dataclass_fields__}
    Method(**fields)
    with pytest.raises(ValueError, match="whole layers"):
        Method(**{**fields, "norms": "pooled"})
    for name in fields:
        with pytest.raises(TypeError, match=name):
            Method(**{key: value for key, value in fields.items() if key != name})


def test_every_row_names_a_function_that_is_there() -> None:
    assert set(METHODS) == {"mean", "first", "random", "aligned", "aligned+rescale", "folded"}
    for name, method in METHODS.items():
        assert callable(method.load()), name
        assert method.name == name
        assert (method.turns is not None) == method.rewrites_queries


def test_the_table_is_read_without_torch() -> None:
    script = "import sys, headfold.convert.methods.table; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
