"""Score a model on held-out text, with the logits of a slice of tokens in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...checkpoint.backbone import Backbone, decoder_inputs, separable_backbone
from ...libraries.accelerate_internals import weights_in_memory

_LOGITS_BYTES = 64 * 2**20
"""Bytes of float32 logits in memory at once."""


@dataclass(frozen=True)
class HeldOutText:
    """Held-out text, as a model is scored on it.

    Attributes:
        written_BT: token ids to predict: the text itself, or what an encoder-decoder writes.
        read_BS: token ids that an encoder reads; None for a decoder.
    """

    written_BT: Tensor
    read_BS: Tensor | None = None

    @property
    def scored(self) -> int:
        """Number of scored tokens. The first of a text that a decoder reads has nothing before it."""
        sequences, length = self.written_BT.shape
        return sequences * (length if self.read_BS is not None else length - 1)

    def batches(self, tokens: int) -> Iterator[HeldOutText]:
        """Yield parts of about so many tokens, whole sequences."""
        sides = [self.written_BT, *([] if self.read_BS is None else [self.read_BS])]
        size = max(tokens // sum(side.shape[1] for side in sides), 1)
        for parts in zip(*(side.split(size) for side in sides), strict=True):
            yield HeldOutText(*parts)

    def inputs(self, model: Any, device: torch.device | str) -> dict[str, Tensor]:
        """Make the arguments that the model is called with."""
        if self.read_BS is None:
            return {"input_ids": self.written_BT.to(device)}
        shifted_BT = decoder_inputs(model, self.written_BT.to(device))
        return {"input_ids": self.read_BS.to(device), "decoder_input_ids": shifted_BT}

    def of_targets(self, states_BTX: Tensor) -> Tensor:
        """Keep the positions whose logits predict a scored token: (N, X)."""
        return (states_BTX[:, :-1] if self.read_BS is None else states_BTX).flatten(0, 1)

    @property
    def targets_N(self) -> Tensor:
        """The scored token ids."""
        return (self.written_BT[:, 1:] if self.read_BS is None else self.written_BT).flatten()


@torch.no_grad()
def loss_per_token(model: Any, text: HeldOutText, *, device: torch.device | str, batch_tokens: int = 4096) -> float:
    """Compute the mean cross-entropy in nats per scored token.

    The model runs up to its head on ``batch_tokens`` tokens at a time, as in calibration. Its head runs on slices. Sums
    are float64.

    Args:
        model: in eval mode; its weights may be on disk.
        device: where token ids go; the model is there already.
    """
    backbone = separable_backbone(model, device)
    if backbone is None:
        # Its logits cannot be sliced, so one sequence at a time bounds them.
        found = (
            _loss(part.of_targets(model(**part.inputs(model, device), use_cache=False).logits), part.targets_N)
            for part in text.batches(1)
        )
        return sum(found) / text.scored
    states_NC = torch.cat(
        [
            part.of_targets(backbone(**part.inputs(model, device), use_cache=False).last_hidden_state)
            for part in text.batches(batch_tokens)
        ]
    )
    return _loss_of_states(model, backbone, states_NC, text.targets_N, device) / text.scored


def _loss_of_states(
    model: Any, backbone: Backbone, states_NC: Tensor, targets_N: Tensor, device: torch.device | str
) -> float:
    size = max(1, _LOGITS_BYTES // (4 * model.get_input_embeddings().weight.shape[0]))
    total = 0.0
    with _head_in_memory(model, device):
        for slice_NC, slice_N in zip(states_NC.split(size), targets_N.split(size), strict=True):
            total += _loss(backbone.head(model, slice_NC[None])[0], slice_N)
    return total


@contextmanager
def _head_in_memory(model: Any, device: torch.device | str) -> Iterator[None]:
    """Keep a head whose weights are on disk in memory, so that they are read once and not for every slice."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Module):
        yield
        return
    with weights_in_memory(head) as read:
        if read:
            head.to(device)
        yield


def _loss(logits_NV: Tensor, targets_N: Tensor) -> float:
    losses_N = functional.cross_entropy(logits_NV.float(), targets_N.to(logits_NV.device), reduction="none")
    return float(losses_N.double().sum())
