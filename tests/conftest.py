"""Shared by all tests: quiet libraries, no hub, and ``tiny`` (the factory of tiny models) on the path."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
# Hashes of files in temporary folders are of no use to anybody later.
_cache = tempfile.TemporaryDirectory(prefix="headfold-cache-")
os.environ["HEADFOLD_CACHE"] = _cache.name
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "convert"))

import pytest  # noqa: E402
import torch  # noqa: E402

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]


@pytest.fixture(scope="session")
def text_file(tmp_path_factory) -> Path:
    """400 short documents as JSON lines: counting through WORDS from a varying start."""
    file = tmp_path_factory.mktemp("text") / "corpus.jsonl"
    lines = []
    for start in range(400):
        words = [WORDS[(start * 3 + step * (1 + start % 2)) % len(WORDS)] for step in range(12 + start % 9)]
        lines.append(json.dumps({"text": " ".join(words)}))
    file.write_text("\n".join(lines) + "\n")
    return file


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory) -> Path:
    """A random two-layer Llama (hidden 32, 4 heads) in bfloat16, with a word-level tokenizer that has only eos."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny") / "source"
    vocabulary = {word: number for number, word in enumerate(["<eos>", "<unk>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", unk_token="<unk>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True, bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def word_tokenizer():
    """One token per word of WORDS, with eos, pad, and sentinels as T5 has them: the last id is <extra_id_0>."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    sentinels = [f"<extra_id_{number}>" for number in range(20)]
    vocabulary = {word: number for number, word in enumerate(["<pad>", "</s>", "<unk>", *WORDS, *reversed(sentinels)])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", unk_token="<unk>", pad_token="<pad>")


@pytest.fixture(scope="session")
def tiny_t5(tmp_path_factory, word_tokenizer) -> Path:
    """A random two-layer T5 (hidden 32, 4 heads) in float32, without dropout."""
    from transformers import T5Config, T5ForConditionalGeneration

    folder = tmp_path_factory.mktemp("tiny") / "t5"
    word_tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=len(word_tokenizer), d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    T5ForConditionalGeneration(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def pairs_file(tmp_path_factory) -> Path:
    """60 pairs of unequal lengths as JSON lines: words, and the same words in reverse."""
    file = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    texts = [[WORDS[(start + step) % len(WORDS)] for step in range(3 + start % 7)] for start in range(60)]
    lines = [json.dumps({"input": " ".join(words), "answer": {"back": " ".join(words[::-1])}}) for words in texts]
    file.write_text("\n".join(lines) + "\n")
    return file
