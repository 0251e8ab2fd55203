"""The damage predicted before a conversion ranks the measured damage."""

from __future__ import annotations

import pytest
import torch
from calibrated import calibration_text, convert_calibrated
from headfold import recipes
from headfold.convert.inspect import predict_loss
from headfold.convert.run import plan_conversion
from headfold.corpus import open_corpus
from headfold.eval.scoring.perplexity import score
from headfold.eval.scoring.windows import tokenize_text
from scipy.stats import spearmanr


@pytest.mark.slow
def test_the_predicted_loss_ranks_the_measured_perplexity(tmp_path):
    """The bundled model with some of its layers converted only: 3 single layers and whole models, G = 4, 2, 1.

    Converting one layer at a time gives outcomes between which the prediction can be wrong: layer and G both vary.
    """
    from pathlib import Path

    from headfold.checkpoint.load import load_language_model, load_tokenizer

    source = Path(recipes.__file__).parent / "bundled" / "stdlib-5m-mha"
    file = tmp_path / "moments.safetensors"
    calibration = calibration_text("stdlib", tokens=16_384, refine=0, statistics=file)
    documents = tokenize_text(load_tokenizer(source), open_corpus("stdlib#heldout"), max_tokens=4096).documents
    predicted, measured = [], []
    for groups in (4, 2, 1):
        folder = tmp_path / f"folded-{groups}"
        convert_calibrated(plan_conversion(source, groups=groups, method="folded"), folder, calibration)
        losses = {loss.layer: loss.total for loss in predict_loss(source, [groups], file)}
        converted = load_language_model(folder, dtype=torch.float32)
        for layers in ({0}, {2}, {4}, set(losses)):
            model = load_language_model(source, dtype=torch.float32)
            for layer in layers:
                model.model.layers[layer].self_attn = converted.model.layers[layer].self_attn
            predicted.append(sum(losses[layer] for layer in layers))
            measured.append(score(model, documents).total().perplexity)
    assert len(predicted) == 12
    assert spearmanr(predicted, measured).statistic > 0.6  # 0.77 on CPython 3.11's text
