"""Encoder-decoders whose class has no KV-head setting, seen as the type of our own that computes the same.

Our types name their parameters as the source's files do, so no tensor changes on the way: only config.json does.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

from ..checkpoint.modelling import OWN_TYPES, OwnType, own_config, own_type
from ..checkpoint.source import Checkpoint
from ..errors import CheckpointError, UnsupportedError
from .rewrites.checkpoint import RetypedCheckpoint
from .rewrites.routes import names_tokenizer
from .shapes import model_class, resolved_config

HEAD = "lm_head.weight"
DECODER, ENCODER = "num_key_value_heads", "encoder_num_key_value_heads"
"""Where config.json of our encoder-decoders keeps the KV heads of the two sides."""
_IDS = ("bos_token_id", "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id")
RUNS = (
    "It runs in transformers 4.57 and 5.24 with trust_remote_code=True, by the file of code beside the weights, and in "
    "headfold as it is."
)
FAILS = "vLLM, SGLang, TensorRT-LLM and llama.cpp do not know the type, and other versions of transformers refuse it."


@dataclass(frozen=True)
class Pair:
    """How one type becomes ours.

    Attributes:
        own: the type of our own.
        source_class: the only class of the source's that it computes the same as.
        settings: (resolved config, whether the head is the embedding) → keys that the source's config has not.
    """

    own: str
    source_class: str
    settings: Callable[[Any, bool], dict[str, Any]]

    @property
    def type(self) -> OwnType:
        return OWN_TYPES[self.own]


def _t5_settings(config: Any, tied: bool) -> dict[str, Any]:
    """T5 1.1 and mT5 do not scale what goes into the head; transformers 5 keeps that apart from tying."""
    return {"scale_decoder_outputs": bool(getattr(config, "scale_decoder_outputs", False)), "tie_word_embeddings": tied}


PAIRS: dict[str, Pair] = {
    "t5": Pair("headfold_t5", "T5ForConditionalGeneration", _t5_settings),
    "mt5": Pair("headfold_t5", "MT5ForConditionalGeneration", _t5_settings),
}


def is_pair(config: dict[str, Any]) -> bool:
    """True for an encoder-decoder of ours, or one that becomes ours."""
    own = own_type(config)
    return config.get("model_type") in PAIRS or (own is not None and own.auto_class == "AutoModelForSeq2SeqLM")


def as_own(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint as the encoder-decoder of our own where it is to become one, else itself.

    Raises:
        UnsupportedError: its class has something that ours has not.
        CheckpointError: config.json is refused by its class.
    """
    pair = PAIRS.get(str(checkpoint.config.get("model_type")))
    if pair is None:
        return checkpoint
    config = own_target_config(checkpoint)
    return RetypedCheckpoint(
        spec=checkpoint.spec,
        folder=checkpoint.folder,
        config=config,
        config_text=json.dumps(config, indent=2, ensure_ascii=False) + "\n",
        headers=checkpoint.headers,
        sharded=checkpoint.sharded,
        tensors=checkpoint.tensors,
        side_files=checkpoint.side_files,
        left_out=checkpoint.left_out,
        notes=checkpoint.notes,
        original=checkpoint,
        source_type=str(checkpoint.config["model_type"]),
        model_type=pair.own,
        class_name=pair.type.model_class,
        runs=RUNS,
        fails=FAILS,
    )


def own_target_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """config.json of our type, with all KV heads; no weights are needed, but then a head is taken to be tied.

    Settings are spelled out, since our class and the source's have other defaults.
    """
    pair = PAIRS[checkpoint.config["model_type"]]
    resolved = resolved_config(checkpoint.config)
    found = model_class(checkpoint.config).__name__
    if found != pair.source_class:
        raise UnsupportedError(
            f"Of type {checkpoint.config['model_type']}, only {pair.source_class} can be converted, not {found}."
        )
    wanted = inspect.signature(pair.type.classes()[0].__init__).parameters
    settings = {name: getattr(resolved, name) for name in wanted if hasattr(resolved, name)}
    decoder, encoder = query_heads(resolved)
    ids = {name: getattr(resolved, name, None) for name in _IDS}
    named = {} if names_tokenizer(checkpoint) else {"tokenizer_class": TOKENIZER_MAPPING_NAMES.get(resolved.model_type)}
    return own_config(
        pair.type,
        {
            **checkpoint.config,
            **settings,
            **{name: value for name, value in {**ids, **named}.items() if value is not None},
            **pair.settings(resolved, HEAD not in checkpoint.tensors),
            DECODER: decoder,
            ENCODER: encoder,
        },
    )


def described_pair(config: dict[str, Any]) -> str | None:
    """What the user gets of a type that becomes ours; None for any other."""
    pair = PAIRS.get(str(config.get("model_type")))
    return pair and f"Kept tensor by tensor as {pair.own} ({pair.type.model_class}). {RUNS} {FAILS}"


def query_heads(resolved: Any) -> tuple[int, int]:
    """Query heads of the decoder and of the encoder.

    Raises:
        CheckpointError: there are none.
    """
    both = tuple(
        int(getattr(resolved, f"{side}_attention_heads", None) or resolved.num_attention_heads)
        for side in ("decoder", "encoder")
    )
    if min(both) < 1:
        raise CheckpointError("config.json asks for a model without heads.", "Repair config.json.")
    return both[0], both[1]


def side(module: str) -> str:
    """Whose keys an attention block of a class of ours reads: ``self`` and ``cross`` in the decoder, ``encoder``."""
    if ".encoder." in f".{module}":
        return "encoder"
    return "cross" if module.endswith(("EncDecAttention", "encoder_attn")) else "self"
