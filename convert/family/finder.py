"""Find the attention blocks of a checkpoint by comparing its class at two numbers of KV heads."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import nn
from transformers import PreTrainedModel

from ...checkpoint.header import FLOATS
from ...checkpoint.source import Checkpoint
from ...errors import CheckpointError, UnsupportedError
from ...libraries.transformers_internals import memory_names, normalises_keys, split_names
from .exactness import OUTPUTS, QUERIES, reason_against_rewriting
from .followers import followers_of_queries
from .kv_parameters import Change, Numbers, changed_parameters
from .layout import Stored
from .rotary import Rotary, rotary_of

_FUSED_ON_DISK = re.compile(r"qkv|Wqkv|query_key_value|c_attn|W_pack", re.IGNORECASE)


@dataclass(frozen=True)
class AttentionLayer:
    """One attention block, by the names of its tensors on disk.

    Attributes:
        layer: position among the blocks, from 0.
        module: the block in the model class, for example ``model.layers.0.self_attn``.
        k, v, q: the tensors that hold these projections; the same one where they are fused. ``v`` is ``k`` where the
            class takes its values from the keys.
        head_dim, value_dim: rows of one key head and of one value head.
        rotary: None when the layout is not certain.
        keys_normed: a norm acts on each key head after the projection; ``q_norm`` and ``k_norm`` name its weights.
        rewritable: None when q and o may be rewritten together with k and v, else the reason why not.
        kv_heads: KV heads of this block (some types have two kinds of layers).
        reads: the submodule whose input is the block's input, for example ``q_proj``.
        stored: every tensor that follows the number of KV heads, and how heads lie in it.
        followers: tensors with a part for every query head, which go along when heads change places.
        fixed: None when heads may change places, else the reason why not.
    """

    layer: int
    module: str
    k: str
    v: str
    k_bias: str | None
    v_bias: str | None
    q: str | None
    q_bias: str | None
    o: str | None
    head_dim: int
    value_dim: int
    rotary: Rotary | None
    keys_normed: bool
    q_norm: str | None
    k_norm: str | None
    rewritable: str | None
    kv_heads: int
    reads: str
    stored: tuple[Stored, ...]
    followers: tuple[Stored, ...] = ()
    fixed: str | None = None

    @property
    def merged(self) -> tuple[str, ...]:
        """The tensors that change with the number of KV heads."""
        return tuple(name for stored in self.stored for name in stored.names)

    @property
    def rewritten(self) -> tuple[str, ...]:
        """The tensors that keep their shape but change when the method works on the whole block."""
        names = (self.q, self.q_bias, self.o)
        return tuple(name for name in names if name is not None and name not in self.merged)

    def roles(self) -> set[str]:
        """What the merged tensors hold: ``k``, ``v``, ``k_bias``, ``k_norm``, …"""
        return {role for stored in self.stored for role, _ in stored.spans(self.kv_heads, self.kv_heads)}


def find_blocks(
    checkpoint: Checkpoint, many: PreTrainedModel, few: PreTrainedModel, numbers: Numbers, fused: str | None
) -> list[AttentionLayer]:
    """The blocks whose tensors follow the number of KV heads, in the order of the class.

    Args:
        many: the class on the meta device with the source's KV heads.
        few: the same with fewer.
        fused: the layout of the type's fused tensors, a key of ``FUSED``; None when it has none.

    Raises:
        UnsupportedError: something depends on the number that is not known.
        CheckpointError: a tensor is missing on disk or has another shape than the config says.
    """
    modules: dict[str, list[Change]] = {}
    for change in changed_parameters(many, few, numbers, fused):
        modules.setdefault(change.module, []).append(change)
    for module, changes in modules.items():
        _refuse_one_sided(many, module, changes)
    finder = _Finder(checkpoint, many, numbers)
    present = [module for module, changes in modules.items() if finder.has(changes)]
    _refuse_missing(checkpoint, many, [module for module in modules if module not in present], present)
    return [finder.block(module, modules[module]) for module in present]


def refuse_left_behind(model: PreTrainedModel, modules: list[str]) -> None:
    """Every attention of the same kind must follow the numbers; a setting of its own would leave it at the old one.

    An encoder that shares the decoder's attention class has a config of its own and may stay as it is.
    """
    found = [model.get_submodule(module) for module in modules]
    kinds = {(type(module), id(getattr(module, "config", None))) for module in found}
    weights = {id(weight) for module in found for weight in module.parameters()}
    for name, module in model.named_modules():
        same_kind = (type(module), id(getattr(module, "config", None))) in kinds
        if same_kind and any(id(weight) not in weights for weight in _key_weights(module)):
            raise UnsupportedError(
                f"{type(model).__name__} cannot be converted: the KV heads of {name} follow another setting."
            )


def _key_weights(module: nn.Module) -> Iterator[nn.Parameter]:
    projection = getattr(module, "k_proj", getattr(module, "k", None))
    return projection.parameters() if isinstance(projection, nn.Module) else iter(())


def in_order(model: PreTrainedModel, blocks: list[AttentionLayer]) -> tuple[AttentionLayer, ...]:
    """Blocks as the class lists them, numbered from 0."""
    order = {name: place for place, (name, _) in enumerate(model.named_modules(remove_duplicate=False))}
    ranked = sorted(blocks, key=lambda block: order[block.module])
    return tuple(replace(block, layer=layer) for layer, block in enumerate(ranked))


def _refuse_one_sided(model: PreTrainedModel, module: str, changes: list[Change]) -> None:
    roles = {role for change in changes for role in change.roles}
    keys_are_values = "v" not in roles and getattr(model.get_submodule(module), "v_proj", 0) is None
    if not {"k", "v"} <= roles and not ("k" in roles and keys_are_values):
        raise UnsupportedError(
            f"{type(model).__name__} cannot be converted: {changes[0].names[0]} depends on the number of KV heads, "
            f"but {module} has no key and value projections that do."
        )


def _refuse_missing(checkpoint: Checkpoint, model: PreTrainedModel, missing: list[str], present: list[str]) -> None:
    """A block may be absent on disk only when it shares its parameters with one that is there."""
    owners = {id(parameter) for module in present for parameter in model.get_submodule(module).parameters()}
    lost = [name for name in missing if not owners & {id(weight) for weight in model.get_submodule(name).parameters()}]
    if not lost:
        return
    fused = next((name for name in checkpoint.tensors if _FUSED_ON_DISK.search(name)), None)
    if fused is not None and hasattr(model.get_submodule(lost[0]), "k_proj"):
        raise UnsupportedError(f"{type(model).__name__} has separate k and v projections, but the file has {fused}.")
    raise CheckpointError(
        f"Expected {2 * (len(missing) + len(present))} key and value tensors, but those of {len(lost)} blocks "
        f"are missing, {lost[0]} for one.",
        "The checkpoint is incomplete, or its config.json belongs to another one.",
    )


class _Finder:
    """Looks up the tensors of one attention module after the other."""

    def __init__(self, checkpoint: Checkpoint, model: PreTrainedModel, numbers: Numbers) -> None:
        self.tensors = checkpoint.tensors
        self.model = model
        self.numbers = numbers
        self.expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        names = list(checkpoint.tensors)
        self.on_disk = {memory: disk for disk, memory in memory_names(model, names).items()}
        self.fused_on_disk = {part: disk for disk, parts in split_names(model, names).items() for part in parts}
        self._rotary: dict[int, Rotary | None] = {}

    def has(self, changes: list[Change]) -> bool:
        """True when the module's tensors are in the files; biases may be absent (config.json decides that later)."""
        return all(
            self._whole(name) or name in self.fused_on_disk
            for change in changes
            for name in change.names
            if not name.endswith("bias")
        )

    def block(self, module: str, changes: list[Change]) -> AttentionLayer:
        """The names of one block's tensors, each checked against the shape that the class expects."""
        stored = self._stored(changes)
        holders = {role: self._holder(stored, role) for role in ("k", "v", "k_bias", "v_bias")}
        k = holders["k"]
        assert k is not None
        asks = next((leaf for leaf in QUERIES if f"{module}.{leaf}.weight" in self.expected), QUERIES[0])
        q, q_bias = (self._queries(module, stored, asks, kind) for kind in ("weight", "bias"))
        head_dim, value_dim = (self._width(stored, role) for role in ("k", "v" if holders["v"] else "k"))
        self._refuse_odd_norms(stored, head_dim)
        if head_dim not in self._rotary:
            self._rotary[head_dim] = rotary_of(self.model, self.model.get_submodule(module), head_dim)
        leaf = next((leaf for leaf in OUTPUTS if f"{module}.{leaf}.weight" in self.expected), "o_proj.linear")
        block = AttentionLayer(
            layer=0,
            module=module,
            k=k,
            v=holders["v"] or k,
            k_bias=holders["k_bias"],
            v_bias=holders["v_bias"],
            q=q,
            q_bias=q_bias,
            o=self._whole(f"{module}.{leaf}.weight"),
            head_dim=head_dim,
            value_dim=value_dim,
            rotary=self._rotary[head_dim],
            keys_normed=normalises_keys(self.model.get_submodule(module)),
            q_norm=self._whole(f"{module}.q_norm.weight"),
            k_norm=self._whole(f"{module}.k_norm.weight"),
            rewritable=None,
            kv_heads=self.numbers.kv_heads,
            reads=next((change.leaf for change in changes if change.fused), asks.removesuffix(".linear")),
            stored=stored,
        )
        reason = reason_against_rewriting(self.model, block, self.tensors, self.numbers.query_heads)
        followers, fixed = followers_of_queries(
            self.model, block, self.tensors, self._holding, self.numbers.query_heads
        )
        return replace(block, rewritable=reason, followers=followers, fixed=fixed)

    def _refuse_odd_norms(self, stored: tuple[Stored, ...], head_dim: int) -> None:
        """A norm has a weight for every row of a key head, or it is none that is known."""
        for one in stored:
            size = math.prod(self.tensors[one.names[0]].shape)
            rows = head_dim * (1 if one.numbered else self.numbers.kv_heads)
            if one.layout.startswith("k_norm") and size != rows:
                raise UnsupportedError(f"{one.names[0]} follows the number of KV heads in a way that is not known.")

    def _stored(self, changes: list[Change]) -> tuple[Stored, ...]:
        """What is on disk of the changed parameters, k and v first; parts of one disk tensor become one."""
        found: dict[tuple[str, ...], Stored] = {}
        for change in changes:
            if all(name in self.fused_on_disk for name in change.names):
                stored = self._cut_while_loading(change)
            else:
                names = tuple(disk for name in change.names if (disk := self._whole(name)))
                stored = Stored(names, change.layout, change.axis, change.suffix, change.numbered)
            if stored.names:  # a bias that the checkpoint does not have is left to the check of the result
                found[stored.names] = stored
        self._refuse_unknown_biases(changes)
        return tuple(found.values())

    def _cut_while_loading(self, change: Change) -> Stored:
        """A disk tensor that the loader cuts into q, k and v."""
        disk = self.fused_on_disk[change.names[0]]
        parts = [name for name, whole in self.fused_on_disk.items() if whole == disk]
        sides = [name.split(".")[-2] for name in parts]
        rows = sum(self.expected[name][0] for name in parts)
        if sides != ["q_proj", "k_proj", "v_proj"] or self.tensors[disk].shape != (rows, *self.expected[parts[0]][1:]):
            raise UnsupportedError(f"{type(self.model).__name__} cuts {disk} in a way that is not known.")
        return Stored((disk,), "q|k|v", suffix="_bias" if disk.endswith("bias") else "")

    def _refuse_unknown_biases(self, changes: list[Change]) -> None:
        for change in changes:
            bias = change.names[0].removesuffix("weight") + "bias"
            if change.names[0].endswith("weight") and bias not in self.expected and (disk := self.on_disk.get(bias)):
                raise CheckpointError(f"{disk} is there, but by config.json this projection has no bias.")

    def _holder(self, stored: tuple[Stored, ...], role: str) -> str | None:
        return next((one.names[0] for one in stored if role in dict(one.spans(1, 1))), None)

    def _queries(self, module: str, stored: tuple[Stored, ...], leaf: str, kind: str) -> str | None:
        fused = self._holder(stored, "q" if kind == "weight" else "q_bias")
        return fused or self._whole(f"{module}.{leaf}.{kind}")

    def _width(self, stored: tuple[Stored, ...], role: str) -> int:
        """Rows of one head."""
        one = next(one for one in stored if role in dict(one.spans(1, 1)))
        heads = sum(count for _, count in one.spans(self.numbers.query_heads, self.numbers.kv_heads))
        return self.tensors[one.names[0]].shape[one.axis] // heads

    def _holding(self, name: str) -> str | None:
        """The disk tensor that is a parameter or, before the loader cuts it, holds it."""
        return self.on_disk.get(name) or self.fused_on_disk.get(name)

    def _whole(self, name: str) -> str | None:
        """The disk name of a parameter, or None where it is absent.

        Raises:
            CheckpointError: its shape is not the one that the config asks for.
        """
        found = self.on_disk.get(name)
        if found is None:
            return None
        info, shape = self.tensors[found], self.expected.get(name)
        if shape is not None and info.shape != shape:
            raise CheckpointError(
                f"{found} has shape {list(info.shape)}, but config.json asks for {list(shape)} "
                f"({self.numbers.kv_heads} KV heads).",
                "The config.json belongs to another checkpoint, or its number of KV heads is wrong.",
            )
        if info.dtype not in FLOATS:
            raise UnsupportedError(f"{found} is stored as {info.dtype}, which cannot be averaged.")
        return found
