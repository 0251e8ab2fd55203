"""Damaged headers, indexes and configs thrown at `convert`: exit code 1 or 2, one sentence, nothing left behind."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from headfold import cli
from headfold.convert.family.verify import verify
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tiny import tiny_model

EXAMPLES = int(os.environ.get("HEADFOLD_DAMAGE_EXAMPLES", "60"))
SECONDS = 120  # of wall clock, on machines that are busy with other things
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A sharded and a single checkpoint, tiny, of two types."""
    root = tmp_path_factory.mktemp("bases")
    tiny_model("qwen2", 4, 4, vocab_size=40).save_pretrained(root / "single")
    tiny_model("llama", 4, 4, vocab_size=40).save_pretrained(root / "sharded", max_shard_size="40KB")
    assert (root / "sharded" / INDEX).exists()
    return {"single": root / "single", "sharded": root / "sharded"}


NUMBERS = st.sampled_from([0, -1, 1, 2, 3, 7, 4096, 10**6, 10**9, 2**63, 10**30, 0.5, -0.0, float("nan"), float("inf")])
VALUES = st.one_of(
    NUMBERS,
    st.sampled_from([None, True, False, "", "llama", "no_such_type", "\ud800", "x" * 300, "../x.safetensors"]),
    st.sampled_from([[], {}, [1, 2], {"a": 1}, [None] * 3, {"num_key_value_heads": 2}, [[[]]]]),
)

BEFORE = ("warning: ", "Not copied", "The source has")  # what a run may say before it fails
KEYS = ("x", "per_layer_config", "kv_lora_rank", "text_config", "layer_types", "num_kv_heads", "auto_map")


def _paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """List the places in a JSON value that could be changed, from the top."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(path for key, one in inner for path in _paths(one, (*at, key)))]


@st.composite
def changed_json(draw: st.DrawFn, value: Any) -> Any:
    """``value`` with one to three places removed, replaced, or filled from elsewhere."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 3))):
        *at, last = draw(st.sampled_from(_paths(value)[1:] or [("x",)]))
        place = value
        for key in at:
            place = place[key]
        kind = draw(st.sampled_from(["replace", "replace", "remove", "swap", "add"]))
        if not isinstance(place, (dict, list)):
            return value
        if kind == "remove":
            del place[last]
        elif kind == "swap":
            place[last] = _at(value, draw(st.sampled_from(_paths(value))))
        elif kind == "add" and isinstance(place, dict):
            place[draw(st.sampled_from(["x", "per_layer_config", "kv_lora_rank", "text_config", "layer_types"]))] = (
                draw(VALUES)
            )
        else:
            place[last] = copy.deepcopy(draw(VALUES))
        if not value:
            break
    return value


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return copy.deepcopy(value)


def _damage_config(draw: st.DrawFn, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(draw(changed_json(config))))


def _damage_index(draw: st.DrawFn, folder: Path) -> None:
    file = folder / INDEX
    if file.exists():
        file.write_text(json.dumps(draw(changed_json(json.loads(file.read_text())))))


def _damage_header(draw: st.DrawFn, folder: Path) -> None:
    file = draw(st.sampled_from(sorted(folder.glob("*.safetensors"))))
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    text = json.dumps(draw(changed_json(json.loads(raw[8 : 8 + length])))).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def _damage_bytes(draw: st.DrawFn, folder: Path) -> None:
    """Flip, cut or repeat bytes near the beginning of any file, where all but the weights is."""
    file = draw(st.sampled_from(sorted(path for path in folder.iterdir() if path.is_file())))
    raw = bytearray(file.read_bytes())
    for _ in range(draw(st.integers(1, 4))):
        raw[draw(st.integers(0, min(len(raw) - 1, 400)))] = draw(st.integers(0, 255))
    cut = draw(st.sampled_from([None, None, 0, 1, 7, 8, 9, 100, -1, -8]))
    file.write_bytes(bytes(raw[:cut]) + (b"\0" if draw(st.booleans()) else b""))


def _damage_files(draw: st.DrawFn, folder: Path) -> None:
    file = draw(st.sampled_from(sorted(path for path in folder.iterdir() if path.is_file())))
    file.unlink()
    match draw(st.sampled_from(["gone", "folder", "loop", "dangling", "nested", "other"])):
        case "folder":
            file.mkdir()
        case "loop":
            file.symlink_to(file.name)
        case "dangling":
            file.symlink_to("../none")
        case "nested":
            file.write_text("[" * 100_000)
        case "other":
            shutil.copy(draw(st.sampled_from(sorted(p for p in folder.iterdir() if p.is_file()))), file)


DAMAGE = (_damage_config, _damage_config, _damage_config, _damage_index, _damage_header, _damage_bytes, _damage_files)


class _Hang(BaseException):
    """No Exception, or the code that turns any failure of a library into a sentence would hide it."""


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    def hang(*_: object) -> None:
        raise _Hang(f"still busy after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # each example is small; to shrink it takes minutes
)
@given(data=st.data(), base=st.sampled_from(["single", "sharded"]), groups=st.sampled_from([2, 2, 1, 4]))
def test_damage_is_one_sentence_and_leaves_nothing(
    bases: dict[str, Path], data: st.DataObject, base: str, groups: int
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, out = Path(name) / "m", Path(name) / "out"
        shutil.copytree(bases[base], folder)
        damage = data.draw(st.sampled_from(DAMAGE))
        damage(data.draw, folder)
        said = io.StringIO()
        with contextlib.redirect_stderr(said), _time_limit(), pytest.raises(SystemExit) as ended:
            cli.main(["convert", str(folder), "--groups", str(groups), "-o", str(out)])
        shown, code = said.getvalue(), int(ended.value.code or 0)
        assert "Traceback" not in shown
        if code == 0:  # the damage did not matter, so the result must be sound
            verify(out)
            return
        assert code in (1, 2), shown
        lines = [line for line in shown.splitlines() if not line.startswith(BEFORE)]
        assert lines[0].startswith("error: "), shown
        assert len(lines) == 1 or (len(lines) == 2 and lines[1].startswith("hint: ")), shown
        assert [path.name for path in Path(name).iterdir()] == ["m"], shown


def test_control_the_undamaged_ones_convert(bases: dict[str, Path], tmp_path: Path) -> None:
    for base, folder in bases.items():
        with pytest.raises(SystemExit) as ended:
            cli.main(["convert", str(folder), "--groups", "2", "-o", str(tmp_path / base)])
        assert not ended.value.code


@pytest.mark.parametrize(
    "values",
    [
        {"num_hidden_layers": 10**9},
        {"num_attention_heads": 10**9, "num_key_value_heads": 10**9},
        {"num_key_value_heads": 10**9},
        {"text_config": {"num_hidden_layers": 10**12}},
        {"num_hidden_layers": float("inf")},
    ],
)
def test_absurd_numbers_are_refused_at_once(values: dict[str, Any], bases: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(bases["single"], tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps({**config, **values}))
    said = io.StringIO()
    with contextlib.redirect_stderr(said), _time_limit(), pytest.raises(SystemExit) as ended:
        cli.main(["convert", str(tmp_path / "m"), "--groups", "2", "-o", str(tmp_path / "out")])
    assert ended.value.code == 1
    assert "which no model has" in said.getvalue()
