"""What of a model class follows the number of KV heads: its parameters at one number against those at another."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from transformers import PreTrainedModel

from ..errors import UnsupportedError
from .layouts import FUSED

_ROLES: tuple[tuple[str, str], ...] = (
    (r"\.(?P<side>[kv])_proj(?P<inner>\.linear)?\.weight", "{side}"),
    (r"\.(?P<side>[kv])_proj(?P<inner>\.linear)?\.bias", "{side}_bias"),
    (r"\.k(?:ey)?_(?:layer)?norm(?:\.norms\.\d+)?\.weight", "k_norm"),
    (r"\.k(?:ey)?_(?:layer)?norm(?:\.norms\.\d+)?\.bias", "k_norm_bias"),
    (r"\.(?P<side>[kv])(?:_proj\.|_)sconv\.(?:conv1d\.weight|static_weight)", "{side}_conv"),
    (r"\.(?P<side>[kv])_proj\.sconv\.weight_proj\.weight", "{side}_taps"),
)
"""End of a parameter's name → the role of its heads."""
_FUSED_LEAF = re.compile(r"\.(?P<leaf>qkv_proj|Wqkv|query_key_value|c_attn)\.(?P<kind>weight|bias)")


@dataclass(frozen=True)
class Change:
    """One parameter that follows the number of KV heads, or one per head of a numbered kind.

    Attributes:
        module: the attention block that it belongs to.
        names: in the model class.
        layout, axis, suffix, numbered: as in :class:`headfold.convert.layouts.Stored`.
        leaf: the submodule of a fused projection.
    """

    module: str
    names: tuple[str, ...]
    layout: str
    axis: int = 0
    suffix: str = ""
    numbered: bool = False
    leaf: str = ""

    @property
    def fused(self) -> bool:
        return self.layout in FUSED

    @property
    def roles(self) -> tuple[str, ...]:
        return ("q", "k", "v") if self.fused else (self.layout,)


def changed_parameters(
    many: PreTrainedModel, few: PreTrainedModel, kv_heads: int, fewer: int, fused: str | None
) -> Iterator[Change]:
    """Every parameter whose shape differs or that only one of the two has.

    Raises:
        UnsupportedError: a parameter that is no known part of the keys and values follows the number too.
    """
    small = {name: tuple(tensor.shape) for name, tensor in few.state_dict().items()}
    numbered: dict[str, list[str]] = {}
    for name, tensor in many.state_dict().items():
        shape = tuple(tensor.shape)
        if small.get(name) == shape and not _is_numbered(name):
            continue
        if _is_numbered(name):
            numbered.setdefault(re.sub(r"\.norms\.\d+\.", ".norms.#.", name), []).append(name)
            continue
        change = _fused_change(name, fused) or _plain_change(name, shape, small.get(name), kv_heads, fewer)
        if change is None:
            raise _departs(type(many).__name__, name)
        yield change
    for names in numbered.values():
        left = [name for name in names if name in small]
        if len(left) == len(names):
            continue  # the queries' norms
        change = _role(names[0])
        if change is None or (len(names), len(left)) != (kv_heads, fewer):
            raise _departs(type(many).__name__, names[0])
        yield Change(change[0], tuple(names), change[1], numbered=True)


def _is_numbered(name: str) -> bool:
    return re.search(r"\.norms\.\d+\.\w+$", name) is not None


def _plain_change(
    name: str, shape: tuple[int, ...], small: tuple[int, ...] | None, kv_heads: int, fewer: int
) -> Change | None:
    """A parameter with heads along one axis."""
    role = _role(name)
    if role is None or small is None or len(small) != len(shape):
        return None
    axes = [axis for axis, (before, after) in enumerate(zip(shape, small, strict=True)) if before != after]
    if len(axes) != 1 or shape[axes[0]] % kv_heads or shape[axes[0]] * fewer != small[axes[0]] * kv_heads:
        return None
    return Change(role[0], (name,), role[1], axes[0])


def _role(name: str) -> tuple[str, str] | None:
    """(attention block, role) of a parameter, by its name."""
    for ending, role in _ROLES:
        match = re.fullmatch(rf"(?P<module>.+?){ending}", name)
        if match is not None:
            return match["module"], role.format(**match.groupdict())
    return None


def _fused_change(name: str, fused: str | None) -> Change | None:
    match = re.fullmatch(rf"(?P<module>.+){_FUSED_LEAF.pattern}", name)
    if match is None or fused is None:
        return None
    suffix = "_bias" if match["kind"] == "bias" else ""
    return Change(match["module"], (name,), fused, suffix=suffix, leaf=match["leaf"])


def _departs(class_name: str, name: str) -> UnsupportedError:
    if _FUSED_LEAF.search(name) or re.search("qkv|c_attn", name):
        reason = f"it keeps query, key and value rows fused in an order that is not known ({name})"
    else:
        reason = f"{name} also depends on the number of KV heads"
    return UnsupportedError(f"{class_name} cannot be converted: {reason}.")
