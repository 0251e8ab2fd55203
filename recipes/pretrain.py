"""Pretrain the bundled model on the source of Python's standard library: ``make bundled-model``.

A natural MHA Llama (8 heads of width 32, 5 layers, byte-level BPE of 4,096 tokens, tied embeddings, context 512),
trained by headfold's own trainer from random weights. About an hour on two cores.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from ..console import error, info
from ..corpus import TRAIN, Corpus, open_corpus
from ..errors import HeadfoldError
from ..uptrain.run import uptrain_checkpoint
from ..uptrain.settings import UptrainSettings

BUNDLED = Path(__file__).parent / "bundled" / "stdlib-5m-mha"
_SEPARATOR = "<|endoftext|>"
_VOCABULARY, _CONTEXT = 4096, 512

SETTINGS = UptrainSettings(
    data="stdlib",
    tokens=12_000_000,
    sequence_length=_CONTEXT,
    batch=8,
    micro_batch=8,
    # high, because the model is small
    learning_rate=2e-3,
    final_learning_rate=0.02,
    warmup=0.03,
    weight_decay=0.1,
    precision="bf16",
    seed=1,
    log_every=20,
    save_every=250,
    eval_data="stdlib",
    eval_tokens=32_768,
)


def write_blank(folder: Path, corpus: Corpus) -> None:
    """Write a checkpoint without weights: a config, and a tokenizer trained on ``corpus``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=[_SEPARATOR],
        # all 256 bytes, so that any text can be written
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator((document.text for document in corpus), trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=_SEPARATOR, bos_token=_SEPARATOR, model_max_length=_CONTEXT
    ).save_pretrained(folder)
    LlamaConfig(
        # no model exists yet that could name its class
        architectures=["LlamaForCausalLM"],
        vocab_size=_VOCABULARY,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=32,
        max_position_embeddings=_CONTEXT,
        tie_word_embeddings=True,
        # one token separates documents: the end of one and the beginning of the next
        bos_token_id=0,
        eos_token_id=0,
        # the dtype of the result; training keeps float32 weights
        dtype="bfloat16",
    ).save_pretrained(folder)
    GenerationConfig(bos_token_id=0, eos_token_id=0).save_pretrained(folder)


def pretrain(out: Path, settings: UptrainSettings = SETTINGS) -> Path:
    """Train a tokenizer, then the model from random weights. A run that was interrupted continues."""
    with tempfile.TemporaryDirectory() as scratch:
        blank = Path(scratch)
        write_blank(blank, open_corpus(settings.corpora[0], TRAIN))
        return uptrain_checkpoint(blank, out, settings, from_scratch=True, overwrite=True)


if __name__ == "__main__":
    try:
        info(f"The pretrained model is at {pretrain(Path(sys.argv[1]) if len(sys.argv) > 1 else BUNDLED)}.")
    except HeadfoldError as problem:
        error(problem.message, problem.hint)
        sys.exit(problem.exit_code)
