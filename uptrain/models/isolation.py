"""Check that a model keeps documents apart that are packed into one sequence."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import UnsupportedError
from ..data.batches import PackedBatch

_TOLERANCE = 1e-4  # share of the largest logit
_TOKENS = 5  # of each of the two documents that are tried


def refuse_leaks(model: Any) -> None:
    """Try two short documents in one sequence: the second must get the logits that it gets alone.

    Raises:
        UnsupportedError: it does not, so the first leaks into it, or the class takes no positions.
    """
    ids_BT = torch.arange(2 * _TOKENS)[None] % (model.get_input_embeddings().weight.shape[0] - 1) + 1
    opens_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
    opens_BT[:, [0, _TOKENS]] = True
    training = model.training
    model.eval()  # dropout would make the logits differ
    try:
        with torch.no_grad():
            packed = model(use_cache=False, **PackedBatch(ids_BT, opens_BT, 0, isolate=True).inputs).logits
            alone = model(input_ids=ids_BT[:, _TOKENS:], use_cache=False).logits
        difference = float((packed[:, _TOKENS:] - alone).abs().max() / alone.abs().max())
    except TypeError:
        difference = float("inf")
    finally:
        model.train(training)
    if not difference <= _TOLERANCE:  # in this form NaN is refused as well
        raise UnsupportedError(
            f"{type(model).__name__} lets documents packed into one sequence see each other.",
            "Train without --isolate-documents, as most models were pretrained.",
        )
