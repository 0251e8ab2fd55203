"""Find the parameters of a model class that depend on the number of KV heads, by comparing it at two numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from transformers import PreTrainedModel

from ...errors import UnsupportedError
from .layout import FUSED

_ROLES: tuple[tuple[str, str], ...] = (
    (r"\.(?P<side>[kv])_proj(?P<inner>\.linear)?\.weight", "{side}"),
    (r"\.(?P<side>[kv])_proj(?P<inner>\.linear)?\.bias", "{side}_bias"),
    (r"\.(?P<side>[kv])\.weight", "{side}"),
    (r"\.k(?:ey)?_(?:layer)?norm(?:\.norms\.\d+)?\.weight", "k_norm"),
    (r"\.k(?:ey)?_(?:layer)?norm(?:\.norms\.\d+)?\.bias", "k_norm_bias"),
    (r"\.(?P<side>[kv])(?:_proj\.|_)sconv\.(?:conv1d\.weight|static_weight)", "{side}_conv"),
    (r"\.(?P<side>[kv])_proj\.sconv\.weight_proj\.weight", "{side}_taps"),
)
"""End of a parameter's name → the role of its heads."""
_Shapes = tuple[tuple[int, ...], tuple[int, ...] | None]
"""Of one parameter, with the source's KV heads and with fewer."""
_NUMBERED = re.compile(r"\.norms\.\d+\.(?=\w+$)")
_FUSED_LEAF = re.compile(r"\.(?P<leaf>qkv_proj|Wqkv|query_key_value|c_attn)\.(?P<kind>weight|bias)")


@dataclass(frozen=True)
class HeadNumbers:
    """The two numbers of KV heads at which a class was built, and its query heads."""

    query_heads: int
    kv_heads: int
    fewer: int


@dataclass(frozen=True)
class KvParameter:
    """One parameter that depends on the number of KV heads; of a numbered kind, the parameters of all heads.

    Attributes:
        module: the attention module that it belongs to.
        names: in the model class.
        layout, axis, suffix, numbered: as in :class:`headfold.convert.family.layout.StoredHeads`.
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


def kv_parameters(
    many: PreTrainedModel, few: PreTrainedModel, numbers: HeadNumbers, fused: str | None
) -> Iterator[KvParameter]:
    """Yield every parameter whose shape differs or that only one of the two classes has.

    Raises:
        UnsupportedError: another parameter than the known parts of keys and values depends on the number, too.
    """
    large, small = ({name: tuple(tensor.shape) for name, tensor in model.state_dict().items()} for model in (many, few))
    for name, shape in large.items():
        if _NUMBERED.search(name) or small.get(name) == shape:
            continue
        found = _fused_parameter(name, (shape, small.get(name)), numbers, fused) or _plain_parameter(
            name, (shape, small.get(name)), numbers
        )
        if found is None:
            raise _departs(type(many).__name__, name)
        yield found
    yield from _numbered_parameters(type(many).__name__, large, small, (numbers.kv_heads, numbers.fewer))


def _numbered_parameters(
    class_name: str, large: Mapping[str, object], small: Mapping[str, object], heads: tuple[int, int]
) -> Iterator[KvParameter]:
    """Yield norms that are one module per head: with fewer KV heads there are fewer of them."""
    numbered: dict[str, list[str]] = {}
    for name in filter(_NUMBERED.search, large):
        numbered.setdefault(_NUMBERED.sub(".norms.#.", name), []).append(name)
    for names in numbered.values():
        left = [name for name in names if name in small]
        if len(left) == len(names) and all(large[name] == small[name] for name in names):
            continue  # the norms of the queries, whose number stays
        role = _role(names[0])
        if role is None or (len(names), len(left)) != heads:
            raise _departs(class_name, names[0])
        yield KvParameter(role[0], tuple(names), role[1], numbered=True)


def _plain_parameter(name: str, shapes: _Shapes, numbers: HeadNumbers) -> KvParameter | None:
    """Recognise a parameter with heads along one axis."""
    role, (shape, small) = _role(name), shapes
    if role is None or small is None or len(small) != len(shape):
        return None
    axes = [axis for axis, (before, after) in enumerate(zip(shape, small, strict=True)) if before != after]
    if len(axes) != 1 or not _in_proportion(shape[axes[0]], numbers.kv_heads, small[axes[0]], numbers.fewer):
        return None
    return KvParameter(role[0], (name,), role[1], axes[0])


def _in_proportion(large: int, heads: int, small: int, fewer: int) -> bool:
    """Return True if both sizes are the same whole number of rows per head."""
    return large % heads == 0 and large * fewer == small * heads


def _role(name: str) -> tuple[str, str] | None:
    """Split the name of a parameter into attention module and role."""
    for ending, role in _ROLES:
        match = re.fullmatch(rf"(?P<module>.+?){ending}", name)
        if match is not None:
            return match["module"], role.format(**match.groupdict())
    return None


def _fused_parameter(name: str, shapes: _Shapes, numbers: HeadNumbers, fused: str | None) -> KvParameter | None:
    """Recognise query, key and value heads of one width along the first axis."""
    match, (shape, small) = re.fullmatch(rf"(?P<module>.+){_FUSED_LEAF.pattern}", name), shapes
    if match is None or fused is None or small is None or shape[1:] != small[1:]:
        return None
    heads, fewer = (numbers.query_heads + 2 * count for count in (numbers.kv_heads, numbers.fewer))
    if not _in_proportion(shape[0], heads, small[0], fewer):
        return None
    suffix = "_bias" if match["kind"] == "bias" else ""
    return KvParameter(match["module"], (name,), fused, suffix=suffix, leaf=match["leaf"])


def _departs(class_name: str, name: str) -> UnsupportedError:
    if _FUSED_LEAF.search(name) or re.search("qkv|c_attn", name):
        reason = f"it keeps query, key and value rows fused in an order that is not known ({name})"
    else:
        reason = f"{name} also depends on the number of KV heads"
    return UnsupportedError(f"{class_name} cannot be converted: {reason}.")
