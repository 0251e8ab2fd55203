"""Find out how a model class rotates its heads, by rotating unit vectors with it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...libraries.transformers_internals import mentions_rotation, rotation_of

_POSITION = 3


@dataclass(frozen=True)
class Rotary:
    """The pairing of a head's rows by the rotary position embedding.

    Attributes:
        layout: ``half`` pairs row f with row f + dim/2, ``interleaved`` pairs 2f with 2f + 1, ``none`` rotates nothing.
        dim: how many leading rows of a head are rotated; the others pass through.
    """

    layout: str
    dim: int


NOT_ROTATED = Rotary("none", 0)


def rotary_of(model: PreTrainedModel, attention: nn.Module, head_dim: int) -> Rotary | None:
    """Find out how the class rotates the heads of ``attention``. None if that is not certain.

    The class's own ``apply_rotary_pos_emb`` turns unit vectors with the tables of its own rotary module; the result,
    a D×D matrix, must turn exactly the pairs of a known layout.
    """
    if not mentions_rotation(attention):
        return NOT_ROTATED
    apply = rotation_of(attention)
    if apply is None:
        return None
    try:
        found = {_layout(_rotate_units(apply, cos, sin, head_dim)) for cos, sin in _tables(model, head_dim)}
    except (TypeError, ValueError, AttributeError, RuntimeError, KeyError, IndexError):
        return None  # a class of another build: nothing is known, and methods that need to know refuse
    return found.pop() if len(found) == 1 else None


def _tables(model: PreTrainedModel, head_dim: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Cosines and sines at one position, for every kind of layer that the rotary module tells apart."""
    config = model.config.get_text_config()
    embeddings = {type(module) for name, module in model.named_modules() if name.split(".")[-1] == "rotary_emb"}
    for embedding in embeddings:
        inputs = torch.zeros(1, 1, head_dim), torch.tensor([[_POSITION]])
        if "layer_type" not in inspect.signature(embedding.forward).parameters:
            yield embedding(config)(*inputs)
            continue
        for kind in dict.fromkeys(config.layer_types):
            yield embedding(config)(*inputs, kind)


def _rotate_units(apply: object, cos: Tensor, sin: Tensor, head_dim: int) -> Tensor:
    """Row i: what becomes of the unit vector e_i. Partial rotary classes hand over the leading rows only."""
    assert callable(apply)
    rotated = min(cos.shape[-1], head_dim)
    units = torch.eye(head_dim)[None, None]  # (batch, heads, one "token" per unit vector, D)
    head, tail = units[..., :rotated], units[..., rotated:]
    places = (1, head_dim, cos.shape[-1])
    for lead in (units, head):
        try:
            turned, _ = apply(lead, lead, cos.expand(places), sin.expand(places))
        except RuntimeError:
            continue
        return torch.cat((turned, tail), -1)[0, 0] if turned.shape[-1] < head_dim else turned[0, 0]
    raise RuntimeError("the rotation does not apply to heads of this width")


def _layout(turned: Tensor) -> Rotary | None:
    """Recognise a D×D rotation."""
    size = turned.shape[0]
    moved = [index for index in range(size) if not torch.equal(turned[index], torch.eye(size)[index])]
    dim = moved[-1] + 1 if moved else 0
    if dim % 2:
        return None
    pairs = {
        "half": [(plane, plane + dim // 2) for plane in range(dim // 2)],
        "interleaved": [(2 * plane, 2 * plane + 1) for plane in range(dim // 2)],
    }
    for layout, planes in pairs.items():
        if _turns_only(turned, planes):
            return Rotary(layout, dim)
    return None


def _turns_only(turned: Tensor, planes: list[tuple[int, int]]) -> bool:
    """True when ``turned`` is one scaled rotation per plane and the identity elsewhere."""
    expected = torch.eye(turned.shape[0])
    for a, b in planes:
        cos, sin = turned[a, a], turned[a, b]
        expected[a, a] = expected[b, b] = cos
        expected[a, b], expected[b, a] = sin, -sin
    return bool(torch.allclose(turned, expected, atol=1e-6))
