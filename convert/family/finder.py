"""Find the attention layers of a checkpoint: compare its class at two numbers of KV heads, and look up the tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace

from torch import nn
from transformers import PreTrainedModel

from ...checkpoint.header import FLOATS
from ...checkpoint.source import Checkpoint
from ...errors import CheckpointError, UnsupportedError
from ...libraries.transformers_internals import memory_names, normalises_keys, split_names
from .attention_layer import AttentionLayer
from .exactness import OUTPUTS, QUERIES, reason_against_rewriting
from .followers import followers_of_queries
from .kv_parameters import HeadNumbers, KvParameter, kv_parameters
from .layout import StoredHeads
from .model_type import ModelType
from .rotary import Rotary, rotary_of

_FUSED_ON_DISK = re.compile(r"qkv|Wqkv|query_key_value|c_attn|W_pack", re.IGNORECASE)


def find_layers(
    checkpoint: Checkpoint,
    model_type: ModelType,
    many: PreTrainedModel,
    few: PreTrainedModel,
    numbers: HeadNumbers,
    fused: str | None,
) -> list[AttentionLayer]:
    """Find the layers whose tensors depend on the number of KV heads, in the order of the class.

    Args:
        many: the class on the meta device with the source's KV heads.
        few: the same with fewer.
        fused: the layout of the type's fused tensors, a key of ``FUSED``; None when it has none.

    Raises:
        UnsupportedError: something that is not known depends on the number.
        CheckpointError: a tensor is missing on disk or has another shape than the config says.
    """
    modules: dict[str, list[KvParameter]] = {}
    for parameter in kv_parameters(many, few, numbers, fused):
        modules.setdefault(parameter.module, []).append(parameter)
    for module, parameters in modules.items():
        _refuse_one_sided(many, module, parameters)
    finder = _Finder(checkpoint, model_type, many, numbers)
    present = [module for module, parameters in modules.items() if finder.has(parameters)]
    _refuse_missing(checkpoint, many, [module for module in modules if module not in present], present)
    return [finder.layer(module, modules[module]) for module in present]


def refuse_left_behind(model: PreTrainedModel, modules: list[str]) -> None:
    """Refuse a class with another attention of the same kind whose number of KV heads has a setting of its own.

    An encoder that shares the decoder's attention class has a config of its own and may stay as it is.
    """
    # Parameters are compared by id because equal modules may share them.
    found = [model.get_submodule(module) for module in modules]
    kinds = {(type(module), id(getattr(module, "config", None))) for module in found}
    weights = {id(weight) for module in found for weight in module.parameters()}
    for name, module in model.named_modules():
        same_kind = (type(module), id(getattr(module, "config", None))) in kinds
        if same_kind and any(id(weight) not in weights for weight in _key_weights(module)):
            raise UnsupportedError(
                f"{type(model).__name__} cannot be converted: the KV heads of {name} depend on another setting."
            )


def _key_weights(module: nn.Module) -> Iterator[nn.Parameter]:
    projection = getattr(module, "k_proj", getattr(module, "k", None))
    return projection.parameters() if isinstance(projection, nn.Module) else iter(())


def in_order(model: PreTrainedModel, layers: list[AttentionLayer]) -> tuple[AttentionLayer, ...]:
    """Sort layers as the class lists them, and number them from 0."""
    order = {name: place for place, (name, _) in enumerate(model.named_modules(remove_duplicate=False))}
    ranked = sorted(layers, key=lambda layer: order[layer.module])
    return tuple(replace(layer, layer=number) for number, layer in enumerate(ranked))


def _refuse_one_sided(model: PreTrainedModel, module: str, parameters: list[KvParameter]) -> None:
    roles = {role for parameter in parameters for role in parameter.roles}
    # Gemma 4 sets v_proj to None in layers whose keys serve as values.
    keys_are_values = "v" not in roles and getattr(model.get_submodule(module), "v_proj", 0) is None
    if not {"k", "v"} <= roles and not ("k" in roles and keys_are_values):
        raise UnsupportedError(
            f"{type(model).__name__} cannot be converted: {parameters[0].names[0]} depends on the number of KV heads, "
            f"but {module} has no key and value projections that do."
        )


def _refuse_missing(checkpoint: Checkpoint, model: PreTrainedModel, missing: list[str], present: list[str]) -> None:
    """Refuse layers that are absent on disk, unless they share their parameters with one that is there."""
    # save_pretrained writes shared parameters under one name only.
    owners = {id(parameter) for module in present for parameter in model.get_submodule(module).parameters()}
    lost = [name for name in missing if not owners & {id(weight) for weight in model.get_submodule(name).parameters()}]
    if not lost:
        return
    fused = next((name for name in checkpoint.tensors if _FUSED_ON_DISK.search(name)), None)
    if fused is not None and hasattr(model.get_submodule(lost[0]), "k_proj"):
        raise UnsupportedError(f"{type(model).__name__} has separate k and v projections, but the file has {fused}.")
    raise CheckpointError(
        f"Expected {2 * (len(missing) + len(present))} key and value tensors, but those of {len(lost)} layers "
        f"are missing, {lost[0]} for one.",
        "The checkpoint is incomplete, or its config.json belongs to another one.",
    )


class _Finder:
    """Looks up the tensors of one attention module after the other."""

    def __init__(
        self, checkpoint: Checkpoint, model_type: ModelType, model: PreTrainedModel, numbers: HeadNumbers
    ) -> None:
        self.tensors = checkpoint.tensors
        self.model_type = model_type
        self.model = model
        self.numbers = numbers
        self.expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        names = list(checkpoint.tensors)
        self.on_disk = {memory: disk for disk, memory in memory_names(model, names).items()}
        self.fused_on_disk = {part: disk for disk, parts in split_names(model, names).items() for part in parts}
        self._rotary: dict[int, Rotary | None] = {}

    def has(self, parameters: list[KvParameter]) -> bool:
        """Return True if the module's tensors are in the files. Biases may be absent (config.json decides later)."""
        return all(
            self._whole(name) or name in self.fused_on_disk
            for parameter in parameters
            for name in parameter.names
            if not name.endswith("bias")
        )

    def layer(self, module: str, parameters: list[KvParameter]) -> AttentionLayer:
        """Look up one layer's tensors, and check each against the shape that the class expects."""
        stored = self._stored(parameters)
        holders = {role: self._holder(stored, role) for role in ("k", "v", "k_bias", "v_bias")}
        k = holders["k"]
        assert k is not None
        queries = next((leaf for leaf in QUERIES if f"{module}.{leaf}.weight" in self.expected), QUERIES[0])
        q, q_bias = (self._queries(module, stored, queries, kind) for kind in ("weight", "bias"))
        head_dim, value_dim = (self._width(stored, role) for role in ("k", "v" if holders["v"] else "k"))
        self._refuse_odd_norms(stored, head_dim)
        # The rotation is found by trial, once for each head dim instead of once for each layer.
        if head_dim not in self._rotary:
            self._rotary[head_dim] = rotary_of(self.model, self.model.get_submodule(module), head_dim)
        # Some classes wrap their linear layers, so that the weight lies one level deeper.
        leaf = next((leaf for leaf in OUTPUTS if f"{module}.{leaf}.weight" in self.expected), "o_proj.linear")
        layer = AttentionLayer(
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
            rewrite_obstacle=None,
            kv_heads=self.numbers.kv_heads,
            side=self.model_type.side(module),
            reads=next(
                (parameter.leaf for parameter in parameters if parameter.fused), queries.removesuffix(".linear")
            ),
            stored=stored,
        )
        reason = reason_against_rewriting(self.model, layer, self.tensors, self.numbers.query_heads)
        followers, obstacle = followers_of_queries(
            self.model, layer, self.tensors, self._holding, self.numbers.query_heads
        )
        return replace(layer, rewrite_obstacle=reason, followers=followers, order_obstacle=obstacle)

    def _refuse_odd_norms(self, stored: tuple[StoredHeads, ...], head_dim: int) -> None:
        """Refuse a norm that does not have a weight for every row of a key head."""
        for one in stored:
            size = math.prod(self.tensors[one.names[0]].shape)
            rows = head_dim * (1 if one.numbered else self.numbers.kv_heads)
            if one.layout.startswith("k_norm") and size != rows:
                raise UnsupportedError(f"{one.names[0]} depends on the number of KV heads in a way that is not known.")

    def _stored(self, parameters: list[KvParameter]) -> tuple[StoredHeads, ...]:
        """Look up the parameters on disk, k and v first. The parts of one disk tensor become one."""
        found: dict[tuple[str, ...], StoredHeads] = {}
        for parameter in parameters:
            if all(name in self.fused_on_disk for name in parameter.names):
                stored = self._cut_while_loading(parameter)
            else:
                names = tuple(disk for name in parameter.names if (disk := self._whole(name)))
                stored = StoredHeads(names, parameter.layout, parameter.axis, parameter.suffix, parameter.numbered)
            if stored.names:  # a bias that the checkpoint does not have is left to the check of the result
                found[stored.names] = stored
        self._refuse_unknown_biases(parameters)
        return tuple(found.values())

    def _cut_while_loading(self, parameter: KvParameter) -> StoredHeads:
        """Recognise a disk tensor that the loader cuts into q, k and v."""
        disk = self.fused_on_disk[parameter.names[0]]
        parts = [name for name, whole in self.fused_on_disk.items() if whole == disk]
        sides = [name.split(".")[-2] for name in parts]
        rows = sum(self.expected[name][0] for name in parts)
        if sides != ["q_proj", "k_proj", "v_proj"] or self.tensors[disk].shape != (rows, *self.expected[parts[0]][1:]):
            raise UnsupportedError(f"{type(self.model).__name__} cuts {disk} in a way that is not known.")
        return StoredHeads((disk,), "q|k|v", suffix="_bias" if disk.endswith("bias") else "")

    def _refuse_unknown_biases(self, parameters: list[KvParameter]) -> None:
        for parameter in parameters:
            bias = parameter.names[0].removesuffix("weight") + "bias"
            if parameter.names[0].endswith("weight") and bias not in self.expected and (disk := self.on_disk.get(bias)):
                raise CheckpointError(f"{disk} is there, but by config.json this projection has no bias.")

    def _holder(self, stored: tuple[StoredHeads, ...], role: str) -> str | None:
        return next((one.names[0] for one in stored if role in dict(one.spans(1, 1))), None)

    def _queries(self, module: str, stored: tuple[StoredHeads, ...], leaf: str, kind: str) -> str | None:
        fused = self._holder(stored, "q" if kind == "weight" else "q_bias")
        return fused or self._whole(f"{module}.{leaf}.{kind}")

    def _width(self, stored: tuple[StoredHeads, ...], role: str) -> int:
        """Count the rows of one head."""
        one = next(one for one in stored if role in dict(one.spans(1, 1)))
        heads = sum(count for _, count in one.spans(self.numbers.query_heads, self.numbers.kv_heads))
        return self.tensors[one.names[0]].shape[one.axis] // heads

    def _holding(self, name: str) -> str | None:
        """Find the disk tensor that is a parameter or, before the loader cuts it, holds it."""
        return self.on_disk.get(name) or self.fused_on_disk.get(name)

    def _whole(self, name: str) -> str | None:
        """Find the disk name of a parameter, or None where it is absent.

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
        # Quantised heads have scales of their own, so the mean of their codes says nothing.
        if info.dtype not in FLOATS:
            raise UnsupportedError(f"{found} is stored as {info.dtype}, which cannot be averaged.")
        return found
