"""Parts of transformers that headfold relies on although they are private (tested with 5.24).

tests/libraries/test_transformers_internals.py fails if one of them changes.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Split,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.modeling_utils import remove_tied_weights_from_state_dict


def from_config(model_class: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    """Make a model with new weights, in the dtype of its config. The public way needs an Auto class that knows it."""
    cls: Any = model_class
    model: PreTrainedModel = cls._from_config(config)
    return model


def layers_within(model: nn.Module, part: nn.Module) -> list[nn.Module]:
    """List the layers of ``model`` that lie in ``part`` of it, such as its decoder; none if its class names none.

    ``_no_split_modules`` is meant for spreading a model over devices. No other attribute says what a layer is.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in part.modules() if type(module).__name__ in names]


def name_no_absent_layers(model: nn.Module) -> None:
    """Leave out names of layers that the model lacks: accelerate refuses to shard it by such.

    A class takes over the names of its parts, and the class of a part also names layers of its kin (SigLIP's text).
    """
    names, present = getattr(model, "_no_split_modules", None), {type(module).__name__ for module in model.modules()}
    if names:
        model._no_split_modules = set(names) & present  # type: ignore[assignment]


def memory_names(model: PreTrainedModel, disk_names: list[str]) -> dict[str, str]:
    """Find the parameter that the class's loader fills from each tensor on disk.

    Tensors that are cut, stacked or permuted while they are loaded (experts, for example) are absent.
    """
    return {disk: name for disk, name, pattern in _renamed(model, disk_names) if pattern is None}


def split_names(model: PreTrainedModel, disk_names: list[str]) -> dict[str, tuple[str, ...]]:
    """Find the parameters whose rows, one after the other, the class's loader cuts out of one tensor on disk."""
    cuts = {}
    for transform in get_model_conversion_mapping(model):
        operations = getattr(transform, "operations", [])
        if len(operations) == 1 and isinstance(operations[0], Split) and operations[0].dim == 0:
            cuts[transform.source_patterns[0]] = list(transform.target_patterns)
    found = {}
    for disk, name, pattern in _renamed(model, disk_names) if cuts else ():
        if pattern in cuts:
            first = cuts[pattern][0]
            found[disk] = tuple(name.replace(first, target) for target in cuts[pattern])
    return found


def unread_names(model: PreTrainedModel, disk_names: list[str]) -> list[str]:
    """Find the tensors on disk that the class's loader drops, in the order of ``disk_names``.

    The loader's own report leaves out those that the class means to ignore (``_keys_to_ignore_on_load_unexpected``),
    such as the layers of multi-token prediction.
    """
    known = {*model.state_dict(), *(name for name, _ in model.named_buffers())}
    return [disk for disk, name, _ in _renamed(model, disk_names) if name not in known]


def names_in_class(model: PreTrainedModel, disk_names: list[str]) -> dict[str, tuple[str, ...]]:
    """Find the parameters that the class's loader fills from each tensor on disk, wholly or in part."""
    cuts = split_names(model, disk_names)
    return {disk: cuts.get(disk, (name,)) for disk, name, _ in _renamed(model, disk_names)}


def saved_tensors(
    model: PreTrainedModel, weights: dict[str, Tensor] | None = None, *, untied_only: bool = False
) -> dict[str, Tensor]:
    """List the tensors that ``save_pretrained`` writes, by name on disk, on the meta device.

    Args:
        weights: the state dict, without second names of tied tensors; None takes the model's own.
        untied_only: stop before names and shapes are turned into those on disk.
    """
    state = dict(weights if weights is not None else model.state_dict())
    for ignored in model._keys_to_ignore_on_save or ():
        state.pop(ignored, None)
    if weights is None:
        state = remove_tied_weights_from_state_dict(state, model)
    if untied_only:
        return state
    saved: dict[str, Tensor] = revert_weight_conversion(
        model, {name: tensor.to("meta") for name, tensor in state.items()}
    )
    return saved


def _renamed(model: PreTrainedModel, disk_names: list[str]) -> Iterator[tuple[str, str, str | None]]:
    """Yield the name on disk, the name in the class, and the pattern if the tensor is not only renamed."""
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    expected = model.state_dict()
    for disk_name in disk_names:
        name, pattern = rename_source_key(disk_name, renamings, converters, model.base_model_prefix, expected)
        yield disk_name, name, pattern


def generation_settings(usual: GenerationConfig, said: GenerationConfig) -> GenerationConfig:
    """Join generation settings: ``said`` counts before ``usual``, and nothing comes from the model's config."""
    # Made with this mark, the class leaves out what config.json says of other things.
    both = GenerationConfig(**{**usual.to_diff_dict(), **said.to_diff_dict(), "_from_model_config": True})
    both._from_model_config = False  # else transformers 4 asks the model's class once more when it loads this
    return both


def rotation_of(attention: nn.Module) -> Callable[..., Any] | None:
    """The function with which an attention class rotates queries and keys; None if its module has none by that name."""
    found: Callable[..., Any] | None = getattr(_module_of(attention), "apply_rotary_pos_emb", None)
    return found


def shift_tokens_right(model: Any, labels_BT: Tensor) -> Tensor:
    """Turn labels into a decoder's input, for a class whose module has a function for it in place of a method.

    Raises:
        AttributeError, ValueError: there is no such function, or the config lacks a token that it needs.
    """
    config = model.config
    shifted: Tensor = _module_of(model).shift_tokens_right(
        labels_BT, config.pad_token_id, config.decoder_start_token_id
    )
    return shifted


def _module_of(instance: nn.Module) -> Any:
    return sys.modules[type(instance).__module__]


# What follows reads the source text of attention classes: what they do without a weight of its own shows nowhere else.


def mentions_rotation(attention: nn.Module) -> bool:
    """Return True if the code of an attention class has to do with rotary positions at all."""
    cls: Any = type(attention)
    return any(word in _code_of(cls) for word in ("rotary", "rope", "position_embeddings", "freqs"))


def normalises_keys(attention: nn.Module) -> bool:
    """Return True if an attention class normalises anything, by a module, by a flag that is on, or by a function."""
    code = re.sub(r"#.*", "", _code_of(type(attention).forward))
    for word in re.findall(r"[\w.]*norm\w*", code, re.IGNORECASE):
        own = word.removeprefix("self.")
        found = getattr(attention, own.split(".")[0], None)
        # a float is a mere factor, for example a scale called norm_factor
        absent = word.startswith("self.") and (found in (None, False) or isinstance(found, float))
        if not absent:
            return True
    return False


def gates_behind_queries(attention: nn.Module) -> bool:
    """Return True if q_proj gives each head its query and, behind it, a gate of the same width (Qwen3-Next)."""
    return _GATE_BEHIND_QUERIES.search(_code_of(type(attention).forward)) is not None


_GATE_BEHIND_QUERIES = re.compile(r"q_proj\(hidden_states\)\.view\([^)]*head_dim \* 2\)")


@cache  # a model has many layers of one class
def _code_of(part: Any) -> str:
    return inspect.getsource(part)
