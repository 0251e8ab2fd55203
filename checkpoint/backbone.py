"""Run a language model up to its head, so that logits can be computed for a few positions at a time.

Letters of shapes: B sequences, T tokens of a sequence, C hidden width, N tokens taken out of their sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UnsupportedError

_ROUNDING = 2**-6
"""Share of the largest logit by which two bfloat16 matrix products of different shape may differ."""


class Backbone:
    """Runs a model up to its head, and runs its head, by the model's own code, on states computed before.

    Args:
        run: computes everything below the head; its output has ``last_hidden_state`` (B, T, C).
        last: the module that hands this state to the head. It does nothing while the head runs alone.
        beside: makes the inputs that the model needs beside token ids while the head runs alone, from the states.
    """

    def __init__(
        self, run: Callable[..., Any], last: nn.Module, beside: Callable[[Tensor], dict[str, Any]] | None = None
    ) -> None:
        self._run, self._last, self._beside = run, last, beside

    @classmethod
    def of(cls, model: Any) -> Backbone | None:
        """Find the backbone of a model, or None if its class has no such part.

        Most classes keep it in one module that has a forward pass. Others have an encoder and a decoder, alone (T5) or
        in a module without a forward pass, and join the two in the forward pass of the whole model.
        """
        found = getattr(model, getattr(model, "base_model_prefix", "") or "-", None)
        inner = found if isinstance(found, nn.Module) and found is not model else None
        if inner is not None and type(inner).forward is not nn.Module.forward:
            return cls(inner, inner, _target_ids if is_encoder_decoder(model) else None)
        encoder, decoder = (getattr(inner or model, side, None) for side in ("encoder", "decoder"))
        if isinstance(encoder, nn.Module) and isinstance(decoder, nn.Module):
            return cls(lambda **inputs: _run_both(encoder, decoder, **inputs), decoder, _nothing_read)
        return None

    def __call__(self, **inputs: Any) -> Any:
        """Compute the outputs below the head, ``last_hidden_state`` among them."""
        return self._run(**inputs)

    @contextmanager
    def answering(self, states_1NC: Tensor) -> Iterator[dict[str, Any]]:
        """Make the model's head answer for these states: call the model with the yielded inputs for their logits.

        The head is not called by itself because many classes scale or cap logits after it, in their forward pass.
        """
        # The states stand in for what the backbone returns, so the head cannot tell the difference.
        outputs = _outputs(pair=self._beside is _target_ids)(last_hidden_state=states_1NC)
        ids_1N = torch.zeros(states_1NC.shape[:2], dtype=torch.long, device=states_1NC.device)
        inputs = {"input_ids": ids_1N, **(self._beside(states_1NC) if self._beside else {})}
        module: Any = self._last
        own = module.__dict__.get("forward")  # accelerate replaces forward on the instance
        module.forward = lambda *_, **__: outputs
        try:
            yield inputs
        finally:
            if own is None:
                del module.forward
            else:
                module.forward = own

    def head(self, model: nn.Module, states_1NC: Tensor) -> Tensor:
        """Run the model's own head on hidden states, and return its logits (1, N, V)."""
        with self.answering(states_1NC) as inputs:
            logits_1NV: Tensor = model(**inputs, use_cache=False).logits
        return logits_1NV


def separable_backbone(model: nn.Module, device: torch.device | str | None = None) -> Backbone | None:
    """Find the backbone of a model whose head, on slices of its states, gives the logits of the whole model.

    Three tokens are tried.

    Args:
        device: where token ids go; None means the device of the weights.

    Returns:
        The backbone, or None where the model must be run whole.
    """
    backbone = Backbone.of(model)
    if backbone is None:
        return None
    ids_1T = torch.zeros(1, 3, dtype=torch.long, device=device or next(model.parameters()).device)
    inputs = trial_inputs(model, ids_1T)
    whole_1TV: Tensor = model(**inputs, use_cache=False).logits.float()
    try:
        hidden_1TC = backbone(**inputs, use_cache=False).last_hidden_state
        slices = [backbone.head(model, hidden_1TC[:, place : place + 1]).float() for place in range(3)]
    except (AttributeError, IndexError, KeyError, TypeError):
        return None  # the model's code needs more from its backbone than hidden states
    apart = (torch.cat(slices, dim=1) - whole_1TV).abs().max()
    return backbone if bool(apart <= _ROUNDING * whole_1TV.abs().max()) else None


def _outputs(pair: bool) -> Any:
    """Choose the class of outputs that has every field a head may read; ``pair`` for encoder and decoder."""
    from transformers import modeling_outputs as known

    return known.Seq2SeqModelOutput if pair else known.MoEModelOutputWithPastAndCrossAttentions


def _run_both(encoder: Any, decoder: Any, **inputs: Any) -> Any:
    """Run the encoder, then the decoder, as the forward pass of T5 and its like does."""
    read_ids, mask = inputs.pop("input_ids"), inputs.pop("attention_mask", None)
    written_ids = inputs.pop("decoder_input_ids")
    read = encoder(input_ids=read_ids, attention_mask=mask).last_hidden_state
    return decoder(input_ids=written_ids, encoder_hidden_states=read, encoder_attention_mask=mask, **inputs)


def _target_ids(states_1NC: Tensor) -> dict[str, Any]:
    return {"decoder_input_ids": torch.zeros(states_1NC.shape[:2], dtype=torch.long, device=states_1NC.device)}


def _nothing_read(states_1NC: Tensor) -> dict[str, Any]:
    """Return a placeholder for the encoder output, which is not read here."""
    from transformers.modeling_outputs import BaseModelOutput

    return {**_target_ids(states_1NC), "encoder_outputs": BaseModelOutput(last_hidden_state=states_1NC[:, :1])}


def is_encoder_decoder(model: Any) -> bool:
    """Tell whether the model reads one sequence and writes another."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def trial_inputs(model: Any, ids_1T: Tensor) -> dict[str, Tensor]:
    """Make inputs to try a model on a few tokens. An encoder-decoder reads and writes the same tokens."""
    return {"input_ids": ids_1T, **({"decoder_input_ids": ids_1T} if is_encoder_decoder(model) else {})}


def decoder_inputs(model: Any, labels_BT: Tensor) -> Tensor:
    """Shift labels (B, T) by one, into the ids that a decoder is given to write them.

    The model's own rule counts. Most models begin with a start token, mBART with the language that ends its labels.

    Raises:
        UnsupportedError: the config does not say which token the decoder starts with.
    """
    from ..libraries.transformers_internals import shift_tokens_right

    own = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    try:
        if own is not None:
            shifted: Tensor = own(labels=labels_BT)
            return shifted
        return shift_tokens_right(model, labels_BT)
    except (AttributeError, KeyError, ValueError) as problem:
        raise UnsupportedError(
            f"config.json of this {type(model).__name__} does not say which token its decoder starts with.",
            "Add the decoder_start_token_id and pad_token_id that the model was trained with.",
        ) from problem
