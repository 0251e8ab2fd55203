"""Compute a language model's logits, a slice of positions at a time.

Letters of shapes: B windows in a batch, T tokens in a window, C hidden width, N scored tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...checkpoint.backbone import Backbone, trial_inputs
from ...corpus import refuse_unknown_ids
from .batches import AnyBatch

_ROUNDING = 2**-6
"""Share of the largest logit by which two bfloat16 matrix products of different shape may differ."""
_LOGITS_BYTES = 128 * 2**20
"""Bytes of float32 logits in memory at once."""


class SlicedLogits:
    """Runs a model up to its head once per batch, then its head on slices of the scored positions.

    The head is the model's own code, with its soft-capping and scaling: the model is called again with a backbone that
    returns a slice of the hidden states computed before. Three tokens are tried first to check that this gives the
    model's logits. A model that fails the check, and one sharded over processes, is run whole; then only the float32
    copy of its logits is sliced.

    Args:
        model: a language model in eval mode.
        logits_bytes: bytes of float32 logits in memory at once.
    """

    def __init__(self, model: nn.Module, logits_bytes: int = _LOGITS_BYTES) -> None:
        self._model = model
        self._logits_bytes = logits_bytes
        self._device = next(model.parameters()).device
        self._embeddings = _input_embeddings(model)
        self._backbone = _backbone(model)

    def slices(
        self, batch: AnyBatch, vocab: int | None = None, size: int | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Compute float32 logits (N, V) and targets (N) for consecutive slices of the batch's scored tokens.

        Args:
            vocab: cut to the first ids.
            size: tokens of a slice (default as many as ``logits_bytes`` allow).

        Raises:
            DataError: a token id is outside the model's vocabulary.
        """
        states = self.states(batch)
        targets_N = batch.targets_N.to(self._device)
        size = size or self.slice_size(vocab)
        for first in range(0, len(targets_N), size):
            logits_NV = self.logits(states[first : first + size], vocab)
            yield logits_NV, targets_N[first : first + size].to(logits_NV.device)

    def slice_size(self, vocab: int | None = None) -> int:
        """Compute the number of positions whose float32 logits fit into ``logits_bytes``."""
        return max(1, self._logits_bytes // (4 * (vocab or self._embeddings)))

    def states(self, batch: AnyBatch) -> Tensor:
        """Run the model up to its head: hidden states (N, C), or logits (N, V) of a model that is run whole."""
        refuse_unknown_ids(batch.highest, self._embeddings)
        inputs = {name: found.to(self._device) for name, found in batch.inputs(self._model).items()}
        if self._backbone is None:
            states: Tensor = self._model(**inputs, use_cache=False).logits
        else:
            states = self._backbone(**inputs, use_cache=False).last_hidden_state
        return states[batch.rows_N.to(states.device), batch.columns_N.to(states.device)]

    def logits(self, states: Tensor, vocab: int | None = None) -> Tensor:
        """Turn some of the :meth:`states` into float32 logits (N, V), cut to the first ``vocab`` ids."""
        if self._backbone is None:
            return states[:, :vocab].float()
        return _head(self._model, self._backbone, states[None])[0, :, :vocab].float()


def _input_embeddings(model: Any) -> int:
    return int(model.get_input_embeddings().weight.shape[0])


def _backbone(model: nn.Module) -> Backbone | None:
    """Find the part below the head, None when the model must be run whole."""
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return None  # its shards are put together only inside a forward pass of the whole model
    found = Backbone.of(model)
    return found if found is not None and _separable(model, found) else None


def _separable(model: nn.Module, backbone: Backbone) -> bool:
    """Check that the head on slices of the backbone's hidden states gives the logits of the whole model."""
    ids_1T = torch.zeros(1, 3, dtype=torch.long, device=next(model.parameters()).device)
    inputs = trial_inputs(model, ids_1T)
    whole_1TV: Tensor = model(**inputs, use_cache=False).logits.float()
    try:
        hidden_1TC = backbone(**inputs, use_cache=False).last_hidden_state
        slices = [_head(model, backbone, hidden_1TC[:, place : place + 1]).float() for place in range(3)]
    except (AttributeError, IndexError, KeyError, TypeError):
        return False  # the model's code needs more from its backbone than hidden states
    apart = (torch.cat(slices, dim=1) - whole_1TV).abs().max()
    return bool(apart <= _ROUNDING * whole_1TV.abs().max())


def _head(model: nn.Module, backbone: Backbone, hidden_1NC: Tensor) -> Tensor:
    """Run the model's own head on hidden states and return logits (1, N, V)."""
    with backbone.answering(hidden_1NC) as inputs:
        logits_1NV: Tensor = model(**inputs, use_cache=False).logits
    return logits_1NV
