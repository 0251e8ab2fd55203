"""Make tiny checkpoints and tokenizers."""

from __future__ import annotations

import torch
from headfold.eval.scoring.windows import TokenDocument
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXT = "the cat sat on a mat and then it saw an old dog run far away over green hills"
WORDS = TEXT.split()


def word_tokenizer(*, specials: bool = True, template: bool = False, extra: int = 0) -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token per word; with ``template`` it adds <s> in front."""
    names = ["<unk>", *(["<s>", "</s>"] if specials else []), *WORDS, *(f"x{index}" for index in range(extra))]
    backend = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if template:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    marks = {"bos_token": "<s>", "eos_token": "</s>"} if specials else {}
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", **marks)


def tiny_llama(*, vocab: int = 32, kv_heads: int = 4, seed: int = 0, positions: int = 64) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=positions,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config).eval()


def random_documents(lengths: list[int], *, vocab: int = 32, seed: int = 0) -> list[TokenDocument]:
    generator = torch.Generator().manual_seed(seed)
    return [
        TokenDocument(str(index), torch.randint(vocab, (length,), generator=generator).tolist(), 5 * (length - 1))
        for index, length in enumerate(lengths)
    ]
