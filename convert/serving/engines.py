"""Where results run, by model type: engines that were tried, and faults that are known.

Tried means: once, by hand, on a CPU in float32, with small models of that type (most of them random) and fewer KV heads
than query heads. The engine's log-probabilities were compared with those of transformers. docs/serving.md has the
conditions. All else was read in the sources of the engines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...checkpoint.modelling import OWN_TYPES, OwnModelType
from ...console import info, warn

TESTED_VERSIONS = "4.57 and 5.24"
"""Versions of transformers that results of another type than their source are tested in, see test_rewrites*.py.

The files with our own classes have the same list (TESTED). Only these versions can import them, so it is repeated here.
"""
ENGINES = {"vLLM": "0.32.0", "llama.cpp": "0c1e570", "mlx-lm": "0.32.2"}
"""Engines that were tried, with the version or commit."""
NOT_TRIED = ("SGLang", "TensorRT-LLM")

_BY_ALL = ("gemma2", "gemma3_text", "llama", "mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen3", "stablelm",
           "starcoder2")  # fmt: skip
AGREED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_BY_ALL, tuple(ENGINES)),
    "gpt_bigcode": tuple(ENGINES),
    "phi": ("vLLM", "mlx-lm"),
    "nemotron": ("vLLM",),
}
"""Type → engines that computed what transformers computes."""


@dataclass(frozen=True)
class Fault:
    """A result that an engine does not run as it is.

    Attributes:
        model_types: types of results with this fault.
        engines: engines that have it.
        loud: worth a warning, because the engine loads the result and computes something else without an error.
        says: a sentence.
        applies: (config.json of the result) → True if it has the fault.
        few: only results with fewer KV heads than query heads have it.
    """

    model_types: tuple[str, ...]
    engines: tuple[str, ...]
    loud: bool
    says: str
    applies: Callable[[Mapping[str, Any]], bool] = lambda config: True
    few: bool = False


def _activation(config: Mapping[str, Any]) -> str:
    return str(config.get("hidden_act") or config.get("activation_function") or "")


FAULTS = (
    Fault(
        ("nemotron",),
        ("llama.cpp", "mlx-lm"),
        loud=True,
        says="llama.cpp and mlx-lm load this result and compute something else without an error (tried): their "
        "nemotron has squared ReLU, whatever config.json says. Do not use them for it.",
        applies=lambda config: _activation(config) != "relu2",
    ),
    Fault(
        ("gpt_bigcode",),
        ("llama.cpp", "mlx-lm"),
        loud=True,
        says="llama.cpp and mlx-lm would compute something else without an error (by their sources): their gpt_bigcode "
        "has GELU, whatever config.json says. Do not use them for it.",
        applies=lambda config: "gelu" not in _activation(config),
    ),
    Fault(
        ("phi",),
        ("llama.cpp",),
        loud=False,
        says="llama.cpp refuses it (tried): its conversion script writes the number of query heads for KV heads. With "
        "`phi2.attention.head_count_kv` in the GGUF set to the number of KV heads, llama.cpp agreed.",
        few=True,
    ),
    Fault(
        ("phi",),
        ("SGLang",),
        loud=False,
        says="SGLang's phi has query heads only (by its source).",
        few=True,
    ),
    Fault(
        ("falcon",),
        ("llama.cpp",),
        loud=True,
        says="llama.cpp would compute something else (by its source): its falcon has no ALiBi.",
        applies=lambda config: bool(config.get("alibi")),
    ),
    Fault(
        ("qwen2", "starcoder2", "stablelm"),
        ("mlx-lm",),
        loud=False,  # not of the conversion: the source has the same fault
        says="mlx-lm reads `rope_theta` at the top of config.json, where this checkpoint has none. It computes "
        "something else or fails, and does so with the source too (tried).",
        applies=lambda config: "rope_parameters" in config and "rope_theta" not in config,
    ),
)


@dataclass(frozen=True)
class WhereItRuns:
    """Where one result runs, in sentences.

    Attributes:
        runs: where it does.
        faults: where it does not, or not as it is.
        warnings: where it loads and computes something else.
    """

    runs: str
    faults: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """Join all sentences."""
        return " ".join((self.runs, *self.faults, *self.warnings))

    def say(self) -> None:
        """Print it, with a warning for each engine that would compute something else."""
        info(" ".join((self.runs, *self.faults)))
        for warning in self.warnings:
            warn(warning)


def where_it_runs(config: Mapping[str, Any], *, fewer_heads: bool, rewritten: bool = False) -> WhereItRuns:
    """Say where a result runs.

    Args:
        config: its config.json.
        fewer_heads: it has fewer KV heads than query heads.
        rewritten: its source is of another type.
    """
    name = str(config.get("model_type"))
    own = OWN_TYPES.get(name)
    if own is not None:
        return _own(own)
    found, failing = _faults(config, fewer_heads=fewer_heads), not_served_by(config, fewer_heads=fewer_heads)
    agreed = [engine for engine in AGREED.get(name, ()) if engine not in failing]
    untried = [engine for engine in (*ENGINES, *NOT_TRIED) if engine not in (*agreed, *failing)]
    here = f"transformers ({TESTED_VERSIONS} are tested)" if rewritten else "transformers, as its source does"
    named = _listed([f"{engine} {ENGINES[engine]}" for engine in agreed])
    tried = f" {named} agreed with transformers on small models of this type." if agreed else ""
    others = f" Not tried: {_listed(untried)}." if untried else ""
    return WhereItRuns(
        f"The result runs in {here}.{tried}{others}",
        tuple(fault.says for fault in found if not fault.loud),
        tuple(fault.says for fault in found if fault.loud),
    )


def not_served_by(config: Mapping[str, Any], *, fewer_heads: bool) -> tuple[str, ...]:
    """List the engines that cannot run a result as it is; see :func:`where_it_runs`."""
    if config.get("model_type") in OWN_TYPES:
        return (*ENGINES, *NOT_TRIED)
    return tuple(engine for fault in _faults(config, fewer_heads=fewer_heads) for engine in fault.engines)


def _faults(config: Mapping[str, Any], *, fewer_heads: bool) -> list[Fault]:
    return [
        fault
        for fault in FAULTS
        if config.get("model_type") in fault.model_types and (fewer_heads or not fault.few) and fault.applies(config)
    ]


def _own(own: OwnModelType) -> WhereItRuns:
    return WhereItRuns(
        f"The result runs in transformers {TESTED_VERSIONS} with trust_remote_code=True, by the file "
        f"{own.file_name} beside the weights, and in headfold as it is. Other versions of transformers refuse it.",
        (f"{_listed([*ENGINES, *NOT_TRIED])} do not know this type.",),
    )


def _listed(names: list[str]) -> str:
    return " and ".join(part for part in (", ".join(names[:-1]), *names[-1:]) if part)
