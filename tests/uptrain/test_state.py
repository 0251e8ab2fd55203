"""Saves of an earlier version of headfold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from headfold.errors import UsageError
from headfold.uptrain.run import uptrain_checkpoint
from runs import same, weights

OLD_NAMES = {"sequence_length": "block", "max_grad_norm": "clip", "save_total_limit": "keep"}


def age(save: Path, **changes) -> None:
    """Write the marker of a save as the version before the renaming did."""
    marker = save / "complete.json"
    content = json.loads(marker.read_text())
    content["settings"] = {OLD_NAMES.get(name, name): value for name, value in content["settings"].items()}
    assert set(OLD_NAMES.values()) <= content["settings"].keys()
    content["settings"].update(changes)
    content["adjusted"] = [{"step": 2, "clip": [2.0, 1.0]}]
    marker.write_text(json.dumps(content))


def test_a_killed_run_of_the_version_with_other_setting_names_resumes(
    finished, tiny_checkpoint, settings, text_file, tmp_path, cut_power
):
    """The result has the bits of a run that was never stopped, and its record has the new names."""
    wanted, out = settings(eval_data=str(text_file), eval_tokens=400, eval_every=6), tmp_path / "out"
    cut_power(7, tiny_checkpoint, out, wanted)
    age(tmp_path / "out.training" / "step-00000005", keep=7)  # the number of saves may change
    assert same(weights(uptrain_checkpoint(tiny_checkpoint, out, wanted)), weights(finished))
    entry = json.loads((out / "headfold.json").read_text())["history"][-1]
    assert entry["adjusted"] == [{"step": 2, "max_grad_norm": [2.0, 1.0]}]


def test_a_setting_of_another_value_is_noticed_by_its_old_name(tiny_checkpoint, settings, tmp_path, cut_power):
    cut_power(6, tiny_checkpoint, tmp_path / "out", settings())
    age(tmp_path / "out.training" / "step-00000005", block=32)
    with pytest.raises(UsageError, match="sequence_length was 32 and is now 16"):
        uptrain_checkpoint(tiny_checkpoint, tmp_path / "out", settings())
