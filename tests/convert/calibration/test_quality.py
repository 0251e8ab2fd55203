"""The change of quality by a conversion: measured on text that nothing else reads, and told where it is not."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from headfold import cli
from headfold.checkpoint.load import load_language_model
from headfold.checkpoint.record import last_entry
from headfold.convert.calibration import held_out, offload
from headfold.convert.calibration.encoder_decoder import cut_spans
from headfold.convert.calibration.held_out import HeldOutText, loss_per_token
from headfold.convert.calibration.text import _read_blocks, token_blocks
from headfold.convert.methods.table import METHODS
from headfold.convert.refinement import refine
from headfold.convert.run import convert_checkpoint, plan_conversion
from headfold.corpus import Corpus, Document, Encoder, open_corpus
from tiny import repeat_kv_heads, tiny_model
from torch import Tensor
from torch.nn import functional
from transformers import AutoTokenizer


class _Letters:
    """A tokenizer whose token ids are character codes; 0 ends a document."""

    bos_token_id, eos_token_id = None, 0

    def __call__(self, text: str, verbose: bool) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}


def _corpus(*lengths: int) -> Corpus:
    """Documents of so many tokens, the end included; each of one letter."""
    documents = [Document(str(place), chr(100 + place) * (length - 1)) for place, length in enumerate(lengths)]
    return Corpus("here", "1", lambda: iter(documents))


def _blocks(corpus: Corpus, tokens: int, length: int) -> tuple[Tensor, Tensor | None]:
    return _read_blocks(corpus, Encoder(_Letters()), tokens, length, held_out=True)


@pytest.mark.parametrize(
    ("tokens", "length", "shape"),
    [
        (640, 10, (4, 10)),
        (1280, 10, (8, 10)),
        (131072, 512, (16, 512)),
        (1 << 20, 512, (16, 512)),
        (131072, 4096, (4, 2048)),
        (40, 10, (4, 10)),
    ],
)
def test_text_that_suffices_is_calibrated_on_as_before_and_more_is_held_out(
    tokens: int, length: int, shape: tuple[int, int]
) -> None:
    corpus = _corpus(tokens + 7, *[length] * 10, 20000)
    calibrated, held = _blocks(corpus, tokens, length)
    assert torch.equal(calibrated, token_blocks(corpus, _Letters(), tokens=tokens, sequence_length=length))
    assert held is not None
    assert held.shape == shape
    # It starts with the next document: none of the first one is in it.
    assert (held != 100).all()
    assert held[0, 0] == 101


def test_one_long_document_gives_both_parts() -> None:
    calibrated, held = _blocks(_corpus(1000), 640, 10)
    assert held is not None
    assert (calibrated.numel(), held.shape) == (640, (4, 10))
    assert held[-1, -1] == 0  # the end of the text


@pytest.mark.parametrize(("available", "calibrated"), [(660, 620), (500, 460), (320, 280)])
def test_a_short_text_gives_up_its_end(available: int, calibrated: int) -> None:
    corpus = Corpus("here", "1", lambda: iter([Document("a", "".join(map(chr, range(1000, 1000 + available - 1))))]))
    kept, held = _blocks(corpus, 640, 10)
    assert held is not None
    assert (kept.numel(), held.shape) == (calibrated, (4, 10))
    assert not set(kept.flatten().tolist()) & set(held.flatten().tolist())


@pytest.mark.parametrize("available", [10, 100, 319])
def test_too_little_text_is_all_calibrated_on(available: int) -> None:
    kept, held = _blocks(_corpus(available), 640, 10)
    assert held is None
    assert kept.numel() == available // 10 * 10


def _whole_loss(model: Any, text: HeldOutText) -> float:
    """Compute the loss from all logits at once."""
    with torch.no_grad():
        if text.read_BS is None:
            logits = model(input_ids=text.written_BT).logits[:, :-1]
            targets = text.written_BT[:, 1:]
        else:
            logits = model(input_ids=text.read_BS, labels=text.written_BT).logits
            targets = text.written_BT
    return float(functional.cross_entropy(logits.double().flatten(0, 1), targets.flatten()))


IDS = torch.randint(5, 200, (6, 16), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize(
    ("model_type", "over"),
    [("llama", {}), ("gemma2", {"final_logit_softcapping": 2.0}), ("cohere", {"logit_scale": 0.25}), ("gpt2", {})],
)
def test_the_loss_is_that_of_the_whole_model(
    model_type: str, over: dict[str, Any], split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads that cap or scale their logits, slices of three tokens, and models that cannot be split."""
    model = tiny_model(model_type, **over).eval()
    monkeypatch.setattr(held_out, "_LOGITS_BYTES", 3 * 4 * model.config.vocab_size)
    if not split:
        monkeypatch.setattr(held_out, "separable_backbone", lambda *_: None)
    text = HeldOutText(IDS)
    found = loss_per_token(model, text, device="cpu", batch_tokens=32)
    assert found == pytest.approx(_whole_loss(model, text), abs=1e-5)
    assert text.scored == 90


def test_the_loss_of_an_encoder_decoder_is_that_of_its_targets(tiny_t5: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_language_model(tiny_t5).eval()
    ids = torch.randint(3, 11, (6, 16), generator=torch.Generator().manual_seed(5))
    read, written = cut_spans(ids, AutoTokenizer.from_pretrained(tiny_t5))
    monkeypatch.setattr(held_out, "_LOGITS_BYTES", 3 * 4 * 31)
    text = HeldOutText(written, read)
    assert text.scored == written.numel()
    assert loss_per_token(model, text, device="cpu") == pytest.approx(_whole_loss(model, text), abs=1e-5)


def test_weights_left_on_disk_give_the_same_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama").eval()
    model.save_pretrained(tmp_path / "m", max_shard_size="20KB")
    expected = loss_per_token(model, HeldOutText(IDS), device="cpu")
    monkeypatch.setattr(offload, "_IN_MEMORY_SHARE", 0.0)
    monkeypatch.setattr(held_out, "_LOGITS_BYTES", 3 * 4 * model.config.vocab_size)
    on_disk = offload.load_or_offload(tmp_path / "m", 1, tmp_path / "scratch").eval()
    assert loss_per_token(on_disk, HeldOutText(IDS), device="cpu") == pytest.approx(expected, abs=1e-6)
    assert all(parameter.is_meta for parameter in on_disk.parameters())


@pytest.fixture
def fields(text_file: Path) -> dict[str, Any]:
    return {"calibration": str(text_file), "calibration_tokens": 2048, "sequence_length": 32}


def _quality(folder: Path) -> dict[str, Any]:
    entry = last_entry(folder, "convert")
    assert entry is not None
    found: dict[str, Any] = entry["quality"]
    return found


@pytest.mark.parametrize(("steps", "stages"), [(0, ["source", "converted"]), (3, ["source", "converted", "refined"])])
def test_the_change_is_measured_said_and_kept(
    steps: int, stages: list[str], fields: dict, tiny_checkpoint: Path, tmp_path: Path, capfd: Any
) -> None:
    out = convert_checkpoint(tiny_checkpoint, tmp_path / "out", groups=1, refine=steps, **fields)
    found = _quality(out)
    assert found["kind"] == "measured"
    assert list(found["perplexity"]) == list(found["nats_per_token"]) == stages
    assert (found["text"]["tokens"], found["text"]["sequences"], found["text"]["scored_tokens"]) == (128, 4, 124)
    corpus, tokenizer = open_corpus(fields["calibration"]), AutoTokenizer.from_pretrained(tiny_checkpoint)
    _, held = _read_blocks(corpus, Encoder(tokenizer), 2048, 32, held_out=True)
    assert held is not None
    for folder, stage in ((tiny_checkpoint, "source"), (out, stages[-1])):
        loss = _whole_loss(load_language_model(folder).eval(), HeldOutText(held))
        assert found["nats_per_token"][stage] == pytest.approx(loss, abs=1e-3)
        assert found["perplexity"][stage] == pytest.approx(math.exp(loss), rel=1e-3)
    said = " ".join(capfd.readouterr().err.split())
    assert "Perplexity on 128 held-out tokens of" in said
    assert all(f"{found['perplexity'][stage]:,.2f} {stage}" in said for stage in stages)
    assert "a rough figure, without an interval" in said
    assert found["summary"] in " ".join((out / "README.md").read_text().split())


def test_refinement_that_was_killed_gives_the_same_figures(
    fields: dict, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    fits, original = [], refine.fit_projections

    def fit(*arguments: Any) -> Any:
        fits.append(1)
        if len(fits) == 2:
            raise Killed
        return original(*arguments)

    monkeypatch.setattr(refine, "fit_projections", fit)
    with pytest.raises(Killed):
        convert_checkpoint(tiny_checkpoint, tmp_path / "out", groups=1, refine=3, **fields)
    again = convert_checkpoint(tiny_checkpoint, tmp_path / "out", groups=1, refine=3, **fields)
    whole = convert_checkpoint(tiny_checkpoint, tmp_path / "whole", groups=1, refine=3, **fields)
    assert _quality(again) == _quality(whole)


def test_an_encoder_decoder_is_measured_on_its_targets(tiny_t5: Path, fields: dict, tmp_path: Path, capfd: Any) -> None:
    out = convert_checkpoint(tiny_t5, tmp_path / "out", groups=1, **fields)
    assert list(_quality(out)["perplexity"]) == ["source", "converted"]
    assert "Perplexity of targets, spans cut out of the text, on 128" in " ".join(capfd.readouterr().err.split())


def test_too_little_text_is_said_and_nothing_measured(
    tiny_checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "short.txt").write_text("alpha beta gamma delta " * 40)
    short = {"calibration": str(tmp_path / "short.txt"), "sequence_length": 32, "refine": 0}
    out = convert_checkpoint(tiny_checkpoint, tmp_path / "out", groups=1, **short)
    assert (_quality(out)["kind"], _quality(out)["perplexity"]) == ("unknown", {})
    assert "gives too few tokens to hold any out" in " ".join(capfd.readouterr().err.split())


def test_statistics_without_text_are_said_to_measure_nothing(
    tiny_checkpoint: Path, fields: dict, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "moments.safetensors"
    convert_checkpoint(tiny_checkpoint, tmp_path / "first", groups=1, refine=0, statistics=file, **fields)
    capfd.readouterr()
    out = convert_checkpoint(tiny_checkpoint, tmp_path / "out", groups=1, statistics=file)
    assert _quality(out)["kind"] == "unknown"
    assert "Nothing was measured:" in " ".join(capfd.readouterr().err.split())
    both = convert_checkpoint(tiny_checkpoint, tmp_path / "both", groups=1, refine=0, statistics=file, **fields)
    assert _quality(both)["kind"] == "measured"


@pytest.mark.parametrize("method", METHODS)
def test_a_merge_without_text_is_not_called_a_model(
    method: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """`--groups 1` without text took a real model from perplexity 25 to 33,738, and printed a path."""
    tiny_model("llama", 4, 4).save_pretrained(tmp_path / "m")
    out = convert_checkpoint(tmp_path / "m", tmp_path / "out", groups=1, method=method)
    said, found = " ".join(capfd.readouterr().err.split()), _quality(out)
    assert METHODS[method].without_text in found["summary"]
    assert "not a usable model" in found["summary"]
    assert f"warning: {found['summary']} {found['advice']}" in said
    assert "--calibration TEXT" in found["advice"]
    card = " ".join((out / "README.md").read_text().split())
    assert found["summary"] in card
    assert found["advice"] not in card  # it is for the one who converts


@pytest.mark.parametrize(
    ("model_type", "over", "advice"),
    [
        ("t5", {}, "Uptrain it."),
        ("olmo2", {}, "method folded"),
        ("qwen3_next", {}, "--refine 200"),
    ],
)
def test_the_advice_is_one_that_the_model_can_follow(
    model_type: str, over: dict, advice: str, tiny_t5: Path, tmp_path: Path
) -> None:
    source = tiny_t5
    if model_type != "t5":
        source = tmp_path / "m"
        tiny_model(model_type, 4, 4, **over).save_pretrained(source)
    plan = plan_conversion(source, groups=1, method="mean")
    possible = all(layer.rewrite_obstacle is None for layer in plan.family.layers)
    assert possible == (model_type != "qwen3_next")
    assert advice in plan.without_text.advice


def _convert_equal(folder: Path, *, tile: bool = False, model_type: str = "llama", **options: Any) -> dict[str, Any]:
    repeat_kv_heads(tiny_model(model_type, 4, 2), 4, tile=tile).save_pretrained(folder / "m")
    return _quality(convert_checkpoint(folder / "m", folder / "out", groups=2, **options))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"method": "first"},
        {"method": "folded"},
        {"method": "aligned"},
        {"model_type": "qwen3"},
        {"model_type": "phi3"},
        {"tile": True, "grouping": "similarity"},
        {"tile": True, "method": "folded", "grouping": "similarity"},
    ],
    ids=str,
)
def test_equal_heads_are_merged_exactly_and_nothing_is_warned_of(options: dict, tmp_path: Path, capfd: Any) -> None:
    found = _convert_equal(tmp_path, **options)
    assert (found["kind"], "heads of each group are equal" in found["summary"]) == ("exact", True)
    assert "warning" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "options", [{"method": "random"}, {"tile": True}, {"tile": True, "method": "folded", "grouping": "contiguous"}]
)
def test_control_what_is_not_exact_is_not_called_so(options: dict, tmp_path: Path) -> None:
    assert _convert_equal(tmp_path, **options)["kind"] == "unknown"


def test_one_layer_with_other_heads_makes_the_merge_inexact(tmp_path: Path) -> None:
    model = repeat_kv_heads(tiny_model("llama", 4, 2), 4)
    model.model.layers[1].self_attn.v_proj.weight.data[0, 0] += 1e-6
    model.save_pretrained(tmp_path / "m")
    assert _quality(convert_checkpoint(tmp_path / "m", tmp_path / "out", groups=2))["kind"] == "unknown"


def test_as_many_groups_as_heads_are_exact(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tiny_model("llama", 4, 4).save_pretrained(tmp_path / "m")
    out = convert_checkpoint(tmp_path / "m", tmp_path / "out", groups=4)
    assert _quality(out)["kind"] == "exact"
    assert "Nothing was measured" not in capfd.readouterr().err


def test_a_caller_who_measures_pays_for_no_measurement(
    tiny_checkpoint: Path, fields: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setattr("headfold.convert.calibration.quality.loss_per_token", None)
    out = convert_checkpoint(tiny_checkpoint, tmp_path / "out", groups=1, refine=0, measure=False, **fields)
    assert _quality(out)["summary"] == "Nothing was measured."
    assert "measured" not in capfd.readouterr().err


def test_a_dry_run_says_it_before(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tiny_model("llama", 4, 4).save_pretrained(tmp_path / "m")
    with pytest.raises(SystemExit) as ended:
        cli.main(["convert", str(tmp_path / "m"), "--groups", "1", "-o", str(tmp_path / "out"), "--dry-run"])
    assert not ended.value.code
    assert "not a usable model" in " ".join(capfd.readouterr().err.split())
