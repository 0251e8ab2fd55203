"""A language model below its head, so that logits can be computed for a few positions at a time.

Letters of shapes: B sequences, T tokens, C hidden size, N positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UnsupportedError


class Backbone:
    """Runs a model up to its head; and lets the model's own code run its head on states computed before.

    Args:
        run: computes what is below the head, with ``last_hidden_state`` (B, T, C) in what it returns.
        last: the module that gives that state to the head; silenced while the head runs alone.
        beside: what a call of the model needs beside token ids while ``last`` is silenced, given the states.
    """

    def __init__(
        self, run: Callable[..., Any], last: nn.Module, beside: Callable[[Tensor], dict[str, Any]] | None = None
    ) -> None:
        self._run, self._last, self._beside = run, last, beside

    @classmethod
    def of(cls, model: Any) -> Backbone | None:
        """That of a model, or None where its class has no such part.

        Most classes keep it in one module that runs. Others have encoder and decoder, alone (T5) or in a module that
        only holds them, and their own forward pass brings the two together.
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
        """The outputs for these inputs of the model, ``last_hidden_state`` among them."""
        return self._run(**inputs)

    @contextmanager
    def answering(self, states_1NC: Tensor) -> Iterator[dict[str, Any]]:
        """While open, a call of the model with the inputs yielded gives its head's logits for these states."""
        outputs = _outputs(pair=self._beside is _target_ids)(last_hidden_state=states_1NC)
        ids_1N = torch.zeros(states_1NC.shape[:2], dtype=torch.long, device=states_1NC.device)
        inputs = {"input_ids": ids_1N, **(self._beside(states_1NC) if self._beside else {})}
        module: Any = self._last
        own = module.__dict__.get("forward")  # accelerate puts a forward of its own there
        module.forward = lambda *_, **__: outputs
        try:
            yield inputs
        finally:
            if own is None:
                del module.forward
            else:
                module.forward = own


def _outputs(pair: bool) -> Any:
    """What a module below a head returns, with every field that a head reads; ``pair``: of encoder and decoder."""
    from transformers import modeling_outputs as known

    return known.Seq2SeqModelOutput if pair else known.MoEModelOutputWithPastAndCrossAttentions


def _run_both(encoder: Any, decoder: Any, **inputs: Any) -> Any:
    """Encoder, then decoder, as the forward pass of a class of the T5 kind has them."""
    read_ids, mask = inputs.pop("input_ids"), inputs.pop("attention_mask", None)
    written_ids = inputs.pop("decoder_input_ids")
    read = encoder(input_ids=read_ids, attention_mask=mask).last_hidden_state
    return decoder(input_ids=written_ids, encoder_hidden_states=read, encoder_attention_mask=mask, **inputs)


def _target_ids(states_1NC: Tensor) -> dict[str, Any]:
    return {"decoder_input_ids": torch.zeros(states_1NC.shape[:2], dtype=torch.long, device=states_1NC.device)}


def _nothing_read(states_1NC: Tensor) -> dict[str, Any]:
    """Instead of an encoder's output, which a silenced decoder does not look at."""
    from transformers.modeling_outputs import BaseModelOutput

    return {**_target_ids(states_1NC), "encoder_outputs": BaseModelOutput(last_hidden_state=states_1NC[:, :1])}


def is_encoder_decoder(model: Any) -> bool:
    """The model reads one sequence and writes another."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def trial_inputs(model: Any, ids_1T: Tensor) -> dict[str, Tensor]:
    """Inputs for a try of a model on a few tokens; an encoder-decoder reads and writes the same ones."""
    return {"input_ids": ids_1T, **({"decoder_input_ids": ids_1T} if is_encoder_decoder(model) else {})}


def decoder_inputs(model: Any, labels_BT: Tensor) -> Tensor:
    """What an encoder-decoder's decoder is given to write these labels, (B, T): they moved on by one.

    The model's own rule: most begin with their start token, mbart with the language that closes its labels.

    Raises:
        UnsupportedError: the config does not say what the decoder starts with.
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
            f"config.json of this {type(model).__name__} does not say what its decoder starts with.",
            "Add decoder_start_token_id and pad_token_id, as the model was trained with.",
        ) from problem
