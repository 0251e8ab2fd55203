"""Converting types without a KV-head setting: equal heads merge exactly by every route, and the result is whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrated import calibration_text, convert_calibrated
from headfold.checkpoint.load import load_language_model
from headfold.checkpoint.record import last_entry
from headfold.checkpoint.source import Checkpoint
from headfold.convert.family.model_type import ModelType
from headfold.convert.inspect import inspect_checkpoint, predict_loss
from headfold.convert.rewrites.routes import ROWS, route_of
from headfold.convert.run import convert_checkpoint, plan_conversion
from headfold.errors import CheckpointError, UnsupportedError, UsageError
from tiny import logits_of, tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoTokenizer, GPT2Tokenizer, GPTNeoXTokenizer, PreTrainedTokenizerFast

HEADS = 4
OWN = "headfold_decoder"
OLD_FALCON = {"new_decoder_architecture": False, "multi_query": False}
ROUTES: dict[str, tuple[str, dict[str, Any], str, int]] = {
    "pythia": ("gpt_neox", {}, "phi", 2),
    "redpajama": ("gpt_neox", {"use_parallel_residual": False}, "nemotron", 2),
    "gptj": ("gptj", {"rotary_dim": 8}, "phi", 2),
    "codegen": ("codegen", {"rotary_dim": 8}, "phi", 1),
    "gpt2": ("gpt2", {}, "gpt_bigcode", 1),
    "opt": ("opt", {"word_embed_proj_dim": 64}, "gpt_bigcode", 1),
    "falcon-rw": ("falcon", {**OLD_FALCON, "alibi": True, "parallel_attn": False, "bias": True}, "falcon", 1),
    "falcon-rotary": ("falcon", OLD_FALCON, "falcon", 1),
    "bigcode": ("gpt_bigcode", {"multi_query": False}, "gpt_bigcode", 1),
    "gpt2-two": ("gpt2", {}, OWN, 2),
    "opt-two": ("opt", {"word_embed_proj_dim": 64}, OWN, 2),
    "opt-350m": ("opt", {"word_embed_proj_dim": 32, "do_layer_norm_before": False}, OWN, 1),
    "gpt_neo": ("gpt_neo", {"attention_types": [[["global", "local"], 1]], "window_size": 4}, OWN, 2),
    "bloom": ("bloom", {}, OWN, 2),
    "mpt": ("mpt", {}, OWN, 2),
}
"""Name → source type, what is unusual about it, type of the result, number of groups to try."""
ALL = pytest.mark.parametrize("route", ROUTES)


def _keys_and_values(model: Any) -> Iterator[Tensor]:
    """Yield every tensor of keys or of values as (heads, …), sharing its memory with the model."""
    for name, tensor in model.named_parameters():
        side = name.split(".")[-2]
        if side in ("k_proj", "v_proj"):
            yield tensor.data.unflatten(0, (HEADS, -1))
        elif side == "c_attn" and model.config.model_type == "gpt2":
            columns = tensor.data.unflatten(-1, (3, HEADS, -1)).movedim((-3, -2), (0, 1))
            yield from (columns[1], columns[2])
        elif side == "Wqkv":
            yield from tensor.data.unflatten(0, (3, HEADS, -1))[1:]
        elif side in ("query_key_value", "c_attn", "qkv_proj"):  # with 4 heads, CodeGen's 4 shards hold one each
            heads = tensor.data.unflatten(0, (HEADS, 3, -1))
            yield from (heads[:, 1], heads[:, 2])


def with_equal_heads(route: str, *, tile: bool = False) -> Any:
    """Build the route's source with equal heads in each group. ``tile`` makes heads h and h + G equal instead."""
    model_type, over, _, groups = ROUTES[route]
    model = tiny_model(model_type, HEADS, **over)
    changed = 0
    for heads in _keys_and_values(model):
        for head in range(HEADS):
            heads[head] = heads[head % groups if tile else head - head % (HEADS // groups)].clone()
        changed += 1
    assert changed >= 4
    return model


def _convert(model: Any, route: str, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder / "source")
    return convert_checkpoint(folder / "source", folder / "out", groups=ROUTES[route][3], **options)


def difference(model: Any, other: Any) -> float:
    mine, theirs = logits_of(model), logits_of(other)
    return ((mine - theirs).abs().max() / mine.abs().max()).item()


def test_every_route_is_tried() -> None:
    assert set(ROWS) <= {model_type for model_type, _, _, _ in ROUTES.values()}


@pytest.mark.parametrize("method", ["mean", "first", "aligned", "folded"])
@ALL
def test_equal_heads_merge_exactly(route: str, method: str, tmp_path: Path) -> None:
    model = with_equal_heads(route)
    made = load_language_model(_convert(model, route, tmp_path, method=method)).eval()
    assert made.config.model_type == ROUTES[route][2]
    assert difference(model, made) < (1e-5 if method in ("mean", "first") else 1e-4)


@pytest.mark.parametrize("route", ["pythia", "redpajama", "gptj", "gpt2-two", "bloom", "mpt"])
def test_control_heads_equal_in_the_wrong_order_do_not_merge(route: str, tmp_path: Path) -> None:
    model = with_equal_heads(route, tile=True)
    assert difference(model, load_language_model(_convert(model, route, tmp_path)).eval()) > 1e-2


@ALL
def test_random_keeps_the_queries_and_the_shape(route: str, tmp_path: Path) -> None:
    model = with_equal_heads(route)
    made = load_language_model(_convert(model, route, tmp_path, method="random")).eval()
    assert difference(model, made) > 1e-3
    assert logits_of(made).isfinite().all()


@ALL
def test_generation_with_the_cache_is_generation_without(route: str, tmp_path: Path) -> None:
    model = with_equal_heads(route)
    made = load_language_model(_convert(model, route, tmp_path)).eval()
    ids = torch.tensor([[7, 11, 13, 17, 19, 23], [250, 250, 31, 37, 41, 43]])
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]])
    how = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 250, "eos_token_id": None}
    cached, uncached = (made.generate(ids, use_cache=use, **how) for use in (True, False))
    assert torch.equal(cached, uncached)
    assert torch.equal(cached, model.generate(ids, **how))
    found = made(input_ids=ids[:1], use_cache=True).past_key_values
    assert {layer.keys.shape[1] for layer in found.layers} == {ROUTES[route][3]}


@ALL
def test_saved_again_it_is_the_same(route: str, tmp_path: Path) -> None:
    made = load_language_model(_convert(with_equal_heads(route), route, tmp_path)).eval()
    made.save_pretrained(tmp_path / "again")
    assert torch.equal(logits_of(made), logits_of(load_language_model(tmp_path / "again").eval()))


def test_a_result_of_our_own_type_is_converted_again(tmp_path: Path) -> None:
    model = with_equal_heads("opt-350m")
    model.save_pretrained(tmp_path / "source")
    half = convert_checkpoint(tmp_path / "source", tmp_path / "half", groups=2)
    made = load_language_model(convert_checkpoint(half, tmp_path / "out", groups=1, method="folded")).eval()
    assert (made.config.model_type, made.config.num_key_value_heads) == (OWN, 1)
    assert difference(model, made) < 1e-4


def test_the_record_and_the_dry_run_say_what_becomes_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = with_equal_heads("pythia")
    model.save_pretrained(tmp_path / "source")
    rows = {row[0]: row[1:] for row in plan_conversion(tmp_path / "source", groups=2).describe()}
    assert rows["model type"] == ("gpt_neox", "phi")
    assert rows["KV cache per token"] == ("1.00 KiB", "512 B")
    out = convert_checkpoint(tmp_path / "source", tmp_path / "out", groups=2)
    said = capsys.readouterr().err
    assert "rewritten as phi (PhiForCausalLM)" in said
    assert "llama.cpp refuses it (tried)" in " ".join(said.split())
    entry = last_entry(out, "convert")
    assert entry is not None
    assert (entry["rewrite"]["from"], entry["rewrite"]["class"]) == ("gpt_neox", "PhiForCausalLM")
    assert any("llama.cpp" in fault for fault in entry["serving"]["faults"])
    assert entry["source_digest"] == Checkpoint.open(tmp_path / "source").digest()
    assert (entry["kv_heads_before"], entry["kv_heads"], entry["model_type"]) == (4, 2, "phi")


@pytest.mark.parametrize("route", ["gpt2", "gpt2-two"])
def test_generation_settings_survive_where_config_json_alone_has_them(route: str, tmp_path: Path) -> None:
    source, said = tmp_path / "source", {"forced_eos_token_id": 7, "suppress_tokens": [9], "max_length": 40}
    with_equal_heads(route).save_pretrained(source)
    (source / "generation_config.json").unlink()
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, **said}))
    out = convert_checkpoint(source, tmp_path / "out", groups=ROUTES[route][3])
    before, after = (load_language_model(folder).eval() for folder in (source, out))
    for name, value in said.items():
        assert getattr(before.generation_config, name) == getattr(after.generation_config, name) == value
    written = [model.generate(torch.tensor([[11, 12, 13]]), do_sample=False).tolist() for model in (before, after)]
    assert written[0] == written[1]
    assert written[0][0][-1] == 7


def test_falcon_changes_one_word_of_its_config(tmp_path: Path) -> None:
    out = _convert(with_equal_heads("falcon-rw"), "falcon-rw", tmp_path)
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "source", out))
    assert after == {**before, "multi_query": True}


def test_falcon_heads_with_slopes_of_their_own_are_not_regrouped(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="ALiBi"):
        _convert(with_equal_heads("falcon-rw"), "falcon-rw", tmp_path, method="folded", grouping="similarity")
    assert plan_conversion(tmp_path / "source", groups=1, method="folded", grouping=None).grouping == "contiguous"


@pytest.mark.parametrize(("route", "groups"), [("falcon-rw", 2), ("bigcode", 2), ("gpt2", 3)])
def test_numbers_of_groups_that_no_class_can_have_are_refused(route: str, groups: int, tmp_path: Path) -> None:
    with_equal_heads(route).save_pretrained(tmp_path / "source")
    with pytest.raises(UsageError, match=f"cannot be merged into {groups} groups") as problem:
        convert_checkpoint(tmp_path / "source", tmp_path / "out", groups=groups)
    assert "1" in str(problem.value.hint)
    assert "4" in str(problem.value.hint)
    assert not (tmp_path / "out").exists()


def _save_with_words(model: Any, folder: Path, text: str) -> Path:
    """Save a checkpoint with a tokenizer whose vocabulary is the words of ``text``."""
    model.save_pretrained(folder)
    vocabulary = {word: number for number, word in enumerate(["<eos>", "<unk>", *dict.fromkeys(text.split())])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", unk_token="<unk>").save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "route", ["pythia", "redpajama", "gpt2", "falcon-rw", "gpt2-two", "opt-350m", "gpt_neo", "bloom"]
)
def test_calibration_and_refinement_run_the_source_as_its_new_type(route: str, tmp_path: Path, text_file: Path) -> None:
    """Folding and refining on text comes nearer to the source than the mean, and leaves no other folder behind."""
    model = tiny_model(ROUTES[route][0], HEADS, **ROUTES[route][1])
    words = " ".join(json.loads(line)["text"] for line in text_file.read_text().splitlines())
    source = _save_with_words(model, tmp_path / "source", words)
    groups = ROUTES[route][3]
    plan = plan_conversion(source, groups=groups, method="folded", grouping="contiguous")
    calibration = calibration_text(str(text_file), tokens=2048, sequence_length=32, refine=20)
    folded = load_language_model(convert_calibrated(plan, tmp_path / "folded", calibration)).eval()
    mean = load_language_model(convert_checkpoint(source, tmp_path / "mean", groups=groups)).eval()
    assert difference(model, folded) < difference(model, mean)
    assert {path.name for path in tmp_path.iterdir()} == {"source", "folded", "mean"}


def test_statistics_serve_every_number_of_groups_although_the_types_differ(tmp_path: Path, text_file: Path) -> None:
    """GPT-2 becomes GPTBigCode with one group and our own type with two. Their layers read the same states."""
    words = " ".join(json.loads(line)["text"] for line in text_file.read_text().splitlines())
    source = _save_with_words(tiny_model("gpt2"), tmp_path / "source", words)
    calibration = calibration_text(
        str(text_file), tokens=512, sequence_length=32, refine=0, statistics=tmp_path / "statistics"
    )
    plans = [plan_conversion(source, groups=groups, method="folded") for groups in (2, 1)]
    for plan in plans:
        convert_calibrated(plan, tmp_path / plan.family.model_type, calibration)
    assert [path.is_dir() for path in (tmp_path / OWN, tmp_path / "gpt_bigcode")] == [True, True]
    found = list(predict_loss(source, [4, 2, 1], tmp_path / "statistics"))
    totals = [loss.total for loss in found if loss.layer == 0]
    assert totals[0] == pytest.approx(0, abs=1e-9)
    assert totals[0] < totals[1] < totals[2]


def _byte_level(folder: Path, kind: type[Any], *, tokenizer_json: bool, **settings: Any) -> None:
    """Write a byte-level tokenizer into ``folder``, in the files that old checkpoints have."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|endoftext|>", "<|padding|>", *alphabet, "lo", "Ġw"]
    (folder / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\nl o\nĠ w\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 64, **settings}))
    if tokenizer_json:
        kind.from_pretrained(folder).backend_tokenizer.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("tokenizer_json", [True, False])
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("route", ["pythia", "redpajama", "gpt2", "opt", "codegen", "gpt_neo", "mpt"])
def test_the_tokenizer_still_matches(route: str, named: bool, tokenizer_json: bool, tmp_path: Path) -> None:
    source, text = tmp_path / "source", "Hello world,\n  low <|endoftext|>é"
    with_equal_heads(route).save_pretrained(source)
    kind = GPTNeoXTokenizer if ROUTES[route][0] in ("gpt_neox", "mpt") else GPT2Tokenizer
    settings = {"tokenizer_class": kind.__name__} if named else {}
    if route == "opt" and named:  # OPT puts a token in front of every text, which its settings say
        settings |= {"add_bos_token": True, "bos_token": "<|endoftext|>"}
    _byte_level(source, kind, tokenizer_json=tokenizer_json, **settings)
    expected = AutoTokenizer.from_pretrained(source)(text)["input_ids"]
    before = {path.name: path.read_bytes() for path in source.glob("*") if "token" in path.name or "vocab" in path.name}
    out = convert_checkpoint(source, tmp_path / "out", groups=1)
    assert AutoTokenizer.from_pretrained(out)(text)["input_ids"] == expected
    assert {name: (out / name).read_bytes() for name in before} == before


def test_a_tokenizer_whose_class_was_removed_still_matches(tmp_path: Path) -> None:
    """BLOOM names a class that transformers 5 does not have, so tokenizer.json is read."""
    source, text = tmp_path / "source", "Hello world,\n  low <|endoftext|>é"
    with_equal_heads("bloom").save_pretrained(source)
    _byte_level(source, GPT2Tokenizer, tokenizer_json=True, tokenizer_class="BloomTokenizerFast")
    out = convert_checkpoint(source, tmp_path / "out", groups=2)
    expected, found = (AutoTokenizer.from_pretrained(folder)(text)["input_ids"] for folder in (source, out))
    assert found == expected


def test_a_tokenizer_that_would_change_is_refused(tmp_path: Path) -> None:
    """GPT-NeoX's class normalises text whatever tokenizer.json says. The result's class follows that file."""
    source = tmp_path / "source"
    with_equal_heads("redpajama").save_pretrained(source)
    _byte_level(source, GPT2Tokenizer, tokenizer_json=True)
    with pytest.raises(CheckpointError, match="gives other tokens"):
        convert_checkpoint(source, tmp_path / "out", groups=1)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("model_type", "over", "reason"),
    [
        ("persimmon", {}, "norm"),
        ("mpt", {"attn_config": {"alibi_bias_max": 16}}, "alibi_bias_max"),
    ],
)
def test_types_without_a_route_are_refused_with_the_reason(
    model_type: str, over: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    tiny_model(model_type, **over).save_pretrained(tmp_path / "source")
    with pytest.raises(UnsupportedError, match=reason):
        convert_checkpoint(tmp_path / "source", tmp_path / "out", groups=1)
    assert not (tmp_path / "out").exists()


def test_an_encoder_decoder_without_a_route_is_refused_with_the_reason(tmp_path: Path) -> None:
    source = tmp_path / "whisper"
    source.mkdir()
    (source / "config.json").write_text(
        json.dumps({"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"]})
    )
    with pytest.raises(UnsupportedError, match="encoder-decoder"):
        inspect_checkpoint(source)


def test_inspect_names_the_route(tmp_path: Path) -> None:
    tiny_model("gpt2").save_pretrained(tmp_path / "gpt2")
    tiny_model("gpt_neox").save_pretrained(tmp_path / "neox")
    neox, gpt2 = (inspect_checkpoint(tmp_path / name) for name in ("neox", "gpt2"))
    assert (neox.model_type, [row.groups for row in neox.cache]) == ("gpt_neox", [4, 2, 1])
    for stack, refused in (("llama.cpp", [False, True, True]), ("vLLM", [False, False, False])):
        assert [set(row.devices[stack].values()) == {"refused"} for row in neox.cache] == refused, stack
    assert neox.route is not None
    assert "phi" in neox.route
    assert gpt2.parameters == sum(weight.numel() for weight in tiny_model("gpt2").parameters())
    assert [row.groups for row in gpt2.cache] == [4, 2, 1]
    assert [row.bytes_per_token for row in gpt2.cache] == [1024, 512, 256]
    assert [set(row.devices["vLLM"].values()) == {"refused"} for row in gpt2.cache] == [False, True, False]
    assert gpt2.route is not None
    assert "as gpt_bigcode (GPTBigCodeForCausalLM) with 1 or 4 KV heads" in gpt2.route
    assert "as headfold_decoder (HeadfoldDecoderForCausalLM) with 2 KV heads" in gpt2.route
    assert "trust_remote_code=True" in gpt2.route
    two_heads = route_of(ModelType({"model_type": "gpt2", "n_head": 2, "n_embd": 32}))
    assert two_heads is not None
    assert OWN not in two_heads.describe()  # one group or two: there is nothing in between


def test_a_quantised_source_is_refused_before_it_is_rewritten(tmp_path: Path) -> None:
    source = tmp_path / "source"
    tiny_model("gpt_neox").save_pretrained(source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(UnsupportedError, match="quantised"):
        convert_checkpoint(source, tmp_path / "out", groups=2)


def test_a_folder_without_its_weights_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "source"
    tiny_model("gpt_neox").save_pretrained(source)
    (source / "model.safetensors").unlink()
    with pytest.raises(CheckpointError):
        convert_checkpoint(source, tmp_path / "out", groups=2)
