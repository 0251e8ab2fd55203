"""Plan and record describe the basis changes that a method applies to the heads of a family."""

from __future__ import annotations

import pytest
from headfold.checkpoint.record import last_entry
from headfold.convert.run import plan_conversion, run_plan
from tiny import tiny_model


@pytest.mark.parametrize(
    ("model_type", "method", "changes", "expected"),
    [
        ("llama", "folded", {}, "keys: a complex number per rotary plane; values: any invertible map"),
        ("llama", "aligned", {}, "keys: a phase per rotary plane; values: a rotation"),
        (
            "glm",
            "folded",
            {"pad_token_id": 0},
            "keys: a complex number per rotary plane, any invertible map of the rows not rotated; "
            "values: any invertible map",
        ),
        (
            "qwen3",
            "folded",
            {},
            "keys: a sign per rotary plane or row, or a phase where the two weights of the q/k norm are equal; "
            "values: any invertible map",
        ),
        ("llama", "mean", {}, None),
    ],
)
def test_plan_and_record_describe_the_turns(model_type, method, changes, expected, tmp_path) -> None:
    tiny_model(model_type, **changes).save_pretrained(tmp_path / "source")
    plan = plan_conversion(tmp_path / "source", groups=2, method=method)
    told = [row[2] for row in plan.describe() if row[0] == "turned in the heads"]
    assert told == ([] if expected is None else [expected])
    entry = last_entry(run_plan(plan, tmp_path / "out"), "convert")
    assert entry is not None
    assert entry["turned"] == told
