"""Slow planes share one map in ``folded``: exact where folding was exact, closer where it was not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from headfold.checkpoint.source import Checkpoint
from headfold.convert import folding
from headfold.convert.calibrated import Calibration, convert_calibrated, read_text
from headfold.convert.damage import lost_shares
from headfold.convert.energy import rotary_rows
from headfold.convert.families import find_family
from headfold.convert.folding import folded
from headfold.convert.heads import Attention, Rotary
from headfold.convert.methods import MethodContext
from headfold.convert.run import plan_conversion, run_plan
from headfold.convert.statistics import Statistics
from safetensors.torch import load_file, save_file
from tiny import tiny_model

X_TC = torch.randn(9, 24, generator=torch.Generator().manual_seed(11))
ALL, SOME = 3, 13
"""Reaches at which all planes of the test block are slow, and the two (of four) slowest."""


def known(layout: str, dim: int) -> Rotary:
    """The angles with which conftest.py turns."""
    return Rotary(layout, dim, tuple(100.0 ** (-plane / (dim // 2)) for plane in range(dim // 2)))


@pytest.mark.parametrize("reach", [ALL, SOME])
@pytest.mark.parametrize("biases", [False, True], ids=["plain", "biases"])
@pytest.mark.parametrize("kv_heads", [8, 4], ids=["mha", "gqa"])
@pytest.mark.parametrize("rotary", [known(kind, dim) for kind in ("half", "interleaved") for dim in (8, 4)], ids=str)
def test_equal_up_to_basis_stays_exact(
    rotary, kv_heads, biases, reach, make_attention, make_equal, make_moment, output_of, monkeypatch
) -> None:
    attention = make_equal(make_attention(8, kv_heads, rotary=rotary, biases=biases), groups=2)
    context = MethodContext(0, second_moment=make_moment(), reach=reach)
    slow = len(rotary_rows(rotary, 8, reach).angles_S)
    assert slow == (rotary.dim // 2 if reach == ALL else rotary.dim // 4)
    expected = output_of(attention, X_TC)
    torch.testing.assert_close(output_of(folded(attention, 2, context), X_TC), expected, atol=1e-5, rtol=1e-5)
    monkeypatch.setattr(folding, "_turning_basis", lambda vectors, angles: torch.eye(vectors.shape[-1]).double())
    anyhow = (output_of(folded(attention, 2, context), X_TC) - expected).abs().max()
    assert slow == 1 or anyhow > 0.01, "the control must fail"


def test_unrelated_heads_lose_less(make_attention, make_moment, output_of) -> None:
    errors, shares = {0: 0.0, SOME: 0.0}, {0: 0.0, SOME: 0.0}
    for seed in range(6):
        attention, moment = make_attention(8, 8, rotary=known("half", 8), seed=seed), make_moment(seed=seed)
        attention = replace(attention, v_KDC=attention.v_KDC[:1].repeat(8, 1, 1))  # what is lost is of K alone
        for reach in errors:
            converted = folded(attention, 2, MethodContext(0, second_moment=moment, reach=reach))
            errors[reach] += float((output_of(converted, X_TC) - output_of(attention, X_TC)).square().sum())
            shares[reach] += lost_shares(attention, converted, moment, SOME)[0]
    assert errors[SOME] < 0.95 * errors[0]
    assert shares[SOME] < 0.95 * shares[0]


def test_planes_whose_angles_are_unknown_or_zero_and_normed_keys(make_attention, make_moment) -> None:
    moment = make_moment()

    def keys(attention: Attention, reach: int) -> torch.Tensor:
        return folded(attention, 2, MethodContext(0, second_moment=moment, reach=reach)).k_KDC

    attention = make_attention(8, 8, rotary=known("half", 8))
    assert not torch.equal(keys(attention, ALL), keys(attention, 0))
    for other in (replace(attention, rotary=Rotary("half", 8)), replace(attention, keys_normed=True)):
        assert torch.equal(keys(other, ALL), keys(other, 0))
    still = rotary_rows(Rotary("half", 8, (1.0, 0.1, 0.0, 0.0)), 8, ALL)
    assert still.passing_P.tolist() == [0, 1, 4, 5]
    assert still.first_F.tolist() == [2, 3]
    assert rotary_rows(Rotary("half", 8, (0.1, 1.0, 0.2, 9.0)), 8, ALL).angles_S.tolist() == [1.0, 0.2, 0.1]


def test_angles_are_those_of_the_class(tmp_path: Path) -> None:
    scaled = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}
    found = {}
    for name, model_type, over in (
        ("plain", "llama", {}),
        ("scaled", "llama", {"rope_parameters": scaled}),
        ("partial", "stablelm", {"partial_rotary_factor": 0.25}),
        ("kinds", "gemma3_text", {}),
    ):
        model = tiny_model(model_type, 4, 4, **over)
        model.save_pretrained(tmp_path / name)
        found[name] = find_family(Checkpoint.open(tmp_path / name), 2).blocks[0].rotary
    planes = torch.arange(8) / 8
    assert found["plain"].angles == pytest.approx((1e4**-planes).tolist(), rel=1e-4)
    assert found["scaled"].angles == pytest.approx((5e5**-planes / 4).tolist(), rel=1e-4)
    assert found["partial"].angles == pytest.approx([1.0, 1e-2], rel=1e-4)
    thetas = {kind["rope_theta"] for kind in model.config.rope_parameters.values()}
    assert len(thetas) == 2, "the control"
    assert found["kinds"].angles == pytest.approx((float(min(thetas)) ** -planes).tolist(), rel=1e-4)


def test_the_blocks_of_the_text_say_how_far_heads_reach(tiny_checkpoint, text_file, tmp_path) -> None:
    plan = plan_conversion(tiny_checkpoint, groups=1, method="folded")
    file, unsaid = tmp_path / "moments.safetensors", tmp_path / "unsaid.safetensors"
    convert_calibrated(plan, tmp_path / "out", Calibration(str(text_file), 2048, 32, 0, file))
    statistics = Statistics.open(file)
    assert statistics.reach == 32
    kept = {key: value for key, value in statistics.metadata.items() if key not in ("block", "reach")}
    save_file(load_file(file), unsaid, {**kept, "kind": "headfold statistics 1"})
    assert Statistics.open(unsaid).reach == 0
    run_plan(plan, tmp_path / "other", statistics=Statistics.open(unsaid))
    made, other = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "other"))
    different = {name.split(".")[-2] for name in made if not torch.equal(made[name], other[name])}
    assert different == {"q_proj", "k_proj"}


def test_without_a_length_of_blocks_it_is_the_context_of_the_model(tiny_checkpoint, text_file) -> None:
    reaches = {}
    for context in (64, 1024):
        source = Checkpoint.open(tiny_checkpoint)
        source.config["max_position_embeddings"] = context
        for block in (None, 16):
            text = read_text(source, Calibration(str(text_file), 1024, block), False)
            assert text.blocks_NT.shape[1] == (block or 512)
            reaches[context, block] = text.reach
            assert text.describe()["reach"] == str(text.reach)
    assert reaches == {(64, None): 512, (1024, None): 1024, (64, 16): 16, (1024, 16): 16}
