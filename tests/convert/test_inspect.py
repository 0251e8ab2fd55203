from __future__ import annotations

import json

import pytest
from calibrated import calibration_text, convert_calibrated
from headfold.convert.inspect import inspect_checkpoint, predict_loss
from headfold.convert.run import plan_conversion
from headfold.errors import UnsupportedError, UsageError

LLAMA_65B = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8192, "intermediate_size": 22016,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 64, "vocab_size": 32000,
    "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def config(tmp_path):
    def write(**changes):
        (tmp_path / "config.json").write_text(json.dumps({**LLAMA_65B, **changes}))
        return tmp_path

    return write


def test_a_config_alone_gives_the_cache_at_every_number_of_groups(config):
    """80 layers · 2 · 64 heads · 128 · 2 bytes, worked out by hand."""
    found = inspect_checkpoint(config())
    cache = {row.groups: row.bytes_per_token for row in found.cache}
    assert list(cache) == [64, 32, 16, 8, 4, 2, 1]
    assert (cache[64], cache[8], cache[1]) == (2_621_440, 327_680, 40_960)
    assert (found.attention_layers, found.head_dim, found.kv_heads) == (80, 128, 64)
    assert found.parameters == pytest.approx(65.3e9, rel=0.01)


def test_a_grouped_source_and_a_missing_count(config):
    grouped = inspect_checkpoint(config(num_key_value_heads=8))
    assert [row.groups for row in grouped.cache] == [8, 4, 2, 1]
    assert grouped.cache[0].bytes_per_token == 327_680
    without = {key: value for key, value in LLAMA_65B.items() if key != "num_key_value_heads"}
    folder = config()
    (folder / "config.json").write_text(json.dumps(without))
    assert inspect_checkpoint(folder).kv_heads == 64


def test_one_kv_head_is_counted_too(config):
    found = inspect_checkpoint(config(num_key_value_heads=1))
    assert [(row.groups, row.bytes_per_token) for row in found.cache] == [(1, 40_960)]


def test_a_type_without_the_setting_is_refused(config):
    with pytest.raises(UnsupportedError):
        inspect_checkpoint(config(model_type="xglm", architectures=["XGLMForCausalLM"]))


def test_the_predicted_loss_grows_as_groups_get_fewer(tiny_checkpoint, text_file, tmp_path):
    file = tmp_path / "moments.safetensors"
    calibration = calibration_text(str(text_file), tokens=2048, sequence_length=32, refine=0, statistics=file)
    convert_calibrated(plan_conversion(tiny_checkpoint, groups=1, method="folded"), tmp_path / "out", calibration)
    found = list(predict_loss(tiny_checkpoint, [2, 1], file))
    assert [(loss.layer, loss.groups) for loss in found] == [(0, 2), (0, 1), (1, 2), (1, 1)]
    assert all(loss.total == pytest.approx(0, abs=1e-9) for loss in found if loss.groups == 2)
    assert all(0 < loss.keys < 1 and 0 < loss.values < 1 for loss in found if loss.groups == 1)
    with pytest.raises(UsageError):
        list(predict_loss(tiny_checkpoint, [3], file))


@pytest.mark.parametrize("terminal", [True, False])
def test_the_table_is_drawn_on_a_terminal_and_markdown_in_a_pipe(terminal, tiny_checkpoint, capfd, monkeypatch):
    from headfold import cli, console

    monkeypatch.setattr(type(console.data), "is_terminal", terminal)
    with pytest.raises(SystemExit):
        cli.main(["inspect", str(tiny_checkpoint)])
    shown = capfd.readouterr().out
    assert ("| --- | --:" in shown) is not terminal
    assert ("━" in shown) is terminal
