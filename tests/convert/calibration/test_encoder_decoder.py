"""Calibration of encoder-decoders: cross-attention has two inputs, and both second moments count."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrated import calibration_text, convert_calibrated, with_text
from headfold import cli
from headfold.checkpoint.load import load_language_model
from headfold.checkpoint.record import last_entry
from headfold.convert.calibration.calibrate import calibrate
from headfold.convert.calibration.encoder_decoder import cut_spans
from headfold.convert.calibration.statistics import Statistics
from headfold.convert.family.rotary import Rotary
from headfold.convert.inspect import predict_loss
from headfold.convert.methods.moments import rotary_rows, score_energy, with_moments
from headfold.convert.run import plan_conversion
from headfold.errors import UnsupportedError, UsageError
from safetensors.torch import load_file, save_file
from torch import Tensor

BLOCK = 24


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory, word_tokenizer: Any) -> Path:
    words = [word for word in word_tokenizer.get_vocab() if not word.startswith("<")]
    order = torch.randint(0, len(words), (60, 40), generator=torch.Generator().manual_seed(5)).tolist()
    file = tmp_path_factory.mktemp("text") / "words.txt"
    file.write_text("\n\n".join(" ".join(words[number] for number in line) for line in order))
    return file


def moment(states: Tensor) -> Tensor:
    """Compute E[x xᵀ], with a constant 1 as last index of x."""
    x_NC = states.flatten(0, -2).double()
    x_NE = torch.cat([x_NC, torch.ones(len(x_NC), 1)], 1)
    return x_NE.T @ x_NE / len(x_NE)


def test_each_attention_layer_gets_the_moments_of_its_own_inputs(tiny_t5: Path, text: Path, tmp_path: Path) -> None:
    plan = plan_conversion(tiny_t5, groups=2, method="folded", encoder=True)
    calibration = calibration_text(str(text), 400, sequence_length=BLOCK, statistics=tmp_path / "statistics")
    found = calibrate(plan.source, plan.family.layers, with_text(plan, calibration).settings)
    modules = [block.module for block in plan.family.layers]
    assert len(modules) == 2 + 4
    assert found.layers == 6

    model = load_language_model(tiny_t5).eval()
    text_BT = torch.load(_ids(calibration, tiny_t5, tmp_path))
    sources, targets = cut_spans(text_BT, _tokenizer(tiny_t5))
    decoder_ids = model.prepare_decoder_input_ids_from_labels(targets)
    inputs: dict[str, Tensor] = {}
    cross = model.decoder.block[1].layer[1]
    cross.layer_norm.register_forward_hook(lambda module, args, made: inputs.update(queries=made))
    with torch.no_grad():
        read = model.encoder(input_ids=sources).last_hidden_state
        model(input_ids=sources, decoder_input_ids=decoder_ids)
        first = model.decoder.block[0].layer[0].layer_norm(model.shared(decoder_ids))
    for layer, name in enumerate(modules):
        held = found.second_moment(layer)
        if name == "decoder.block.0.layer.0.SelfAttention":
            torch.testing.assert_close(held, moment(first), atol=1e-5, rtol=1e-4)
        elif "EncDecAttention" in name:
            torch.testing.assert_close(held[0], moment(read), atol=1e-5, rtol=1e-4)
        if name == "decoder.block.1.layer.1.EncDecAttention":
            torch.testing.assert_close(held[1], moment(inputs["queries"]), atol=1e-5, rtol=1e-4)
            assert (held[1] - held[0]).abs().max() > 0.1, "the control must differ"


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def _ids(calibration: dict, folder: Path, scratch: Path) -> Path:
    """Save the token ids that calibration reads to a file."""
    from headfold.convert.calibration.text import read_text
    from headfold.convert.run import Checkpoint
    from headfold.convert.settings import ConvertSettings

    found = read_text(Checkpoint.open(folder), ConvertSettings(groups=2, **calibration), trust_remote_code=False)
    assert found is not None
    torch.save(found.ids_BT, scratch / "ids.pt")
    return scratch / "ids.pt"


def test_score_energy_uses_the_moments_of_both_inputs(make_attention: Any) -> None:
    attention = make_attention(4, 4, rotary=Rotary("none", 0))
    numbers = torch.Generator().manual_seed(4)
    width = attention.q_HDC.shape[-1]
    written, read = (
        torch.randn(50, width, generator=numbers) * torch.rand(width, generator=numbers) + 0.3 for _ in "qk"
    )
    both = torch.stack([moment(read), moment(written)])
    rows = rotary_rows(attention.rotary, attention.k_KDC.shape[1])

    def energy(second_moment: Tensor) -> Tensor:
        layer = with_moments(attention, second_moment)
        return score_energy(layer, rows, layer.q_HDE, layer.k_KDE)

    q = torch.einsum("nc,hdc->hnd", written - written.mean(0), attention.q_HDC)
    k = torch.einsum("nc,hdc->hnd", read - read.mean(0), attention.k_KDC)
    expected = (q @ k.mT).square().mean((1, 2)).double()
    torch.testing.assert_close(energy(both), expected, rtol=1e-3, atol=1e-5)
    assert ((energy(both[0]) - expected).abs() > 0.1 * expected).any(), "one moment for both must be noticed"


def _with_turned_heads(source: Path, folder: Path) -> Path:
    """The decoder's heads 1 and 3 as heads 0 and 2 in another basis, in keys and in values."""
    shutil.copytree(source, folder)
    numbers, tensors = torch.Generator().manual_seed(3), load_file(folder / "model.safetensors")
    for name in [name for name in tensors if "decoder" in name and name.endswith((".k.weight", ".v.weight"))]:
        heads = tensors[name].unflatten(0, (4, -1)).clone()
        for head in (1, 3):
            heads[head] = torch.linalg.qr(torch.randn(8, 8, generator=numbers))[0] @ heads[head - 1]
        tensors[name] = heads.flatten(0, 1).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def logits(folder: Path) -> Tensor:
    model = load_language_model(folder).eval()
    ids = torch.randint(3, 20, (3, 12), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        return model(input_ids=ids, decoder_input_ids=ids[:, 5:]).logits


@pytest.mark.parametrize("method", ["aligned", "folded"])
def test_with_text_heads_equal_up_to_a_turn_merge_exactly(
    method: str, tiny_t5: Path, text: Path, tmp_path: Path
) -> None:
    source = _with_turned_heads(tiny_t5, tmp_path / "source")
    plan = plan_conversion(source, groups=2, method=method, grouping=None)
    kept = tmp_path / "statistics"
    out = convert_calibrated(
        plan, tmp_path / "out", calibration_text(str(text), 400, sequence_length=BLOCK, statistics=kept)
    )
    expected = logits(source)
    torch.testing.assert_close(logits(out), expected, rtol=1e-3, atol=2e-4 * expected.abs().max().item())
    assert Statistics.open(kept).layers == 4
    damage = list(predict_loss(source, [2, 1], kept))
    assert all((one.total < 1e-3) == (one.groups == 2) for one in damage)
    again = convert_calibrated(plan, tmp_path / "again", calibration_text(None, statistics=kept))
    assert (again / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()


def test_the_command_calibrates_and_converts_the_encoder(
    tiny_t5: Path, text: Path, tmp_path: Path, capsys: Any
) -> None:
    options = [
        "--groups",
        "2",
        "--encoder",
        "--calibration",
        str(text),
        "--calibration-tokens",
        "400",
        "--sequence-length",
        "24",
    ]
    for last in (["--dry-run"], []):
        with pytest.raises(SystemExit) as ended:
            cli.main(["convert", str(tiny_t5), *options, "-o", str(tmp_path / "out"), *last])
        assert not ended.value.code
        told = capsys.readouterr()
        assert "headfold_t5" in told.out + told.err
        assert "trust_remote_code=True" in (told.out + told.err).replace("\n", " ")
        assert (tmp_path / "out").exists() == (not last)
    entry = last_entry(tmp_path / "out", "convert")
    assert entry is not None
    assert (entry["method"], entry["grouping"], entry["encoder_converted"]) == ("folded", "contiguous", True)
    assert entry["statistics"]["sequence_length"] == "24"
    assert entry["refinement"] is None
    config = load_language_model(tmp_path / "out").config
    assert config.num_key_value_heads == config.encoder_num_key_value_heads == 2


def test_what_cannot_be_calibrated_or_refined_is_refused(tiny_t5: Path, text: Path, tmp_path: Path) -> None:
    plan = plan_conversion(tiny_t5, groups=2, method="folded")
    with pytest.raises(UnsupportedError, match="Refinement is not offered for encoder-decoders"):
        convert_calibrated(plan, tmp_path / "out", calibration_text(str(text), 400, sequence_length=BLOCK, refine=10))
    for tokens, why in ((600, "sentinels"), (1, "too few")):
        with pytest.raises(UsageError, match=why):
            cut_spans(torch.zeros(1, tokens, dtype=torch.long), _tokenizer(tiny_t5))
    tokenizer = _tokenizer(tiny_t5)
    tokenizer.get_vocab = lambda: {"<mask>": 0}
    with pytest.raises(UnsupportedError, match="no sentinels") as caught:
        cut_spans(torch.zeros(1, 24, dtype=torch.long), tokenizer)
    assert "--calibration" in str(caught.value.hint)
    assert not (tmp_path / "out").exists()
