"""Find the attention blocks of a checkpoint by comparing its class at two numbers of KV heads."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, replace

from torch import nn
from transformers import PreTrainedModel

from ..checkpoint.header import FLOATS
from ..checkpoint.source import Checkpoint
from ..errors import CheckpointError, UnsupportedError
from .heads import Rotary
from .rotary import rotary_of
from .shapes import memory_names

_PROJECTION = re.compile(r"(?P<module>.+)\.(?P<side>[kv])_proj(?P<inner>\.linear)?\.(?P<kind>weight|bias)$")
_FUSED = re.compile(r"qkv|Wqkv|query_key_value|c_attn|W_pack", re.IGNORECASE)
_OUTPUTS = ("o_proj", "out_proj", "dense", "c_proj", "wo")


@dataclass(frozen=True)
class Block:
    """One attention block, by the names of its tensors on disk.

    Attributes:
        layer: position among the blocks, from 0.
        module: the block in the model class, for example ``model.layers.0.self_attn``.
        head_dim, value_dim: rows of one key head and of one value head.
        rotary: None when the layout is not certain.
        keys_normed: a norm acts on each key head after the projection; ``q_norm`` and ``k_norm`` name its weights.
        rewritable: None when q and o may be rewritten together with k and v, else the reason why not.
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

    @property
    def merged(self) -> tuple[str, ...]:
        """The tensors that shrink."""
        return tuple(name for name in (self.k, self.v, self.k_bias, self.v_bias) if name is not None)

    @property
    def rewritten(self) -> tuple[str, ...]:
        """The tensors that keep their shape but change when the method works on the whole block."""
        return tuple(name for name in (self.q, self.q_bias, self.o) if name is not None)


def find_blocks(
    checkpoint: Checkpoint, many: PreTrainedModel, few: PreTrainedModel, query_heads: int, kv_heads: int, fewer: int
) -> tuple[Block, ...]:
    """The blocks whose tensors follow the number of KV heads.

    Args:
        many: the class on the meta device with the source's ``kv_heads``.
        few: the same with ``fewer``.

    Raises:
        UnsupportedError: something else than separate k and v projections depends on the number.
        CheckpointError: a tensor is missing on disk or has another shape than the config says.
    """
    modules = _changed_modules(many, few, kv_heads, fewer)
    _refuse_left_behind(many, modules)
    on_disk = {memory: disk for disk, memory in memory_names(many, list(checkpoint.tensors)).items()}
    finder = _Finder(checkpoint, many, on_disk, query_heads, kv_heads)
    present = [module for module in modules if finder.has(module)]
    _refuse_missing(checkpoint, many, [module for module in modules if module not in present], present)
    return tuple(finder.block(layer, module) for layer, module in enumerate(present))


def _changed_modules(many: PreTrainedModel, few: PreTrainedModel, kv_heads: int, fewer: int) -> list[str]:
    """The attention modules with k and v projections that follow the number of KV heads, in order."""
    small = {name: tuple(tensor.shape) for name, tensor in few.state_dict().items()}
    modules: dict[str, set[str]] = {}
    for name, tensor in many.state_dict().items():
        shape = tuple(tensor.shape)
        if small.get(name) == shape:
            continue
        match = _PROJECTION.fullmatch(name)
        scaled = name in small and shape[0] * fewer == small[name][0] * kv_heads and shape[1:] == small[name][1:]
        if match is None or not scaled or shape[0] % kv_heads:
            raise _departs(type(many).__name__, name)
        modules.setdefault(match["module"], set()).add(match["side"])
    for module, sides in modules.items():
        if sides != {"k", "v"}:
            raise UnsupportedError(
                f"{module} has no separate key and value projections, which only such a layout allows."
            )
    return list(modules)


def _departs(class_name: str, name: str) -> UnsupportedError:
    if "norm" in name:
        reason = f"its key norm has weights for every key head ({name}), and merging those is not exact"
    elif _FUSED.search(name):
        reason = f"it keeps query, key and value rows fused ({name})"
    else:
        reason = f"{name} also depends on the number of KV heads"
    return UnsupportedError(f"{class_name} cannot be converted: {reason}.")


def _refuse_left_behind(model: PreTrainedModel, modules: list[str]) -> None:
    """Every attention of the same kind must follow the number; a setting of its own would leave it at the old one."""
    kinds = {type(model.get_submodule(module)) for module in modules}
    for name, module in model.named_modules():
        if type(module) in kinds and name not in modules and hasattr(module, "k_proj"):
            raise UnsupportedError(
                f"{type(model).__name__} cannot be converted: the KV heads of {name} follow another setting."
            )


def _refuse_missing(checkpoint: Checkpoint, model: PreTrainedModel, missing: list[str], present: list[str]) -> None:
    """A block may be absent on disk only when it shares its parameters with one that is there."""
    owners = {id(parameter) for module in present for parameter in model.get_submodule(module).parameters()}
    lost = [name for name in missing if not owners & {id(weight) for weight in model.get_submodule(name).parameters()}]
    if not lost:
        return
    fused = next((name for name in checkpoint.tensors if _FUSED.search(name)), None)
    if fused is not None:
        raise UnsupportedError(f"{type(model).__name__} has separate k and v projections, but the file has {fused}.")
    raise CheckpointError(
        f"Expected {2 * (len(missing) + len(present))} key and value tensors, but those of {len(lost)} blocks "
        f"are missing, {lost[0]} for one.",
        "The checkpoint is incomplete, or its config.json belongs to another one.",
    )


class _Finder:
    """Looks up the tensors of one attention module after the other."""

    def __init__(
        self, checkpoint: Checkpoint, model: PreTrainedModel, on_disk: dict[str, str], query_heads: int, kv_heads: int
    ) -> None:
        self.tensors = checkpoint.tensors
        self.model = model
        self.expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self.on_disk = on_disk
        self.query_heads = query_heads
        self.kv_heads = kv_heads
        self._rotary: dict[int, Rotary | None] = {}

    def has(self, module: str) -> bool:
        """True when the module's key and value weights are in the files."""
        return all(self._disk(f"{module}.{self._leaf(module, side)}.weight") for side in "kv")

    def block(self, layer: int, module: str) -> Block:
        """The names of one block's tensors, each checked against the shape that the class expects."""
        weights = {side: self._disk(f"{module}.{self._leaf(module, side)}.weight") for side in "qkv"}
        biases = {side: self._bias(module, side) for side in "qkv"}
        output = next((leaf for leaf in _OUTPUTS if f"{module}.{leaf}.weight" in self.expected), "o_proj.linear")
        k, v = weights["k"], weights["v"]
        if k is None or v is None:
            raise ValueError(f"{module} is not in the files; ask has() first")
        head_dim, value_dim = (self.tensors[name].shape[0] // self.kv_heads for name in (k, v))
        if head_dim not in self._rotary:
            self._rotary[head_dim] = rotary_of(self.model, self.model.get_submodule(module), head_dim)
        block = Block(
            layer=layer,
            module=module,
            k=k,
            v=v,
            k_bias=biases["k"],
            v_bias=biases["v"],
            q=weights["q"],
            q_bias=biases["q"],
            o=self._disk(f"{module}.{output}.weight"),
            head_dim=head_dim,
            value_dim=value_dim,
            rotary=self._rotary[head_dim],
            keys_normed=_norms_keys(self.model.get_submodule(module)),
            q_norm=self._disk(f"{module}.q_norm.weight"),
            k_norm=self._disk(f"{module}.k_norm.weight"),
            rewritable=None,
        )
        return replace(block, rewritable=self._reason_against_rewriting(block))

    def _leaf(self, module: str, side: str) -> str:
        linear = f"{side}_proj.linear"
        return linear if f"{module}.{linear}.weight" in self.expected else f"{side}_proj"

    def _bias(self, module: str, side: str) -> str | None:
        name = f"{module}.{self._leaf(module, side)}.bias"
        found = self._disk(name)
        if found is not None and name not in self.expected:
            raise CheckpointError(f"{found} is there, but by config.json this projection has no bias.")
        return found

    def _disk(self, name: str) -> str | None:
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
                f"({self.kv_heads} KV heads).",
                "The config.json belongs to another checkpoint, or its number of KV heads is wrong.",
            )
        if info.dtype not in FLOATS:
            raise UnsupportedError(f"{found} is stored as {info.dtype}, which cannot be averaged.")
        return found

    def _reason_against_rewriting(self, block: Block) -> str | None:
        """Why a change of basis inside the heads would not be exact, or None."""
        config = self.model.config.get_text_config()
        module = self.model.get_submodule(block.module)
        own = {name for name, _ in module.named_parameters()}
        known = {f"{side}_proj.{kind}" for side in "qkv" for kind in ("weight", "bias")} | {
            *(f"{leaf}.{kind}" for leaf in _OUTPUTS for kind in ("weight", "bias")),
            *("q_norm.weight", "k_norm.weight"),
        }
        if block.q is None or block.o is None or (own & {"q_proj.bias"} and block.q_bias is None):
            return "its query and output projections are not recognised"
        if own - known:
            return f"{min(own - known)} acts inside the attention block"
        if self.tensors[block.q].shape[0] != self.query_heads * block.head_dim:
            return f"{block.q} holds more than the queries"
        if self.tensors[block.o].shape[1] != self.query_heads * block.value_dim:
            return f"{block.o} does not read the heads directly"
        if block.rotary is None:
            return "the layout of its rotary position embedding is not certain"
        if getattr(config, "clip_qkv", None) is not None:
            return "it clips queries, keys and values (clip_qkv)"
        if getattr(config, "num_kv_shared_layers", None):
            return "some layers use the keys and values of others (num_kv_shared_layers)"
        if block.keys_normed and block.k_norm is None:
            return "it normalises keys in a way that is not known"
        return None


def _norms_keys(module: nn.Module) -> bool:
    """True when the attention's code normalises anything, by a module, a flag that is on, or a function.

    Read from the source, because some classes do it without a weight or a module of its own.
    """
    code = re.sub(r"#.*", "", inspect.getsource(type(module).forward))
    for word in re.findall(r"[\w.]*norm\w*", code, re.IGNORECASE):
        own = word.removeprefix("self.")
        absent = word.startswith("self.") and getattr(module, own.split(".")[0], None) in (None, False)
        if not absent:
            return True
    return False
