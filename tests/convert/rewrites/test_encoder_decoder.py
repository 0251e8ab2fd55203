"""Encoder-decoders become a type of our own: the same function with all heads, and exact merging of equal heads."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from headfold.checkpoint import modelling
from headfold.checkpoint.load import load_config, load_language_model
from headfold.checkpoint.modelling import OWN_TYPES
from headfold.convert.check import check_checkpoint
from headfold.convert.family.refusals import REFUSED
from headfold.convert.inspect import inspect_checkpoint
from headfold.convert.rewrites.encoder_decoder import ENCODER_DECODERS
from headfold.convert.run import convert_checkpoint, plan_conversion
from headfold.convert.serving.engines import where_it_runs
from headfold.errors import CheckpointError, UnsupportedError, UsageError
from safetensors.torch import load_file, save_file
from tiny import tiny_model, tiny_pair
from torch import Tensor

HEADS, GROUPS = 4, 2
GATED = {"feed_forward_proj": "gated-gelu", "is_gated_act": True, "dense_act_fn": "gelu_new"}
KEYS_AND_VALUES = ("k", "v", "k_proj", "v_proj")


@dataclass(frozen=True)
class Made:
    """A tiny checkpoint of one type whose KV heads are equal in groups, as the source has it and converted."""

    source: Path
    native: Any
    folder: Path
    own: Any


def native(folder: Path) -> Any:
    return transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()


def projection(name: str) -> str:
    """``k_proj`` of ``model.decoder.layers.0.self_attn.k_proj.weight``."""
    return name.rpartition(".")[0].rpartition(".")[2]


def repeat_heads(folder: Path, *, tile: bool = False) -> None:
    """Write equal KV heads into every attention of a native checkpoint, in the order of groups or in another one."""
    tensors = load_file(folder / "model.safetensors")
    order = [head % GROUPS if tile else head * GROUPS // HEADS for head in range(HEADS)]
    for name, tensor in tensors.items():
        if projection(name) in KEYS_AND_VALUES:
            tensors[name] = tensor.unflatten(0, (HEADS, -1))[order].flatten(0, 1).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module", params=tiny.PAIRS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    place = tmp_path_factory.mktemp(request.param)
    tiny_pair(request.param).save_pretrained(place / "source")
    repeat_heads(place / "source")
    folder = convert_checkpoint(place / "source", place / "out", groups=GROUPS)
    yield Made(place / "source", native(place / "source"), folder, load_language_model(folder).eval())
    shutil.rmtree(place)


def inputs(config: Any) -> dict[str, Tensor]:
    """Two texts, padded on the left and on the right, and two targets, of which one is padded on the left."""
    numbers = torch.Generator().manual_seed(1)
    pad = config.pad_token_id
    ids, targets = (torch.randint(5, 200, (2, length), generator=numbers) for length in (9, 7))
    mask, target_mask = torch.ones_like(ids), torch.ones_like(targets)
    mask[0, :3] = mask[1, 7:] = target_mask[1, :2] = 0
    return {
        "input_ids": ids.masked_fill(mask == 0, pad),
        "attention_mask": mask,
        "decoder_input_ids": targets.masked_fill(target_mask == 0, pad),
        "decoder_attention_mask": target_mask,
    }


def logits(model: Any) -> Tensor:
    """(tokens that are no padding, vocabulary)"""
    given = inputs(model.config)
    with torch.no_grad():
        return model(**given, use_cache=False).logits[given["decoder_attention_mask"].bool()]


def difference(model: Any, other: Any) -> float:
    mine, theirs = logits(model), logits(other)
    return ((mine - theirs).abs().max() / mine.abs().max()).item()


def greedy(model: Any, **options: Any) -> list[list[int]]:
    given = {name: tensor for name, tensor in inputs(model.config).items() if not name.startswith("decoder")}
    return model.generate(**given, max_new_tokens=6, min_new_tokens=6, do_sample=False, **options).tolist()


def test_every_type_is_tried() -> None:
    assert set(tiny.PAIRS) == set(ENCODER_DECODERS)
    assert str(REFUSED["umt5"][1]).endswith(f": {', '.join(ENCODER_DECODERS)}.")


def test_equal_heads_merge_exactly(made: Made) -> None:
    config = json.loads((made.folder / "config.json").read_text())
    assert (config["num_key_value_heads"], config["encoder_num_key_value_heads"]) == (GROUPS, HEADS)
    assert difference(made.native, made.own) < 1e-5
    source, result = (load_file(folder / "model.safetensors") for folder in (made.source, made.folder))
    smaller = {name for name in source if source[name].shape != result[name].shape}
    assert len(smaller) == sum(
        "decoder" in name and projection(name) in ("k", "v", "k_proj", "v_proj") for name in source
    )
    for name, tensor in source.items():
        kept = tensor.unflatten(0, (HEADS, -1))[:: HEADS // GROUPS].flatten(0, 1) if name in smaller else tensor
        assert torch.equal(kept, result[name]), name


def test_all_heads_kept_gives_the_source_s_logits_and_text(made: Made, tmp_path: Path) -> None:
    folder = convert_checkpoint(made.source, tmp_path / "all", groups=HEADS)
    assert (folder / "model.safetensors").read_bytes() == (made.source / "model.safetensors").read_bytes()
    own = load_language_model(folder).eval()
    assert difference(made.native, own) < 1e-5
    assert greedy(own) == greedy(made.native)


def test_t5_with_equal_heads_computes_what_the_plain_class_computes(tmp_path: Path) -> None:
    """8 heads of width 8: decoder merged, logits and cached text the source's; the plain class does not take it."""
    tiny_pair("t5", d_model=64, d_kv=8, num_heads=8).save_pretrained(tmp_path / "source")
    tensors = load_file(tmp_path / "source" / "model.safetensors")
    for name, tensor in tensors.items():
        if projection(name) in KEYS_AND_VALUES:
            tensors[name] = tensor.unflatten(0, (8, -1))[[0, 0, 0, 0, 4, 4, 4, 4]].flatten(0, 1).contiguous()
    save_file(tensors, tmp_path / "source" / "model.safetensors", metadata={"format": "pt"})
    folder = convert_checkpoint(tmp_path / "source", tmp_path / "out", groups=2)
    source, own = native(tmp_path / "source"), load_language_model(folder).eval()
    assert difference(source, own) < 1e-5
    assert greedy(own) == greedy(source)
    result = load_file(folder / "model.safetensors")
    table = "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    assert torch.equal(result[table], tensors[table])
    assert result["encoder.block.0.layer.0.SelfAttention.k.weight"].shape == (64, 64)
    with pytest.raises((RuntimeError, ValueError), match=r"size mismatch|mismatched|ignore_mismatched_sizes"):
        transformers.T5ForConditionalGeneration.from_pretrained(folder)


def test_cached_generation_is_uncached_generation_and_both_caches_shrink(made: Made) -> None:
    assert greedy(made.own) == greedy(made.own, use_cache=False) == greedy(made.native)
    with torch.no_grad():
        cache = made.own(**inputs(made.own.config), use_cache=True).cache
    for part in (cache.self_attention_cache, cache.cross_attention_cache):
        assert [layer.keys.shape[1] for layer in part.layers] == [GROUPS] * 2


def test_beams_static_caches_and_attention_weights(made: Made) -> None:
    assert greedy(made.own, num_beams=3) == greedy(made.native, num_beams=3)
    assert greedy(made.own, cache_implementation="static") == greedy(made.own)
    eager = native(made.source)
    eager.set_attn_implementation("eager")
    real = inputs(eager.config)["decoder_attention_mask"].bool()
    with torch.no_grad():
        shown, expected = (
            model(**inputs(eager.config), output_attentions=True, output_hidden_states=True)
            for model in (made.own, eager)
        )
    for name in ("decoder_attentions", "cross_attentions"):
        for mine, theirs in zip(shown[name], expected[name], strict=True):
            torch.testing.assert_close(mine.transpose(1, 2)[real], theirs.transpose(1, 2)[real], atol=1e-5, rtol=1e-4)
    for mine, theirs in zip(shown.decoder_hidden_states, expected.decoder_hidden_states, strict=True):
        torch.testing.assert_close(mine[real], theirs[real], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_as_the_source_does(made: Made, dtype: torch.dtype) -> None:
    own = load_language_model(made.folder, dtype=dtype).eval()
    half = transformers.AutoModelForSeq2SeqLM.from_pretrained(made.source, dtype=dtype).eval()
    assert {name: weight.dtype for name, weight in own.named_parameters()} == {
        name: weight.dtype for name, weight in half.named_parameters() if name in own.state_dict()
    }
    exact, mine, theirs = logits(made.native), logits(own).float(), logits(half).float()
    rounding = (theirs - exact).abs().max()
    assert (mine - exact).abs().max() < 2 * rounding
    assert rounding > 0


def test_saved_and_loaded_again_it_is_the_same(made: Made, tmp_path: Path) -> None:
    made.own.save_pretrained(tmp_path / "again")
    own = OWN_TYPES[made.own.config.model_type]
    assert (tmp_path / "again" / own.file_name).read_bytes() == own.code
    assert json.loads((tmp_path / "again" / "config.json").read_text())["auto_map"] == own.auto_map
    assert torch.equal(logits(load_language_model(tmp_path / "again").eval()), logits(made.own))


def test_a_training_step_reaches_every_weight(made: Made) -> None:
    model = load_language_model(made.folder).train()
    model.gradient_checkpointing_enable()
    given = inputs(model.config)
    labels = given["decoder_input_ids"].masked_fill(given["decoder_attention_mask"] == 0, -100)
    loss = model(input_ids=given["input_ids"], attention_mask=given["attention_mask"], labels=labels).loss
    loss.backward()
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in trained)
    model.eval(), made.native.eval()
    with torch.no_grad():
        ours, theirs = (one(input_ids=given["input_ids"], labels=labels).loss for one in (model, made.native))
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)


def test_a_mask_of_another_length_is_refused(made: Made) -> None:
    given = inputs(made.own.config)
    read = {name: given[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        begun = made.own(**read, decoder_input_ids=given["decoder_input_ids"][:, :4], use_cache=True)
        for columns in (2, 3, 6):
            rest = {"decoder_input_ids": given["decoder_input_ids"][:, 4:], "past_key_values": begun.cache}
            cut = torch.ones(2, columns, dtype=torch.long)
            with pytest.raises(ValueError, match=f"a column for each of . tokens, not {columns}"):
                made.own(**read, **rest, decoder_attention_mask=cut)
        with pytest.raises(ValueError, match="each of 9 tokens, not 1"):
            made.own(**{**given, "attention_mask": torch.ones(2, 1)})
        rest = {"decoder_input_ids": given["decoder_input_ids"], "encoder_outputs": made.own.get_encoder()(**read)}
        with pytest.raises(ValueError, match="each of 9 tokens, not 1"):
            made.own(**rest, attention_mask=torch.ones(2, 1))
        whole = made.own(**rest, attention_mask=read["attention_mask"]).logits
    assert begun.cache.get_seq_length() == 4  # what was refused has left nothing in it
    second = made.own(**read, decoder_input_ids=given["decoder_input_ids"][:, 4:], past_key_values=begun.cache).logits
    # the target without padding, as m2m_100 forgets padding that is in the cache
    torch.testing.assert_close(second[0], whole[0, 4:], atol=1e-5, rtol=1e-4)


def test_a_cache_while_checkpointing_and_unknown_words_are_refused(made: Made) -> None:
    given = inputs(made.own.config)
    assert made.own(**given, head_mask=None, cache_position=torch.arange(7)).logits.isfinite().all()
    for unknown in ("head_mask", "position_ids", "decoder_attention_masks"):
        with pytest.raises(ValueError, match=f"does not know {unknown}"):
            made.own(**given, **{unknown: torch.ones(2, 7)})
    model = load_language_model(made.folder).train()
    with torch.no_grad():
        cache = model(**given, use_cache=True).cache
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="takes no cache while it trains"):
        model(**given, past_key_values=cache)


def save(model_type: str, folder: Path, **over: Any) -> Path:
    tiny_pair(model_type, **over).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("model_type", ["t5", "bart"])
def test_control_heads_repeated_in_another_order_are_noticed(model_type: str, tmp_path: Path) -> None:
    source = save(model_type, tmp_path / "source")
    repeat_heads(source, tile=True)
    own = load_language_model(convert_checkpoint(source, tmp_path / "out", groups=GROUPS)).eval()
    assert difference(native(source), own) > 1e-2


@pytest.mark.parametrize("model_type", ["t5", "bart"])
def test_the_encoder_is_converted_where_that_is_asked_for(model_type: str, tmp_path: Path) -> None:
    source = save(model_type, tmp_path / "source")
    repeat_heads(source)
    own = load_language_model(convert_checkpoint(source, tmp_path / "out", groups=GROUPS, encoder=True)).eval()
    assert own.config.num_key_value_heads == own.config.encoder_num_key_value_heads == GROUPS
    assert difference(native(source), own) < 1e-5


def test_there_must_be_an_encoder_to_convert(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "source")
    with pytest.raises(UsageError, match="no encoder"):
        plan_conversion(tmp_path / "source", groups=2, encoder=True)


@pytest.mark.parametrize("method", ["first", "random"])
def test_other_methods_convert_encoder_decoders(method: str, tmp_path: Path) -> None:
    source = save("t5", tmp_path / "source")
    repeat_heads(source)
    out = convert_checkpoint(source, tmp_path / "out", groups=GROUPS, method=method)
    assert (difference(native(source), load_language_model(out).eval()) < 1e-5) == (method == "first")


def test_a_head_of_its_own_stays_and_is_not_scaled(tmp_path: Path) -> None:
    """T5 1.1 says that its head is not tied; transformers 5 forgets the word on saving, and keeps what it means."""
    source = save("t5", tmp_path / "source", **GATED)
    config = json.loads((source / "config.json").read_text())
    del config["scale_decoder_outputs"]
    (source / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = torch.randn_like(tensors["shared.weight"])
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    own = load_language_model(convert_checkpoint(source, tmp_path / "out", groups=HEADS)).eval()
    assert own.config.scale_decoder_outputs is False
    assert own.config.tie_word_embeddings is False
    assert difference(native(source), own) < 1e-5
    assert torch.equal(own.lm_head.weight, tensors["lm_head.weight"])


def rewrite_file(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    tensors = change(load_file(folder / "model.safetensors"))
    save_file(
        {name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )


def test_copies_of_the_embedding_and_dead_weights_of_old_files_come_along(tmp_path: Path) -> None:
    source = save("t5", tmp_path / "source")
    dead = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    twins = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
    rewrite_file(source, lambda held: {**held, **dict.fromkeys(twins, held["shared.weight"]), dead: torch.ones(8, 4)})
    out = convert_checkpoint(source, tmp_path / "out", groups=HEADS)
    assert load_file(out / "model.safetensors").keys() == load_file(source / "model.safetensors").keys()
    own = load_language_model(out).eval()
    assert own.config.tie_word_embeddings is True
    assert difference(native(source), own) < 1e-5
    assert check_checkpoint(out).rows


def test_names_without_the_prefix_of_the_whole_are_found(tmp_path: Path) -> None:
    """BART's base model was published as the model without its head."""
    source = save("bart", tmp_path / "source")
    repeat_heads(source)
    rewrite_file(
        source, lambda held: {name.removeprefix("model."): held[name] for name in held if name != "final_logits_bias"}
    )
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "architectures": ["BartModel"]}))
    out = convert_checkpoint(source, tmp_path / "out", groups=GROUPS)
    own = load_language_model(out).eval()
    assert difference(native(source), own) < 1e-5
    assert load_file(out / "model.safetensors").keys() == load_file(source / "model.safetensors").keys()
    again = convert_checkpoint(out, tmp_path / "again", groups=1)
    direct = convert_checkpoint(source, tmp_path / "direct", groups=1)
    assert difference(load_language_model(direct).eval(), load_language_model(again).eval()) < 1e-5


def test_shards_stay_and_the_record_names_the_new_type(tmp_path: Path) -> None:
    tiny_pair("t5").save_pretrained(tmp_path / "source", max_shard_size="100KB")
    out = convert_checkpoint(tmp_path / "source", tmp_path / "out", groups=1)
    shards, source_shards = (
        sorted(file.name for file in at.glob("*.safetensors")) for at in (out, tmp_path / "source")
    )
    assert len(shards) > 1
    assert shards == source_shards
    entry = json.loads((out / "headfold.json").read_text())["history"][-1]
    assert entry["rewrite"]["to"] == "headfold_t5"
    assert "trust_remote_code" in entry["serving"]["runs"]
    assert "vLLM" in entry["serving"]["faults"][0]
    assert entry["kv_bytes_per_token"] == entry["kv_bytes_per_source_token"] == 2 * 2 * 16 * 4
    assert entry["encoder_converted"] is False
    card = (out / "README.md").read_text()
    assert "trust_remote_code=True" in card
    assert dict(check_checkpoint(out).rows)["query heads / KV heads"] == "4 / 1"


def test_generation_settings_that_config_json_alone_holds_survive(tmp_path: Path) -> None:
    """BART's config.json forces the last token, which a config of another class would not be asked for."""
    source = save("bart", tmp_path / "source")
    (source / "generation_config.json").unlink()
    config = json.loads((source / "config.json").read_text())
    said = {"num_beams": 4, "length_penalty": 2.0, "no_repeat_ngram_size": 3, "max_length": 24, "min_length": 16}
    (source / "config.json").write_text(json.dumps({**config, **said, "temperature": 0.7}))  # which nothing uses
    out = convert_checkpoint(source, tmp_path / "out", groups=HEADS)
    own, first = load_language_model(out).eval(), native(source)
    assert own.generation_config.forced_eos_token_id == first.generation_config.forced_eos_token_id == 2
    for name, value in said.items():
        assert getattr(own.generation_config, name) == getattr(first.generation_config, name) == value
    read = {name: tensor for name, tensor in inputs(own.config).items() if not name.startswith("decoder")}
    texts = [model.generate(**read).tolist() for model in (own, first)]
    assert texts[0] == texts[1]
    assert len(texts[0][0]) >= 16


@pytest.mark.parametrize("model_type", ["t5", "m2m_100"])
def test_inspect_names_the_type_that_it_becomes(model_type: str, tmp_path: Path) -> None:
    source = save(model_type, tmp_path / "source")
    found = inspect_checkpoint(source)
    assert (found.model_type, found.attention_layers, found.kv_heads, found.head_dim) == (model_type, 2, 4, 16)
    assert "trust_remote_code=True" in str(found.route)
    planned = plan_conversion(source, groups=2)
    row = next(row for row in found.cache if row.groups == 2)
    assert row.bytes_per_token == planned.result.kv_bytes_per_token()[1]
    assert row.bytes_per_source_token == planned.result.kv_bytes_per_token("cross")[1]
    assert set(row.devices["vLLM"].values()) == {"refused"}


def test_code_that_is_not_ours_runs_only_where_it_is_trusted(tmp_path: Path) -> None:
    out = convert_checkpoint(save("t5", tmp_path / "source"), tmp_path / "out", groups=2)
    load_language_model(out)  # the type is known to the Auto classes from here on
    file = out / "modeling_headfold_encoder_decoder.py"
    file.write_text(file.read_text() + "\nHeadfoldT5ForConditionalGeneration.changed = True\n")
    again = tmp_path / "again"
    for use in (load_config, load_language_model, check_checkpoint, lambda at: convert_checkpoint(at, again, groups=1)):
        with pytest.raises(UnsupportedError, match="not a file that this version of headfold"):
            use(out)
    assert not again.exists()
    assert load_language_model(out, trust_remote_code=True).changed
    file.unlink()
    with pytest.raises(CheckpointError, match=r"lacks modeling_headfold_encoder_decoder\.py"):
        load_language_model(out)


@pytest.mark.parametrize("model_type", ["t5", "bart"])
def test_a_missing_weight_is_an_error_of_the_class_itself(model_type: str, tmp_path: Path) -> None:
    out = convert_checkpoint(save(model_type, tmp_path / "source"), tmp_path / "out", groups=2)
    own = OWN_TYPES[f"headfold_{model_type}"].classes()[1]
    assert isinstance(own.from_pretrained(out), own)
    tensors = load_file(out / "model.safetensors")
    lost = next(name for name in tensors if name.endswith("layer_norm.weight"))
    save_file({name: tensors[name] for name in tensors if name != lost}, out / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=lost):
        own.from_pretrained(out)
    with pytest.raises(CheckpointError, match=lost):
        load_language_model(out)


@pytest.mark.parametrize("model_type", ["t5", "bart"])
def test_a_file_of_an_earlier_version_is_ours_and_comes_along(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier versions wrote a file for each type, which config.json names."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    out = convert_checkpoint(save(model_type, tmp_path / "source"), tmp_path / "out", groups=2)
    own, earlier = OWN_TYPES[f"headfold_{model_type}"], out / f"modeling_headfold_{model_type}.py"
    expected = logits(load_language_model(out).eval())
    earlier.write_bytes((out / own.file_name).read_bytes() + b"\n# as it was\n")
    (out / own.file_name).unlink()
    config = (out / "config.json").read_text()
    (out / "config.json").write_text(config.replace(own.module, earlier.stem))
    with pytest.raises(UnsupportedError, match=f"{earlier.name} is not a file that this version"):
        load_language_model(out)
    monkeypatch.setattr(modelling, "EARLIER", {hashlib.sha256(earlier.read_bytes()).hexdigest()})
    assert torch.equal(logits(load_language_model(out).eval()), expected)
    again = convert_checkpoint(out, tmp_path / "again", groups=1)
    assert (again / earlier.name).read_bytes() == earlier.read_bytes()
    assert not (again / own.file_name).exists()
    mine = load_language_model(again).eval()
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(again, trust_remote_code=True).eval()
    assert torch.equal(logits(mine), logits(theirs))


def test_the_versions_in_the_messages_are_those_in_the_files() -> None:
    for own in OWN_TYPES.values():
        own.classes()
        tested = " and ".join(sys.modules[f"{modelling.__name__}.{own.module}"].TESTED)
        said = where_it_runs({"model_type": own.model_type}, fewer_heads=True).runs
        assert f"transformers {tested}" in said


@pytest.mark.parametrize("name", sorted(OWN_TYPES))
def test_another_version_of_transformers_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = OWN_TYPES[name]
    for version in ("5.25.0", "4.56.2"):
        monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
        monkeypatch.delitem(sys.modules, f"{modelling.__name__}.{own.module}", raising=False)
        with pytest.raises(UnsupportedError, match=rf"4.57 and 5.24.*{version}.*pip install .transformers==5\.24"):
            own.classes()


def test_inspect_shows_what_this_version_of_transformers_can_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for model_type in ("gpt2", "bloom"):
        tiny_model(model_type).save_pretrained(tmp_path / model_type)
    save("t5", tmp_path / "t5")
    assert [row.groups for row in inspect_checkpoint(tmp_path / "gpt2").cache] == [4, 2, 1]
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.25.0")
    for own in OWN_TYPES.values():
        monkeypatch.delitem(sys.modules, f"{modelling.__name__}.{own.module}", raising=False)
    found = inspect_checkpoint(tmp_path / "gpt2")
    assert [row.groups for row in found.cache] == [4, 1]
    assert "as gpt_bigcode" in str(found.route)
    assert "headfold_decoder cannot be used here" in str(found.route)
    for model_type in ("bloom", "t5"):
        with pytest.raises(UnsupportedError, match=r"pip install .transformers==5\.24"):
            inspect_checkpoint(tmp_path / model_type)


def turn_heads(folder: Path) -> None:
    """Make the KV heads of a pair equal up to a turn of keys and of values, in every attention of the decoder."""
    numbers = torch.Generator().manual_seed(3)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if "decoder" in name and projection(name) in KEYS_AND_VALUES]:
        if name.endswith("weight"):
            bias = name.removesuffix("weight") + "bias"
            for part in (name, bias) if bias in tensors else (name,):
                tensors[part] = tensors[part].unflatten(0, (HEADS, -1)).clone()
            turn = torch.linalg.qr(torch.randn(16, 16, generator=numbers))[0]
            for part in (name, bias) if bias in tensors else (name,):
                for head in range(1, HEADS, 2):
                    tensors[part][head] = turn @ tensors[part][head - 1]
                tensors[part] = tensors[part].flatten(0, 1).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("method", ["aligned", "folded"])
@pytest.mark.parametrize("model_type", ["t5", "bart", "m2m_100"])
def test_heads_equal_up_to_a_turn_merge_exactly(model_type: str, method: str, tmp_path: Path) -> None:
    """Neither position biases nor cross-attention see a change of basis inside a head, so any turn is free."""
    source = save(model_type, tmp_path / "source")
    turn_heads(source)
    turned = convert_checkpoint(source, tmp_path / method, groups=GROUPS, method=method)
    assert difference(native(source), load_language_model(turned).eval()) < 1e-4
    averaged = convert_checkpoint(source, tmp_path / "mean", groups=GROUPS)
    assert difference(native(source), load_language_model(averaged).eval()) > 1e-2


def test_similarity_moves_heads_where_positions_are_not_by_head(tmp_path: Path) -> None:
    source = save("bart", tmp_path / "source")
    repeat_heads(source, tile=True)  # heads 0 and 2 are equal, and 1 and 3
    with_similar = convert_checkpoint(source, tmp_path / "out", groups=GROUPS, grouping="similarity")
    assert difference(native(source), load_language_model(with_similar).eval()) < 1e-5
    with pytest.raises(UnsupportedError, match="relative positions have a bias for every head"):
        plan_conversion(save("t5", tmp_path / "t5"), groups=GROUPS, grouping="similarity")
    assert plan_conversion(tmp_path / "t5", groups=GROUPS, method="folded", grouping=None).grouping == "contiguous"


@pytest.mark.parametrize("model_type", ["umt5", "longt5", "switch_transformers", "whisper", "blenderbot", "plbart"])
def test_other_encoder_decoders_are_refused_by_name(model_type: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    save_file({"shared.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedError, match=model_type) as caught:
        plan_conversion(tmp_path, groups=2)
    assert "m2m_100" in str(caught.value.hint)


@pytest.mark.parametrize("model_type", tiny.PAIRS)
def test_tables_of_their_own_for_encoder_or_decoder_are_refused(model_type: str, tmp_path: Path) -> None:
    """As save_pretrained writes them where nothing is tied, and as copies in an old file of which one differs."""
    source = save(model_type, tmp_path / "source")
    shared = next(name for name in load_file(source / "model.safetensors") if name.endswith("shared.weight"))
    names = [shared.replace("shared", f"{side}.embed_tokens") for side in ("encoder", "decoder")]
    rewrite_file(source, lambda held: {**held, **dict.fromkeys(names, held[shared])})
    assert plan_conversion(source, groups=GROUPS)
    for name in names:
        rewrite_file(
            source, lambda held, name=name: {**held, **dict.fromkeys(names, held[shared]), name: 2 * held[shared]}
        )
        with pytest.raises(UnsupportedError, match="one embedding for the encoder"):
            plan_conversion(source, groups=GROUPS)
    untied = save(model_type, tmp_path / "untied", tie_word_embeddings=False)
    if model_type in ("t5", "mt5"):  # where the word is of the head alone
        own = load_language_model(convert_checkpoint(untied, tmp_path / "out", groups=HEADS)).eval()
        assert difference(native(untied), own) < 1e-5
    else:
        with pytest.raises(UnsupportedError, match="one embedding for the encoder"):
            convert_checkpoint(untied, tmp_path / "out", groups=GROUPS)
        assert not (tmp_path / "out").exists()


def test_other_classes_and_embeddings_of_two_sides_are_refused(tmp_path: Path) -> None:
    source = save("t5", tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "architectures": ["T5EncoderModel"]}))
    with pytest.raises(UnsupportedError, match="only T5ForConditionalGeneration"):
        plan_conversion(source, groups=2)
    marian = save("marian", tmp_path / "marian", share_encoder_decoder_embeddings=False)
    with pytest.raises(UnsupportedError, match="one embedding for the encoder"):
        plan_conversion(marian, groups=2)
