"""The edit of config.json: one number, every other byte as it was."""

from __future__ import annotations

import json

import pytest
from headfold.convert.plan.config_edit import with_number
from hypothesis import given
from hypothesis import strategies as st

KEY = ("num_key_value_heads",)
AFTER = "num_attention_heads"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"num_key_value_heads": 8, "x": 1e5}', '{"num_key_value_heads": 2, "x": 1e5}'),
        ('{"num_key_value_heads":null}', '{"num_key_value_heads":2}'),
        (
            '{\n  "num_attention_heads": 8,\n  "z": 1\n}',
            '{\n  "num_attention_heads": 8,\n  "num_key_value_heads": 2,\n  "z": 1\n}',
        ),
        ('{"num_attention_heads": 8}', '{"num_attention_heads": 8,"num_key_value_heads": 2}'),
        ("{}", '{"num_key_value_heads": 2}'),
        ('{"a": "num_key_value_heads\\": 3, {"}', '{"a": "num_key_value_heads\\": 3, {","num_key_value_heads": 2}'),
        (
            '{"num_key_value_heads": 4, "num_key_value_heads": 8}',
            '{"num_key_value_heads": 4, "num_key_value_heads": 2}',
        ),
    ],
)
def test_only_the_number_changes(text: str, expected: str) -> None:
    made = with_number(text, KEY, 2, AFTER)
    assert made == expected
    assert json.loads(made)["num_key_value_heads"] == 2


def test_nested_place() -> None:
    text = '{"num_key_value_heads": 9, "text_config": {"a": [1, {"num_key_value_heads": 7}], "num_key_value_heads": 8}}'
    made = with_number(text, ("text_config", "num_key_value_heads"), 2, AFTER)
    assert made == text.replace("8}}", "2}}")


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
_KEYS = st.sampled_from(["num_key_value_heads", "num_attention_heads", "a", 'q"{', ","]) | st.text(max_size=5)


@given(
    config=st.dictionaries(_KEYS, _VALUES, max_size=6),
    indent=st.sampled_from([None, 0, 2, "\t"]),
    escape=st.booleans(),
)
def test_any_json_keeps_all_else(config: dict[str, object], indent: int | str | None, escape: bool) -> None:
    text = json.dumps(config, indent=indent, ensure_ascii=escape)
    made = json.loads(with_number(text, KEY, 4, AFTER))
    assert made == {**config, "num_key_value_heads": 4}
    kept = [key for key in made if key in config]
    assert kept == list(config)
