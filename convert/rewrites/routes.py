"""Choose the type that a source is rewritten as: one row per type, and the reasons why some settings have no route."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

from ...checkpoint.source import Checkpoint
from ...console import counted
from ...errors import CheckpointError, UnsupportedError, UsageError
from ..family.family import group_counts
from ..family.model_type import ModelType
from ..serving.engines import where_it_runs
from .decoder import NeutralSettings
from .reader import TensorReader
from .retyped import RewrittenCheckpoint, headers_of
from .sources import SOURCES
from .target_type import TargetType
from .targets import GPT_BIGCODE, NEMOTRON, OWN_DECODER, PHI

_CARRIED = ("bos_token_id", "eos_token_id", "pad_token_id", "tokenizer_class", "task_specific_params")
"""Keys of config.json that mean the same in every type."""


@dataclass(frozen=True)
class Route:
    """The types that one checkpoint can be rewritten as, because its own class has no KV-head setting.

    Attributes:
        model_type: type of the source.
        targets: types that it can be rewritten as; the first that can have the groups is taken.
        settings: its settings in neutral form.
    """

    model_type: ModelType
    targets: tuple[TargetType, ...]
    settings: NeutralSettings

    @property
    def heads(self) -> int:
        """Query heads, which are as many as KV heads."""
        return self.settings.heads

    @property
    def groups(self) -> list[int]:
        """The possible numbers of groups."""
        return [
            groups for groups in group_counts(self.heads) if any(self._has(target, groups) for target in self.targets)
        ]

    def target(self, *groups: int) -> TargetType | None:
        """Find the first type that can have all these numbers of groups, or None."""
        return next((one for one in self.targets if all(self._has(one, number) for number in groups)), None)

    def _has(self, target: TargetType, groups: int) -> bool:
        return target.any_groups or groups in (1, self.heads)

    def neutral_config(self, target: TargetType) -> dict[str, Any]:
        """Return the part of a target's config.json that describes the architecture."""
        return {"model_type": target.model_type, **target.config(self.settings, False)}

    def describe(self) -> str:
        """Tell what the user gets."""
        by_target = {
            target: [groups for groups in self.groups if self.target(groups) is target] for target in self.targets
        }
        used = {target: groups for target, groups in by_target.items() if groups}
        told = []
        for target, groups in used.items():
            which = f" with {' or '.join(map(str, groups))} KV heads" if len(used) > 1 else ""
            told.append(f"Rewritten exactly as {target.model_type} ({target.class_name}){which}.")
            config = self.neutral_config(target)
            told.append(where_it_runs(config, fewer_heads=min(groups) < self.heads, rewritten=True).text)
        return " ".join(told)


ROWS: dict[str, Callable[[Any], tuple[TargetType, ...]]] = {
    "gpt_neox": lambda config: (PHI if config.use_parallel_residual else NEMOTRON,),
    "gptj": lambda config: (PHI,),
    "codegen": lambda config: (PHI,),
    "gpt2": lambda config: (GPT_BIGCODE, OWN_DECODER),
    "opt": lambda config: (GPT_BIGCODE, OWN_DECODER) if _plain_opt(config) else (OWN_DECODER,),
    "gpt_neo": lambda config: (OWN_DECODER,),
    "bloom": lambda config: (OWN_DECODER,),
    "mpt": lambda config: (OWN_DECODER,),
}
"""Source type → (resolved config → the types it can be rewritten as). The first that can have the groups is taken."""


def _plain_opt(config: Any) -> bool:
    """Return False for norms behind attention and MLP, projected embeddings (both in opt-350m) and no last norm."""
    settings = SOURCES["opt"].settings(config)
    return settings.norms_first and settings.final_norm and settings.embedding_width is None


def route_of(model_type: ModelType) -> Route | None:
    """Find the route for a checkpoint from its config.json alone, or None where its type has none.

    Raises:
        UnsupportedError: the type has a route, but not with these settings.
    """
    name = model_type.name
    if name not in ROWS:
        return None
    source, resolved = SOURCES[name], model_type.resolved
    # Classes with another head have tensors that a causal model of the target type cannot hold.
    usual, found = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name], model_type.model_class.__name__
    if found != usual:
        raise UnsupportedError(f"Of type {name}, only {usual} can be rewritten, not {found}.")
    _require_sizes(resolved)
    for holds, reason in source.demands:
        if not holds(resolved):
            raise UnsupportedError(
                f"This {name} checkpoint cannot be rewritten as a type with fewer KV heads: {reason}."
            )
    return Route(model_type, ROWS[name](resolved), source.settings(resolved))


def _require_sizes(resolved: Any) -> None:
    """Refuse sizes that no model can have. The classes would fail on them later, with messages that say less."""
    names = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size", "max_position_embeddings")
    for name in names:
        size = getattr(resolved, name, 1)
        if not isinstance(size, int) or size < 1:
            raise CheckpointError(f"config.json asks for a model whose {name} is {size}.", "Repair config.json.")
    if resolved.hidden_size % resolved.num_attention_heads:
        raise CheckpointError(
            f"config.json asks for {counted(resolved.num_attention_heads, 'head')} in a hidden size of "
            f"{resolved.hidden_size}.",
            "Repair config.json.",
        )


def rewritten(checkpoint: Checkpoint, route: Route, *groups: int) -> RewrittenCheckpoint:
    """Present the checkpoint as a type that can have each of these numbers of KV heads.

    Raises:
        UsageError: no type that it can be rewritten as has such a number.
        UnsupportedError: the checkpoint cannot be rewritten exactly.
        CheckpointError: config.json and the tensors contradict each other.
    """
    target = route.target(*groups)
    impossible = [number for number in groups if number not in route.groups]
    if target is None or impossible:
        raise UsageError(
            f"{counted(route.heads, 'KV head')} of type {route.model_type.name} cannot be merged into "
            f"{counted(impossible[0], 'group')}.",
            f"Possible numbers of groups: {', '.join(map(str, route.groups))}.",
        )
    return as_target(checkpoint, route, target)


def as_target(checkpoint: Checkpoint, route: Route, target: TargetType) -> RewrittenCheckpoint:
    """Present the checkpoint as ``target``, see :func:`rewritten`."""
    reader = TensorReader(checkpoint, route.model_type)
    decoder = SOURCES[route.model_type.name].read(reader, route.settings)
    lazies = dict(target.tensors(decoder))
    config = target_config(checkpoint, route, target, tied=decoder.head is None)
    headers, tensors = headers_of(lazies, checkpoint.weight_files)
    unused = reader.unused()
    dropped = [f"{len(unused)} tensors that the class does not use are left out, {unused[0]} for one"] if unused else []
    return RewrittenCheckpoint(
        spec=checkpoint.spec,
        folder=checkpoint.folder,
        config=config,
        config_text=json.dumps(config, indent=2, ensure_ascii=False) + "\n",
        headers=headers,
        sharded=checkpoint.sharded,
        tensors=tensors,
        side_files=checkpoint.side_files,
        left_out=checkpoint.left_out,
        notes=(*checkpoint.notes, *dropped),
        original=checkpoint,
        source_type=route.model_type.name,
        model_type=target.model_type,
        class_name=target.class_name,
        states_of=target.model_type if target.folds_norms else route.model_type.name,
        lazies=lazies,
    )


def target_config(checkpoint: Checkpoint, route: Route, target: TargetType, *, tied: bool) -> dict[str, Any]:
    """Make config.json of ``target``, with all KV heads, without reading weights.

    Args:
        tied: the output head is the embedding.
    """
    source = checkpoint.config
    resolved = route.model_type.resolved
    ids = {key: getattr(resolved, key, None) for key in _CARRIED if key.endswith("_id")}
    carried = {key: source[key] for key in _CARRIED if source.get(key) is not None}
    # transformers 4 writes torch_dtype and transformers 5 writes dtype, and both read the older key.
    dtype = source.get("torch_dtype") or source.get("dtype")
    return {
        "architectures": [target.class_name],
        "model_type": target.model_type,
        **target.config(route.settings, tied),
        "use_cache": True,
        **ids,
        # Without a name AutoTokenizer goes by model_type, which is another one now.
        **({} if names_tokenizer(checkpoint) else _tokenizer_class(route.model_type.name)),
        **carried,
        **({} if dtype is None else {"torch_dtype": dtype}),
    }


def _tokenizer_class(source_type: str) -> dict[str, str]:
    named = TOKENIZER_MAPPING_NAMES.get(source_type)
    return {} if named is None else {"tokenizer_class": named}


def names_tokenizer(checkpoint: Checkpoint) -> bool:
    """Return True if the folder says which tokenizer class it needs. Otherwise the type decides, and it changes."""
    file = checkpoint.folder / "tokenizer_config.json"
    if not file.exists():
        return False
    try:
        named = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise CheckpointError(f"{file} is not valid JSON.", "Fetch or repair this file.") from problem
    return isinstance(named, dict) and named.get("tokenizer_class") is not None
