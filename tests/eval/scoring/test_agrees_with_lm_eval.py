"""Perplexity equals an independent implementation: lm-eval's rolling log-likelihood on the same tokens."""

from __future__ import annotations

import logging
import math
import re
from pathlib import Path

import headfold
import pytest
import torch
from headfold.checkpoint.load import load_language_model, load_tokenizer
from headfold.corpus import open_corpus
from headfold.eval.scoring.perplexity import score
from headfold.eval.scoring.windows import TokenDocument

ROOT = Path(headfold.__file__).parent
BUNDLED = ROOT / "recipes" / "bundled" / "stdlib-5m-mha"
ASSETS = ROOT.parent / "shared" / "assets"
WIKITEXT = ASSETS / "text" / "wikitext2_raw_test.txt"
MODELS = [
    pytest.param(BUNDLED, "stdlib#heldout", id="bundled"),
    *(
        pytest.param(ASSETS / name, str(WIKITEXT), id=name)
        for name in ("pystdlib4m-mha", "stories260k-gqa")
        if (ASSETS / name).is_dir() and WIKITEXT.is_file()
    ),
]
LENGTH = 96


@pytest.mark.parametrize(("folder", "corpus"), MODELS)
def test_word_and_byte_perplexity_equal_lm_evals(folder, corpus):
    from lm_eval.api.instance import Instance
    from lm_eval.api.metrics import weighted_perplexity
    from lm_eval.models.huggingface import HFLM

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    texts = [document.text[:1500] for document in open_corpus(corpus) if len(document.text) >= 1500][:3]
    model, tokenizer = load_language_model(folder, dtype=torch.float32), load_tokenizer(folder)
    theirs = HFLM(pretrained=model, tokenizer=tokenizer, max_length=LENGTH, batch_size=4)
    asked = [Instance("loglikelihood_rolling", {}, (text,), index) for index, text in enumerate(texts)]
    likelihoods = theirs.loglikelihood_rolling(asked, disable_tqdm=True)
    documents = [
        TokenDocument(str(index), [theirs.prefix_token_id, *theirs.tok_encode(text)], len(text.encode()))
        for index, text in enumerate(texts)
    ]
    assert all(document.scored > 2 * LENGTH for document in documents)  # several windows each
    # Their windows predict LENGTH tokens from LENGTH others; ours hold both.
    parts = score(model, documents, window=LENGTH + 1, stride=LENGTH, batch_size=4).per_document()
    for weight in (lambda text: len(re.split(r"\s+", text)), lambda text: len(text.encode())):
        weights = [weight(text) for text in texts]
        expected = weighted_perplexity(list(zip(likelihoods, weights, strict=True)))
        found = math.exp(sum(part.nll_nats for part in parts) / sum(weights))
        assert found == pytest.approx(expected, rel=1e-4)
    other = score(model, documents, window=LENGTH, stride=LENGTH, batch_size=4).total().nll_nats
    assert other != pytest.approx(-sum(likelihoods), rel=1e-4)  # the control: one token less of context is seen
