"""Present encoder-decoders whose class has no KV-head setting as the type of headfold's own that computes the same.

These types name their parameters as the source's files do, so no tensor changes: only config.json does.
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

from ...checkpoint.load import generation_in_config
from ...checkpoint.modelling import OWN_TYPES, OwnModelType, own_config
from ...checkpoint.source import Checkpoint
from ...errors import UnsupportedError
from ...libraries.transformers_internals import generation_settings
from ..family.kv_config import DECODER, ENCODER, query_heads
from ..family.model_type import ModelType, quiet_transformers
from .retyped import RetypedCheckpoint
from .routes import names_tokenizer

GENERATION_CONFIG_NAME = "generation_config.json"
HEAD, EMBEDDINGS = "lm_head.weight", ("shared.weight", "model.shared.weight")
_COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
_ROWS = 4096
_IDS = ("bos_token_id", "decoder_start_token_id")
RUNS = (
    "It runs in transformers 4.57 and 5.24 with trust_remote_code=True, by the file of code beside the weights, and in "
    "headfold as it is."
)
FAILS = "vLLM, SGLang, TensorRT-LLM and llama.cpp do not know the type, and other versions of transformers refuse it."


@dataclass(frozen=True)
class EncoderDecoderType:
    """One type, and the type of headfold's own that it becomes.

    Attributes:
        own: name of the type of headfold's own.
        classes: classes of the source with the weights of that type; the first has all of them.
        settings: (source, resolved config) → keys that the source's config lacks, or means differently.
    """

    own: str
    classes: tuple[str, ...]
    settings: Callable[[Checkpoint, Any], dict[str, Any]]

    @property
    def type(self) -> OwnModelType:
        return OWN_TYPES[self.own]


def _t5_settings(checkpoint: Checkpoint, config: Any) -> dict[str, Any]:
    """Say whether the head's input is scaled: not in T5 1.1 and mT5. transformers 5 keeps that apart from tying."""
    return {"scale_decoder_outputs": bool(getattr(config, "scale_decoder_outputs", False))}


def _bart_settings(**kind: Any) -> Callable[[Checkpoint, Any], dict[str, Any]]:
    """Make the settings that tell one relative of BART from the others. Stored positions are read from the file."""

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

ENCODER_DECODERS: dict[str, EncoderDecoderType] = {
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
        "headfold's code for it lacks."
    )


def as_own(checkpoint: Checkpoint, model_type: ModelType) -> RetypedCheckpoint:
    """Present an encoder-decoder of :data:`ENCODER_DECODERS` as the type of headfold's own that it becomes.

    Raises:
        UnsupportedError: its class has something that ours lacks.
        CheckpointError: config.json is refused by its class.
    """
    row = ENCODER_DECODERS[model_type.name]
    config = own_target_config(checkpoint, model_type)
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
        source_type=model_type.name,
        model_type=row.own,
        class_name=row.type.model_class,
        runs=RUNS,
        fails=FAILS,
    )


def own_target_config(checkpoint: Checkpoint, model_type: ModelType) -> dict[str, Any]:
    """Make config.json of headfold's own type, with all KV heads.

    No weights are needed. Without them a head is taken to be tied.
    """
    row, resolved = ENCODER_DECODERS[model_type.name], model_type.resolved
    named = checkpoint.config.get("architectures") or row.classes[:1]
    if not isinstance(named, (list, tuple)) or not set(named) & set(row.classes):
        raise UnsupportedError(f"Of type {model_type.name}, only {row.classes[0]} can be converted, not {named}.")
    if not all(_is_embedding(checkpoint, name) for name in checkpoint.tensors if name.endswith(_COPIES)):
        raise _two_embeddings(resolved)
    # Settings are spelled out, since the two classes have different defaults.
    wanted = inspect.signature(row.type.classes()[0].__init__).parameters
    settings = {name: getattr(resolved, name) for name in wanted if hasattr(resolved, name)}
    decoder, encoder = query_heads(resolved)
    ids = {name: getattr(resolved, name, None) for name in _IDS}
    tokenizer = None if names_tokenizer(checkpoint) else TOKENIZER_MAPPING_NAMES.get(model_type.name)
    return own_config(
        row.type,
        {
            **checkpoint.config,
            **settings,
            **{name: value for name, value in {**ids, "tokenizer_class": tokenizer}.items() if value is not None},
            "tie_word_embeddings": _ties_head(checkpoint, resolved),
            **row.settings(checkpoint, resolved),
            DECODER: decoder,
            ENCODER: encoder,
        },
    )


def _ties_head(checkpoint: Checkpoint, resolved: Any) -> bool:
    """Return True if the output head is the embedding: it is not in the files, or its numbers there are the same."""
    if not resolved.tie_word_embeddings or HEAD not in checkpoint.tensors:
        return bool(resolved.tie_word_embeddings)
    return _is_embedding(checkpoint, HEAD)


def _is_embedding(checkpoint: Checkpoint, name: str) -> bool:
    """Return True if this tensor has the numbers of the shared embedding, or the files lack the embedding."""
    embedding = next((shared for shared in EMBEDDINGS if shared in checkpoint.tensors), None)
    if embedding is None:
        return True
    here, there = (checkpoint.read(one) for one in (name, embedding))
    if here.shape != there.shape:
        return False
    slices = zip(here.split(_ROWS), there.split(_ROWS), strict=True)  # so that little of them is in memory
    return all(torch.equal(mine.double(), theirs.double()) for mine, theirs in slices)


def describe_own(model_type: ModelType) -> str:
    """Tell what the user gets of a type of :data:`ENCODER_DECODERS`."""
    row = ENCODER_DECODERS[model_type.name]
    return f"Kept tensor by tensor as {row.own} ({row.type.model_class}). {RUNS} {FAILS}"


def settle_generation(source: Checkpoint, model_type: ModelType, folder: Path) -> None:
    """Write how a checkpoint generates where config.json alone says so, since another type would lose a part of it.

    Defaults of the source's class (BART forces the last token) count where config.json is silent.

    Args:
        source: the checkpoint as it is on disk; ``model_type`` is its type.
    """
    if (folder / GENERATION_CONFIG_NAME).exists():
        return
    with quiet_transformers():
        usual = GenerationConfig.from_model_config(model_type.resolved)
        said = generation_in_config(source.folder)
        # Not by save_pretrained, which refuses settings that transformers loads.
        generation_settings(usual, said).to_json_file(folder / GENERATION_CONFIG_NAME)
