"""Tensors that a model class drops on loading: convert the attention among them, refuse what cannot be, name the rest.

Layers of multi-token prediction are the usual case. transformers loads them apart from the model, with the same config.
So their attention must have as many KV heads as the other layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ...checkpoint.source import Checkpoint
from ...errors import UnsupportedError
from ...libraries.transformers_internals import unread_names
from ..family.attention_layer import AttentionLayer
from ..family.family import Family
from ..family.kv_config import with_kv_heads
from ..family.layout import StoredHeads
from ..family.model_type import ModelType
from ..family.verify import Parts, attention_modules, differ_in_kv_heads_alone, holds_kv_heads, kind_of_module, shapes

_KV_LIKE = re.compile(r"(^|[._])(k|v|kv|qkv|key|value)([._]|$)")


@dataclass(frozen=True)
class IgnoredTensors:
    """The tensors that the class drops on loading.

    Attributes:
        layers: attention among them, to be converted like the layers of the class. Numbered after those.
        copied: names of all others; their bytes are copied.
        class_name: of the class that drops them.
    """

    layers: tuple[AttentionLayer, ...] = ()
    copied: tuple[str, ...] = ()
    class_name: str = ""

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the terminal and the record."""
        found = []
        if self.layers:
            places = _listed([layer.module for layer in self.layers])
            found.append(
                f"{self.class_name} ignores {places} on loading (mostly layers of multi-token prediction): the KV "
                "heads there are merged by the same method as in the other layers, but without statistics of text and "
                "without refinement, so such layers may predict worse than before"
            )
        if self.copied:
            found.append(
                f"{self.class_name} ignores {len(self.copied)} tensors on loading that hold no KV heads of its layers: "
                f"they are copied as they are ({_listed(list(self.copied))})"
            )
        return tuple(found)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def find_ignored(checkpoint: Checkpoint, model_type: ModelType, family: Family) -> IgnoredTensors:
    """Sort what the class drops on loading.

    Raises:
        UnsupportedError: attention among it would keep the old number of KV heads.
    """
    model = model_type.on_meta(with_kv_heads(model_type.config, family.settings))
    dropped = unread_names(model, list(checkpoint.tensors))
    if not dropped or not family.layers:
        return IgnoredTensors()
    unread, modules = set(dropped), attention_modules(model, checkpoint.tensors)
    templates = _templates(family, modules)
    _refuse_further_keys(templates, modules, unread)
    made, class_name = list[AttentionLayer](), type(model).__name__
    for place, parts in modules.items():
        if any(info.name in unread and holds_kv_heads(leaf) for leaf, info in parts.items()):
            layer = _like(place, templates, modules, class_name)
            if layer is not None:
                made.append(replace(layer, layer=len(family.layers) + len(made)))
    changed = {name for layer in made for name in (*layer.merged, *layer.rewritten)}
    return IgnoredTensors(tuple(made), tuple(name for name in dropped if name not in changed), class_name)


def _templates(family: Family, modules: Mapping[str, Parts]) -> dict[str, AttentionLayer]:
    """Find the places of the layers that the class loads."""
    places = {info.name: place for place, parts in modules.items() for info in parts.values()}
    return {places[layer.k]: layer for layer in family.layers if layer.k in places}


def _like(
    place: str, templates: Mapping[str, AttentionLayer], modules: Mapping[str, Parts], class_name: str
) -> AttentionLayer | None:
    """Read a dropped layer as one of the layout of a layer of the class, or return None if it is other attention.

    Raises:
        UnsupportedError: its queries are as wide as those of the class, but its layout is not known.
    """
    parts, kind = modules[place], kind_of_module(place)
    alike = {known: layer for known, layer in templates.items() if kind_of_module(known) == kind}
    same = {known: layer for known, layer in alike.items() if shapes(modules[known]) == shapes(parts)}
    if same:
        return _moved(place, same, modules)
    for known in alike:
        if differ_in_kv_heads_alone(parts, modules[known]) or _as_wide(parts, modules[known]):
            raise UnsupportedError(
                f"{class_name} ignores {place} on loading (mostly a layer of multi-token prediction), and its layout "
                f"is not that of {known}: its KV heads would stay as many as they are, whatever config.json says.",
                f"Take the tensors that begin with {place.removesuffix(kind)} out of the weight files (transformers "
                "does not read them), set num_nextn_predict_layers to 0 in config.json, and convert again.",
            )
    return None


def _as_wide(parts: Parts, others: Parts) -> bool:
    """Return True if the two share a projection of queries or outputs of one shape."""
    own = {leaf: info.shape for leaf, info in parts.items() if len(info.shape) == 2 and not holds_kv_heads(leaf)}
    return any(leaf in others and others[leaf].shape == shape for leaf, shape in own.items())


def _moved(place: str, same: Mapping[str, AttentionLayer], modules: Mapping[str, Parts]) -> AttentionLayer:
    """Give a layer of the class the names of a dropped layer with the same parts."""
    known, layer = next(iter(same.items()))
    names = {info.name: modules[place][leaf].name for leaf, info in modules[known].items()}
    doubt = None
    # Full and sliding layers of one shape may turn their heads differently, and the files do not say which this is.
    if any((one.rotary, one.keys_normed) != (layer.rotary, layer.keys_normed) for one in same.values()):
        doubt = f"layers of the shape of {place} treat positions or norms differently"

    def renamed(name: str | None) -> str | None:
        return None if name is None else names[name]

    def moved(stored: Iterable[StoredHeads]) -> tuple[StoredHeads, ...]:
        return tuple(replace(one, names=tuple(names[name] for name in one.names)) for one in stored)

    return replace(
        layer,
        module=place,
        k=names[layer.k],
        v=names[layer.v],
        k_bias=renamed(layer.k_bias),
        v_bias=renamed(layer.v_bias),
        q=renamed(layer.q),
        q_bias=renamed(layer.q_bias),
        o=renamed(layer.o),
        q_norm=renamed(layer.q_norm),
        k_norm=renamed(layer.k_norm),
        stored=moved(layer.stored),
        followers=moved(layer.followers),
        rewrite_obstacle=layer.rewrite_obstacle or doubt,
        order_obstacle=layer.order_obstacle or doubt,
        ignored=True,
    )


def _refuse_further_keys(
    templates: Mapping[str, AttentionLayer], modules: Mapping[str, Parts], unread: set[str]
) -> None:
    """Refuse keys and values that the class ignores inside a layer that it loads: another part of the model uses them.

    Raises:
        UnsupportedError: there are such.
    """
    for place, layer in templates.items():
        for leaf, info in modules[place].items():
            if info.name in unread and info.name not in layer.merged and _KV_LIKE.search(leaf):
                raise UnsupportedError(
                    f"{info.name} holds further keys or values of an attention layer, which transformers ignores on "
                    "loading: they would keep the old number of KV heads.",
                    "Such a checkpoint also holds a generator of other media. Convert a checkpoint of its text model "
                    "alone, without these tensors.",
                )
