"""The head start: same bytes as without it, nothing left of a wrong guess or a refusal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from headfold import cli
from headfold.checkpoint import write
from headfold.checkpoint.source import Checkpoint
from headfold.convert import early
from headfold.convert.early import convert_early, foresee
from headfold.convert.run import convert_checkpoint, plan_conversion
from headfold.errors import CheckpointError, HeadfoldError, UnsupportedError
from safetensors.torch import load_file, save_file
from tiny import tiny_model


@pytest.fixture
def source(tmp_path: Path) -> Path:
    tiny_model("llama", 4, 4).save_pretrained(tmp_path / "m", max_shard_size="60KB")
    return tmp_path / "m"


def _early(source: Path, out: Path, groups: int = 2, shard: int | None = None) -> Path:
    checkpoint = Checkpoint.open(source)
    files = foresee(checkpoint, groups, "mean", "contiguous", shard)
    assert files is not None
    return convert_early(
        checkpoint, out, files, groups=groups, method="mean", max_shard_bytes=shard, overwrite=False, seed=0
    )


def _weights(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.glob("model*")}


@pytest.mark.parametrize(("groups", "shard"), [(2, None), (4, None), (1, 80_000)])
def test_what_is_foreseen_is_what_is_planned(groups: int, shard: int | None, source: Path, tmp_path: Path) -> None:
    size = None if shard is None else str(shard)
    plain = convert_checkpoint(source, tmp_path / "plain", groups=groups, max_shard_size=size)
    if shard is None:
        plan = plan_conversion(source, groups=groups)
        assert foresee(plan.source, groups, "mean", "contiguous", None) == plan.out_files()
    assert _weights(_early(source, tmp_path / "out", groups, shard)) == _weights(plain)


def test_a_wrong_guess_costs_time_only(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = convert_checkpoint(source, tmp_path / "plain", groups=2)
    monkeypatch.setattr(early, "_PER_KV_HEAD", early.re.compile(r".*layers\.0\.self_attn\.k_proj\.weight"))
    assert _weights(_early(source, tmp_path / "out")) == _weights(plain)


def test_a_refusal_leaves_nothing(source: Path, tmp_path: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "intermediate_size": 32}))
    with pytest.raises(CheckpointError):
        _early(source, tmp_path / "out")
    (source / "config.json").write_text(json.dumps({**config, "model_type": "gpt2"}))
    with pytest.raises(HeadfoldError):
        _early(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_copy_that_fails_fails_the_conversion(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(write, "_copy_range", full)
    with pytest.raises(HeadfoldError, match="No space left"):
        _early(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_what_is_not_clear_from_names_is_not_foreseen(source: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(source)
    for groups, method, grouping in ((3, "mean", "contiguous"), (2, "folded", "contiguous"), (2, "mean", "similarity")):
        assert foresee(checkpoint, groups, method, grouping, None) is None
    for change in ({"num_key_value_heads": None}, {"num_key_value_heads": 0}, {"quantization_config": {"x": 1}}):
        config = {**checkpoint.config, **change}
        assert foresee(early.replace(checkpoint, config=config), 2, "mean", "contiguous", None) is None
    tiny_model("gpt2", 4).save_pretrained(tmp_path / "gpt2")
    assert foresee(Checkpoint.open(tmp_path / "gpt2"), 1, "mean", "contiguous", None) is None


def test_the_command_takes_the_head_start_for_large_checkpoints(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = convert_checkpoint(source, tmp_path / "plain", groups=2)
    monkeypatch.setattr(early, "_WORTH_BYTES", 0)
    started = []
    real = write.ShardWriter.start_copying
    monkeypatch.setattr(
        write.ShardWriter, "start_copying", lambda self: (started.append(len(self.files)), real(self))[1]
    )
    for number, extra in enumerate(((), ("--seed", "1", "--grouping", "contiguous"))):
        out = tmp_path / f"out{number}"
        with pytest.raises(SystemExit) as ended:
            cli.main(["convert", str(source), "--groups", "2", "-o", str(out), *extra])
        assert not ended.value.code
        assert _weights(out) == _weights(plain)
    assert len(started) == 4  # begun early, and found begun by the run


def test_a_source_that_shrinks_meanwhile_is_named(source: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(source)
    files = foresee(checkpoint, 2, "mean", "contiguous", None)
    assert files is not None
    shard = max(source.glob("*.safetensors"))
    save_file({"x": load_file(shard)["model.norm.weight"]}, shard)
    with pytest.raises((CheckpointError, UnsupportedError)):
        convert_early(
            checkpoint, tmp_path / "out", files, groups=2, method="mean", max_shard_bytes=None, overwrite=False, seed=0
        )
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
