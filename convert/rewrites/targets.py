"""Write the neutral form as a native type: names, shapes and a config.json that transformers 4.57 and 5 read alike.

The keys are the old ones (``rope_theta``, ``torch_dtype``), since version 5 reads them and version 4 does not read the
new ones. Every target is written with as many KV heads as the source has query heads; merging them is the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..serving import ignored_by
from .decoder import Decoder, Linear, NeutralLayer, Norm, Settings, without_norms
from .lazy import Lazy, combined, wide


@dataclass(frozen=True)
class TargetType:
    """A native type that a decoder can be written as.

    Attributes:
        any_groups: False where the type knows one KV head or all.
        folds_norms: what its layers read is not what those of the source read.
        config: settings → what config.json says of the architecture.
        tensors: decoder → (name, tensor) of every tensor of the type.
        runs, fails: where the result runs and where it does not, a sentence each (from those projects' code; what runs
            in transformers is tested).
    """

    model_type: str
    class_name: str
    any_groups: bool
    config: Callable[[Settings, bool], dict[str, Any]]
    tensors: Callable[[Decoder], Iterator[tuple[str, Lazy]]]
    runs: str
    fails: str
    folds_norms: bool = True


def _phi_config(settings: Settings, tied: bool) -> dict[str, Any]:
    return {
        **_llama_like(settings),
        "layer_norm_eps": settings.norm_eps,
        "resid_pdrop": settings.dropouts["residual"],
        "embd_pdrop": settings.dropouts["embedding"],
        "qk_layernorm": False,
        "tie_word_embeddings": False,  # its head has a bias, and vLLM wants it untied
    }


def _phi_tensors(decoder: Decoder) -> Iterator[tuple[str, Lazy]]:
    """Phi has one norm in front of attention and MLP; where the source has two, they are folded away."""
    yield "model.embed_tokens.weight", decoder.embedding
    for index, source in enumerate(decoder.layers):
        layer = source if source.mlp_norm is None else without_norms(source)
        at = f"model.layers.{index}"
        yield from norm_tensors(f"{at}.input_layernorm", layer.attention_norm, layer.q.weight)
        yield from _attention(f"{at}.self_attn", layer, "dense")
        yield from _biased(f"{at}.mlp.fc1", layer.up)
        yield from _biased(f"{at}.mlp.fc2", layer.down)
    yield from norm_tensors("model.final_layernorm", decoder.final_norm, decoder.embedding)
    yield from _biased("lm_head", Linear(decoder.embedding, None) if decoder.head is None else decoder.head)


def _nemotron_config(settings: Settings, tied: bool) -> dict[str, Any]:
    return {
        **_llama_like(settings),
        "head_dim": settings.head_dim,
        "norm_eps": settings.norm_eps,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": tied,
    }


def _nemotron_tensors(decoder: Decoder) -> Iterator[tuple[str, Lazy]]:
    """Nemotron stores a norm's weight minus one.

    In 16 bits that would lose the digits of small weights, so the norms of the layers are folded away; only the last
    one, which nothing with a bias follows, is stored so.
    """
    yield "model.embed_tokens.weight", decoder.embedding
    for index, source in enumerate(decoder.layers):
        layer = without_norms(source)
        assert layer.mlp_norm is not None
        at = f"model.layers.{index}"
        yield from norm_tensors(f"{at}.input_layernorm", layer.attention_norm, layer.q.weight, stored_minus=1.0)
        yield from _attention(f"{at}.self_attn", layer, "o_proj")
        yield from norm_tensors(f"{at}.post_attention_layernorm", layer.mlp_norm, layer.up.weight, stored_minus=1.0)
        yield from _biased(f"{at}.mlp.up_proj", layer.up)
        yield from _biased(f"{at}.mlp.down_proj", layer.down)
    yield from norm_tensors("model.norm", decoder.final_norm, decoder.embedding, stored_minus=1.0)
    if decoder.head is not None:
        yield "lm_head.weight", decoder.head.weight


def _bigcode_config(settings: Settings, tied: bool) -> dict[str, Any]:
    return {
        "vocab_size": settings.vocabulary,
        "n_positions": settings.positions,
        "n_embd": settings.hidden,
        "n_layer": settings.layers,
        "n_head": settings.heads,
        "n_inner": settings.inner,
        "activation_function": settings.activation,
        "resid_pdrop": settings.dropouts["residual"],
        "embd_pdrop": settings.dropouts["embedding"],
        "attn_pdrop": settings.dropouts["attention"],
        "layer_norm_epsilon": settings.norm_eps,
        "initializer_range": settings.initializer_range,
        "scale_attn_weights": settings.score_scale is None,
        "attention_softmax_in_fp32": True,
        "scale_attention_softmax_in_fp32": True,
        "multi_query": False,
        "tie_word_embeddings": tied,
    }


def _bigcode_tensors(decoder: Decoder) -> Iterator[tuple[str, Lazy]]:
    """GPTBigCode with all heads keeps q, k and v of one head after the other in ``c_attn``."""
    assert decoder.positions is not None
    yield "transformer.wte.weight", decoder.embedding
    yield "transformer.wpe.weight", decoder.positions
    for index, layer in enumerate(decoder.layers):
        assert layer.mlp_norm is not None
        at = f"transformer.h.{index}"
        yield from norm_tensors(f"{at}.ln_1", layer.attention_norm, layer.q.weight)
        yield from _biased(f"{at}.attn.c_attn", _by_head(layer, decoder.settings.heads))
        yield from _biased(f"{at}.attn.c_proj", layer.o)
        yield from norm_tensors(f"{at}.ln_2", layer.mlp_norm, layer.up.weight)
        yield from _biased(f"{at}.mlp.c_fc", layer.up)
        yield from _biased(f"{at}.mlp.c_proj", layer.down)
    yield from norm_tensors("transformer.ln_f", decoder.final_norm, decoder.embedding)
    if decoder.head is not None:
        yield "lm_head.weight", decoder.head.weight


def _by_head(layer: NeutralLayer, heads: int) -> Linear:
    def interleaved(*sides: Tensor) -> Tensor:
        wide_sides = [wide(side) for side in sides] if len({side.dtype for side in sides}) > 1 else list(sides)
        return torch.stack([side.reshape(heads, -1, *side.shape[1:]) for side in wide_sides], 1).flatten(0, 2)

    parts = (layer.q, layer.k, layer.v)
    biases = [part.bias_or_zero() for part in parts]
    return Linear(combined(interleaved, *(part.weight for part in parts)), combined(interleaved, *biases))


def _llama_like(settings: Settings) -> dict[str, Any]:
    return {
        "vocab_size": settings.vocabulary,
        "hidden_size": settings.hidden,
        "intermediate_size": settings.inner,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.heads,
        "hidden_act": settings.activation,
        "max_position_embeddings": settings.positions,
        "initializer_range": settings.initializer_range,
        "attention_dropout": settings.dropouts["attention"],
        **settings.rope,
    }


def _attention(at: str, layer: NeutralLayer, output: str) -> Iterator[tuple[str, Lazy]]:
    for name, linear in (("q_proj", layer.q), ("k_proj", layer.k), ("v_proj", layer.v), (output, layer.o)):
        yield from _biased(f"{at}.{name}", linear)


def _biased(at: str, linear: Linear) -> Iterator[tuple[str, Lazy]]:
    """A linear layer of a type that always has a bias."""
    yield f"{at}.weight", linear.weight
    yield f"{at}.bias", linear.bias_or_zero()


def norm_tensors(
    at: str, norm: Norm | None, near: Lazy, *, stored_minus: float = 0.0, biased: bool = True
) -> Iterator[tuple[str, Lazy]]:
    """A norm of a type that always has a weight and, where it is ``biased``, a bias.

    The weight is stored less ``stored_minus``. ``near`` has as many columns as the norm has channels.
    """
    assert norm is not None
    shape = (near.shape[1],)
    weight = norm.weight or near.filled(shape, 1.0)
    if stored_minus:
        weight = weight.then(lambda values: wide(values) - stored_minus)
    yield f"{at}.weight", weight
    if biased:
        yield f"{at}.bias", norm.bias or near.filled(shape, 0.0)


PHI = TargetType(
    "phi",
    "PhiForCausalLM",
    any_groups=True,
    config=_phi_config,
    tensors=_phi_tensors,
    runs="It runs in transformers 4.57 and later.",
    fails=f"{ignored_by('phi')}.",
)
NEMOTRON = TargetType(
    "nemotron",
    "NemotronForCausalLM",
    any_groups=True,
    config=_nemotron_config,
    tensors=_nemotron_tensors,
    runs="It runs in transformers 4.57 and later; vLLM's nemotron reads the number of KV heads and the activation.",
    fails="llama.cpp computes nemotron with another activation (squared ReLU), so its output there would be wrong.",
)
GPT_BIGCODE = TargetType(
    "gpt_bigcode",
    "GPTBigCodeForCausalLM",
    any_groups=False,
    folds_norms=False,
    config=_bigcode_config,
    tensors=_bigcode_tensors,
    runs="It runs in transformers 4.57 and later; with one KV head and a tied head, vLLM and SGLang read it too.",
    fails="llama.cpp computes gpt_bigcode with GELU whatever config.json says; with ReLU (OPT) it goes wrong.",
)
