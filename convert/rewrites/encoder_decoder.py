"""Encoder-decoders whose class has no KV-head setting, seen as the type of our own that computes the same.

Our types name their parameters as the source's files do, so no tensor changes on the way: only config.json does.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

from ...checkpoint.modelling import OWN_TYPES, OwnModelType, own_config, own_type
from ...checkpoint.source import CONFIG_NAME, Checkpoint
from ...errors import CheckpointError, UnsupportedError
from ...libraries.transformers_internals import generation_settings
from ..family.meta_model import quiet_transformers, resolved_config
from .retyped import RetypedCheckpoint
from .routes import names_tokenizer

GENERATION_CONFIG_NAME = "generation_config.json"
HEAD, EMBEDDINGS = "lm_head.weight", ("shared.weight", "model.shared.weight")
_COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
_ROWS = 4096
DECODER, ENCODER = "num_key_value_heads", "encoder_num_key_value_heads"
"""Where config.json of our encoder-decoders keeps the KV heads of the two sides."""
_IDS = ("bos_token_id", "decoder_start_token_id")
RUNS = (
    "It runs in transformers 4.57 and 5.24 with trust_remote_code=True, by the file of code beside the weights, and in "
    "headfold as it is."
)
FAILS = "vLLM, SGLang, TensorRT-LLM and llama.cpp do not know the type, and other versions of transformers refuse it."


@dataclass(frozen=True)
class EncoderDecoderType:
    """How one type becomes ours.

    Attributes:
        own: the type of our own.
        classes: of the source, whose weights are those of ours; the first has all of them.
        settings: (source, resolved config) → keys that the source's config has not, or means otherwise.
    """

    own: str
    classes: tuple[str, ...]
    settings: Callable[[Checkpoint, Any], dict[str, Any]]

    @property
    def type(self) -> OwnModelType:
        return OWN_TYPES[self.own]


def _t5_settings(checkpoint: Checkpoint, config: Any) -> dict[str, Any]:
    """T5 1.1 and mT5 do not scale what goes into the head; transformers 5 keeps that apart from tying."""
    return {"scale_decoder_outputs": bool(getattr(config, "scale_decoder_outputs", False))}


def _bart_settings(**kind: Any) -> Callable[[Checkpoint, Any], dict[str, Any]]:
    """What tells one of BART's kin from the others; a table of waves that the file holds is read from there."""

    def settings(checkpoint: Checkpoint, config: Any) -> dict[str, Any]:
        if not getattr(config, "share_encoder_decoder_embeddings", True):
            raise _two_embeddings(config)
        stored = any(name.endswith("embed_positions.weight") for name in checkpoint.tensors)
        table = {"positions": "table"} if stored and kind["positions"] == "waves" else {}
        return {**kind, **table, "logits_bias": "final_logits_bias" in checkpoint.tensors}

    return settings


_POST, _PRE = ({"norms_first": first, "final_norm": first} for first in (False, True))
_TABLE = {"embedding_norm": True, "positions": "table", "position_offset": 2}
_WAVES = {"embedding_norm": False, "positions": "waves", "position_offset": 0}
_PAST_PADDING = {**_WAVES, "positions": "waves_past_padding"}

PAIRS: dict[str, EncoderDecoderType] = {
    "t5": EncoderDecoderType(
        "headfold_t5", ("T5ForConditionalGeneration", "T5Model", "T5WithLMHeadModel"), _t5_settings
    ),
    "mt5": EncoderDecoderType("headfold_t5", ("MT5ForConditionalGeneration", "MT5Model"), _t5_settings),
    "bart": EncoderDecoderType(
        "headfold_bart", ("BartForConditionalGeneration", "BartModel"), _bart_settings(**_POST, **_TABLE)
    ),
    "mbart": EncoderDecoderType(
        "headfold_bart",
        ("MBartForConditionalGeneration", "MBartModel"),
        _bart_settings(**_PRE, **_TABLE, starts_with_last_token=True),
    ),
    "marian": EncoderDecoderType("headfold_bart", ("MarianMTModel", "MarianModel"), _bart_settings(**_POST, **_WAVES)),
    "pegasus": EncoderDecoderType(
        "headfold_bart", ("PegasusForConditionalGeneration", "PegasusModel"), _bart_settings(**_PRE, **_WAVES)
    ),
    "m2m_100": EncoderDecoderType(
        "headfold_bart", ("M2M100ForConditionalGeneration", "M2M100Model"), _bart_settings(**_PRE, **_PAST_PADDING)
    ),
}


def _two_embeddings(config: Any) -> UnsupportedError:
    return UnsupportedError(
        f"This {config.model_type} checkpoint has one embedding for the encoder and another for the decoder, which "
        "headfold's code for it has not."
    )


def is_own_pair(config: dict[str, Any]) -> bool:
    """True for an encoder-decoder of ours."""
    own = own_type(config)
    return own is not None and own.auto_class == "AutoModelForSeq2SeqLM"


def is_pair(config: dict[str, Any]) -> bool:
    """True for an encoder-decoder of ours, or one that becomes ours."""
    return config.get("model_type") in PAIRS or is_own_pair(config)


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
    source_type = checkpoint.config["model_type"]
    pair, resolved = PAIRS[source_type], resolved_config(checkpoint.config)
    named = checkpoint.config.get("architectures") or pair.classes[:1]
    if not isinstance(named, (list, tuple)) or not set(named) & set(pair.classes):
        raise UnsupportedError(f"Of type {source_type}, only {pair.classes[0]} can be converted, not {named}.")
    if not all(_is_embedding(checkpoint, name) for name in checkpoint.tensors if name.endswith(_COPIES)):
        raise _two_embeddings(resolved)
    wanted = inspect.signature(pair.type.classes()[0].__init__).parameters
    settings = {name: getattr(resolved, name) for name in wanted if hasattr(resolved, name)}
    decoder, encoder = query_heads(resolved)
    ids = {name: getattr(resolved, name, None) for name in _IDS}
    tokenizer = None if names_tokenizer(checkpoint) else TOKENIZER_MAPPING_NAMES.get(source_type)
    return own_config(
        pair.type,
        {
            **checkpoint.config,
            **settings,
            **{name: value for name, value in {**ids, "tokenizer_class": tokenizer}.items() if value is not None},
            "tie_word_embeddings": _ties_head(checkpoint, resolved),
            **pair.settings(checkpoint, resolved),
            DECODER: decoder,
            ENCODER: encoder,
        },
    )


def _ties_head(checkpoint: Checkpoint, resolved: Any) -> bool:
    """True when the output head is the embedding: it is not in the files, or there it is the same."""
    if not resolved.tie_word_embeddings or HEAD not in checkpoint.tensors:
        return bool(resolved.tie_word_embeddings)
    return _is_embedding(checkpoint, HEAD)


def _is_embedding(checkpoint: Checkpoint, name: str) -> bool:
    """True when this tensor has the numbers of the shared embedding, or that is not in the files."""
    embedding = next((shared for shared in EMBEDDINGS if shared in checkpoint.tensors), None)
    if embedding is None:
        return True
    here, there = (checkpoint.read(one) for one in (name, embedding))
    if here.shape != there.shape:
        return False
    slices = zip(here.split(_ROWS), there.split(_ROWS), strict=True)  # so that little of them is in memory
    return all(torch.equal(mine.double(), theirs.double()) for mine, theirs in slices)


def described_pair(config: dict[str, Any]) -> str | None:
    """What the user gets of a type that becomes ours; None for any other."""
    pair = PAIRS.get(str(config.get("model_type")))
    return None if pair is None else f"Kept tensor by tensor as {pair.own} ({pair.type.model_class}). {RUNS} {FAILS}"


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


def refuse_refinement(config: dict[str, Any]) -> None:
    """Refinement fits one layer after the other to one text, and cross-attention reads two.

    Raises:
        UnsupportedError: it is an encoder-decoder.
    """
    if is_pair(config):
        raise UnsupportedError(
            f"Refinement is not offered for encoder-decoders ({config['model_type']}).",
            "Leave --refine out, and uptrain the result.",
        )


def settle_generation(source: Checkpoint, folder: Path) -> None:
    """Write how a checkpoint generates where config.json alone said so: as another type it would lose a part of that.

    What the source's class has as defaults (BART forces the last token) counts where config.json is silent.

    Args:
        source: as it is on disk.
    """
    if (folder / GENERATION_CONFIG_NAME).exists():
        return
    with quiet_transformers():
        usual = GenerationConfig.from_model_config(resolved_config(source.config))
        said = GenerationConfig.from_pretrained(source.folder, config_file_name=CONFIG_NAME)
        # not by save_pretrained, which refuses settings that transformers loads
        generation_settings(usual, said).to_json_file(folder / GENERATION_CONFIG_NAME)


def side(module: str) -> str:
    """Whose keys an attention block of a class of ours reads: ``self`` and ``cross`` in the decoder, ``encoder``."""
    if ".encoder." in f".{module}":
        return "encoder"
    return "cross" if module.endswith(("EncDecAttention", "encoder_attn")) else "self"
