"""Where results run: what was tried is said with its version, what was not is called so, and silent faults are loud."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from headfold import cli
from headfold.checkpoint.modelling import OWN_TYPES
from headfold.checkpoint.record import last_entry
from headfold.convert.inspect import inspect_checkpoint
from headfold.convert.run import convert_checkpoint, plan_conversion
from headfold.convert.serving.devices import STACKS
from headfold.convert.serving.engines import AGREED, ENGINES, FAULTS, NOT_TRIED, not_served_by, where_it_runs
from tiny import tiny_model


def _run(*arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    assert not ended.value.code


def _told(capfd: pytest.CaptureFixture[str]) -> str:
    captured = capfd.readouterr()
    return " ".join((captured.out + captured.err).split())


SILENT = [
    ("gpt_neox", {"use_parallel_residual": False}, 2, "nemotron", "(tried)"),
    ("opt", {"word_embed_proj_dim": 64}, 1, "gpt_bigcode", "(by their sources)"),
]


@pytest.mark.parametrize(("source", "over", "groups", "target", "known"), SILENT)
def test_a_result_that_an_engine_misreads_in_silence_is_warned_of_everywhere(
    source: str, over: dict, groups: int, target: str, known: str, tmp_path: Path, capfd: Any
) -> None:
    """llama.cpp and mlx-lm load a nemotron with GELU and compute squared ReLU: 2 nats apart, without an error."""
    folder, out = tmp_path / "m", tmp_path / "out"
    tiny_model(source, **over).save_pretrained(folder)
    arguments = ["convert", str(folder), "--groups", str(groups), "-o", str(out)]
    for last in (["--dry-run"], []):
        _run(*arguments, *last)
        said = _told(capfd)
        assert "warning: llama.cpp and mlx-lm " in said
        assert "Do not use them for it." in said
        assert known in said
    entry = last_entry(out, "convert")
    assert entry is not None
    assert entry["model_type"] == target
    assert len(entry["serving"]["warnings"]) == 1
    assert f"**{entry['serving']['warnings'][0]}**" in (out / "README.md").read_text()
    _run("inspect", str(folder))
    assert "Do not use them for it." in _told(capfd)
    row = next(row for row in inspect_checkpoint(folder).cache if row.groups == groups)
    assert set(row.devices["llama.cpp"].values()) == {"refused"}


@pytest.mark.parametrize(
    ("source", "over", "groups"),
    [("nemotron", {"hidden_act": "relu2"}, 2), ("gpt2", {}, 1), ("llama", {}, 2), ("cohere", {}, 2)],
)
def test_control_other_results_are_not_warned_of(source: str, over: dict, groups: int, tmp_path: Path) -> None:
    tiny_model(source, 4, **over).save_pretrained(tmp_path / "m")
    assert plan_conversion(tmp_path / "m", groups=groups).where.warnings == ()


def test_phi_runs_in_vllm_and_needs_another_key_in_llama_cpp(tmp_path: Path) -> None:
    tiny_model("gpt_neox").save_pretrained(tmp_path / "m")
    fewer = plan_conversion(tmp_path / "m", groups=2).where
    assert "vLLM 0.32.0 and mlx-lm 0.32.2 agreed with transformers" in fewer.runs
    assert any("phi2.attention.head_count_kv" in fault for fault in fewer.faults)
    all_heads = plan_conversion(tmp_path / "m", groups=4).where
    assert all_heads.faults == ()


def test_what_was_not_tried_is_not_claimed(tmp_path: Path) -> None:
    tiny_model("cohere", 4, 4).save_pretrained(tmp_path / "m")
    said = plan_conversion(tmp_path / "m", groups=2).where.text
    assert "agreed" not in said
    assert "Not tried: vLLM, llama.cpp, mlx-lm, SGLang and TensorRT-LLM." in said
    assert inspect_checkpoint(tmp_path / "m").runs == said


@pytest.mark.parametrize("config", [{"rope_parameters": {"rope_theta": 5.0}}, {"rope_theta": 5.0}], ids=["v5", "v4"])
@pytest.mark.parametrize("model_type", ["qwen2", "starcoder2", "stablelm"])
def test_the_dialect_that_mlx_cannot_read_is_said(model_type: str, config: dict) -> None:
    found = where_it_runs({"model_type": model_type, **config}, fewer_heads=True)
    assert any("mlx-lm reads" in fault for fault in found.faults) == ("rope_parameters" in config)
    assert ("mlx-lm 0.32.2" in found.runs) == ("rope_theta" in config)


def _configs() -> list[dict[str, Any]]:
    named = sorted({*AGREED, *OWN_TYPES, *(name for fault in FAULTS for name in fault.model_types), "cohere"})
    return [
        {"model_type": name, "hidden_act": activation, "alibi": True}
        for name in named
        for activation in ("gelu", "relu", "relu2")
    ]


@pytest.mark.parametrize("config", _configs(), ids=lambda config: f"{config['model_type']}-{config['hidden_act']}")
@pytest.mark.parametrize("fewer_heads", [True, False])
def test_every_engine_is_spoken_of_and_none_is_both_praised_and_refused(config: dict, fewer_heads: bool) -> None:
    found = where_it_runs(config, fewer_heads=fewer_heads)
    runs, _, not_tried = found.runs.partition("Not tried:")
    places = (runs, not_tried, " ".join((*found.faults, *found.warnings)))
    refused = not_served_by(config, fewer_heads=fewer_heads)
    for engine in (*ENGINES, *NOT_TRIED):
        spoken_of = [engine in place for place in places]
        assert sum(spoken_of) == 1, engine
        assert spoken_of[2] == (engine in refused), engine


def test_stacks_that_distribute_heads_are_engines_that_are_spoken_of() -> None:
    assert {stack.name for stack in STACKS} <= {"transformers", *ENGINES, *NOT_TRIED}


def test_the_help_claims_no_engine(capfd: pytest.CaptureFixture[str]) -> None:
    """It said "ready for transformers, vLLM, SGLang and llama.cpp", which results of other types are not."""
    _run("convert", "--help")
    said = _told(capfd)
    assert "ready for" not in said
    assert "--dry-run says where" in said


@pytest.mark.parametrize("groups", [2, 1])
def test_the_card_says_where_the_result_runs(groups: int, tmp_path: Path) -> None:
    tiny_model("gpt2").save_pretrained(tmp_path / "m")
    out = convert_checkpoint(tmp_path / "m", tmp_path / "out", groups=groups)
    config = json.loads((out / "config.json").read_text())
    made = " ".join((out / "README.md").read_text().split())
    assert where_it_runs(config, fewer_heads=True, rewritten=True).text in made
