"""Every causal language model type of transformers: converted exactly, or refused by name.

The list is the library's own. For each type whose class follows a number of KV heads: a random model with fewer KV
heads is repeated to more, converted back, and must come back to the bit, on disk, after loading, and in its cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from headfold.convert.family.family import head_counts, setting_counts
from headfold.convert.family.model_type import ModelType
from headfold.convert.run import convert_checkpoint
from headfold.errors import CheckpointError, UnsupportedError
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file
from tiny import has_kv_heads, kv_heads_of, new_model, repeat_kv_heads, set_kv_heads, tiny_config, tiny_model
from transformers import DynamicCache
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

REFUSALS = (ValueError, StrictDataclassError)
"""Errors that config and model classes raise for values that they do not take."""
TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
FOLLOW_YET_REFUSED = {
    "doge": "its attention mask is computed from the values of all heads",
    "jetmoe": "fewer KV heads would be fewer query heads",
    "mimo_v2_flash": "its sliding layers have twice the KV heads",
    "zaya": "convolutions mix the channels of all heads",
}
"""Types whose class changes with the number of KV heads and that are refused all the same."""
UNBUILT = {
    "dots3_note": "latent attention; the number must equal that of the query heads",
    "dots3_note_text": "latent attention; the number must equal that of the query heads",
    "gemma4_assistant": "a drafter, whose layers use the cache of another model",
}
"""Types whose config class allows no other number of KV heads, or no default config at all."""
NEVER_BUILT = {
    "gemma3n": "timm",  # its vision tower; the text twin gemma3n_text is in the list
    "gemma4_unified_assistant": "layer types",  # a drafter without a cache of its own
}
"""Types whose class cannot be built here, and a word of the reason."""
EVEN_ONLY = {"diffllama"}
"""Types whose class refuses an odd number of KV heads."""
ONE_OR_ALL = {"gpt_bigcode": "knows one KV head or all, see test_rewrites.py"}
"""Types whose class can have no number between."""
OTHER_CACHES = {
    "blt": set[int](),  # no cache can be made from its config in transformers 5.24
    "falcon": {4},  # repeats the KV heads for every query head before it caches them
}
"""Types whose cache does not hold G heads, and what it holds."""
CACHE_TO_GIVE = {"recurrent_gemma": DynamicCache}
"""Types that fill a cache they are given, and return none of their own."""


@pytest.mark.parametrize("model_type", TYPES)
def test_every_type_is_exact_or_refused(model_type: str, tmp_path: Path) -> None:
    reason = _refusal(model_type)
    if reason is not None:
        assert not _follows(model_type) or model_type in FOLLOW_YET_REFUSED, reason
        return
    if model_type in ONE_OR_ALL:
        settings = head_counts(ModelType({"model_type": model_type})).settings
        assert [setting_counts(setting) for setting in settings] == [[1]]
        assert settings[0].switch
        return
    if model_type in NEVER_BUILT:
        config = tiny_config(model_type, 4, 4).to_dict()
        with pytest.raises(UnsupportedError, match=NEVER_BUILT[model_type]):
            ModelType(config).on_meta()
        return
    for kv_heads, more in [(2, 4), (1, 2)] if model_type not in EVEN_ONLY else [(2, 4), (4, 8)]:
        heads = max(more, 4)
        _check_exact(tiny_model(model_type, heads, kv_heads), more, tmp_path / str(kv_heads))


def test_at_least_110_types_are_converted() -> None:
    """Every type that is not refused was found exact by the test above."""
    left_out = {*NEVER_BUILT, *ONE_OR_ALL}
    assert sum(_refusal(model_type) is None for model_type in TYPES if model_type not in left_out) >= 110
    assert set(FOLLOW_YET_REFUSED) <= set(TYPES)


def _check_exact(small: Any, more: int, folder: Path) -> None:
    kv_heads = kv_heads_of(small.config)
    wide = repeat_kv_heads(small, more)
    wide.save_pretrained(folder / "source")
    small.save_pretrained(folder / "expected")
    out = convert_checkpoint(folder / "source", folder / "out", groups=kv_heads)
    made, expected = (load_file(place / "model.safetensors") for place in (out, folder / "expected"))
    assert made.keys() == expected.keys()
    assert [name for name in made if not torch.equal(made[name], expected[name])] == []
    source = load_file(folder / "source" / "model.safetensors")
    assert sum(tensor.numel() for tensor in made.values()) < sum(tensor.numel() for tensor in source.values())
    loaded = type(small).from_pretrained(out).eval()
    (logits, heads), (wanted, _) = _run(loaded), _run(small)
    # the weights are equal to the bit, asserted above; where they lie in memory may change the order of a sum
    torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=1e-6)
    twin, _ = _run(wide)
    assert (twin - wanted).abs().max() < 1e-4 * wanted.abs().max().clamp_min(1)
    assert heads == OTHER_CACHES.get(small.config.model_type, {kv_heads})


def _run(model: Any) -> tuple[torch.Tensor, set[int]]:
    """Logits, and the numbers of heads that the cache's layers hold."""
    ids = torch.randint(5, 200, (2, 10), generator=torch.Generator().manual_seed(1))
    model_type = model.config.model_type
    given = {"cache": CACHE_TO_GIVE[model_type](config=model.config)} if model_type in CACHE_TO_GIVE else {}
    with torch.no_grad():
        output = model(input_ids=ids, use_cache=model_type != "blt", **given)
    cache = given.get("cache", output.get("cache", output.get("past_key_values")))
    layers = [] if cache is None else cache.layers
    keys = [getattr(layer, "keys", None) for layer in layers]
    return output.logits, {key.shape[1] for key in keys if isinstance(key, torch.Tensor) and key.dim() == 4}


def _refusal(model_type: str) -> str | None:
    """Return headfold's refusal of the type's config, or None if it would convert it."""
    try:
        config = tiny_config(model_type, 4, 4).to_dict()
    except REFUSALS:  # the shrunk config is refused by the type's own rules; then its defaults must do
        config = {"model_type": model_type}
    try:
        head_counts(ModelType(config))
    except UnsupportedError as problem:
        return problem.message
    except CheckpointError as problem:
        return problem.message if model_type in UNBUILT else None
    return None


def _follows(model_type: str) -> bool:
    """True when the class's parameters change with the number of KV heads."""
    shapes = []
    for kv_heads in (4, 2):
        try:
            config = tiny_config(model_type, 4, 4)
            if not has_kv_heads(config):
                return False
            set_kv_heads(config, kv_heads)
            with torch.device("meta"):
                model = new_model(model_type, config)
        except REFUSALS:  # the class or its config refuses fewer KV heads
            return model_type not in UNBUILT
        shapes.append([tuple(tensor.shape) for tensor in model.state_dict().values()])
    return shapes[0] != shapes[1]
