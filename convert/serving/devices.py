"""Rules of the usual serving stacks for G KV heads, from their published sources. Nothing here was run on a GPU.

Tensor parallelism (each stack has its own name for it) splits heads over devices. All stacks but llama.cpp need H
divisible by the number of devices. docs/serving.md has the table in words.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...console import counted

SIZES = (1, 2, 4, 8)
"""Numbers of devices that a table shows."""
EVEN, COPIED, REFUSED = "even", "copied", "refused"


@dataclass(frozen=True)
class Stack:
    """The way in which one stack distributes KV heads.

    Attributes:
        splits_heads: False when whole layers go to devices, so the number of heads does not matter.
        copies_heads: with fewer KV heads than devices, several devices hold a copy of each head.
        kernel_groups: numbers of query heads per KV head with a decoding kernel of their own; None: any number. With
            other numbers FlashInfer takes its kernel for prompts, and TensorRT-LLM its general one.
        source: the place where this is written.
    """

    name: str
    splits_heads: bool
    copies_heads: bool
    kernel_groups: frozenset[int] | None
    source: str


STACKS = (
    Stack(
        "transformers",
        splits_heads=True,
        copies_heads=False,
        kernel_groups=None,
        source="huggingface/transformers#48307: native tensor parallelism has no copies of KV heads",
    ),
    Stack(
        "vLLM",
        splits_heads=True,
        copies_heads=True,
        kernel_groups=frozenset({1, 2, 3, 4, 8}),
        source="vllm/model_executor/models/llama.py; DISPATCH_GQA_GROUP_SIZE in flashinfer/utils.cuh",
    ),
    Stack(
        "SGLang",
        splits_heads=True,
        copies_heads=True,
        kernel_groups=frozenset({1, 2, 3, 4, 8}),
        source="sglang/srt/models/llama.py; DISPATCH_GQA_GROUP_SIZE in flashinfer/utils.cuh",
    ),
    Stack(
        "TensorRT-LLM",
        splits_heads=True,
        copies_heads=True,
        kernel_groups=frozenset(range(1, 33)),
        source="head_grp_size in cpp/tensorrt_llm/kernels/…/decoderXQAImplJIT/supportConfig.cpp",
    ),
    Stack(
        "llama.cpp",
        splits_heads=False,
        copies_heads=False,
        kernel_groups=None,
        source="layers are distributed (--split-mode layer); n_head must be divisible by n_head_kv, which it is",
    ),
)


def placement(stack: Stack, query_heads: int, kv_heads: int, devices: int) -> str:
    """Say whether heads lie ``even``, are ``copied`` (each KV head on several devices) or are ``refused``."""
    if not stack.splits_heads:
        return EVEN
    # No stack copies query heads.
    if query_heads % devices:
        return REFUSED
    if kv_heads % devices == 0:
        return EVEN
    return COPIED if stack.copies_heads and devices % kv_heads == 0 else REFUSED


def shown(devices: dict[int, str]) -> str:
    """Show the accepted numbers of devices, with those that need copies in parentheses: ``1 2 (4 8)``."""
    even = " ".join(str(size) for size, how in devices.items() if how == EVEN)
    copied = " ".join(str(size) for size, how in devices.items() if how == COPIED)
    return f"{even} ({copied})" if copied else even


def slow_kernels(query_heads: int, kv_heads: int) -> list[str]:
    """List the stacks without a decoding kernel of their own for this many query heads per KV head."""
    members = query_heads // kv_heads
    return [stack.name for stack in STACKS if stack.kernel_groups is not None and members not in stack.kernel_groups]


def parallel_warnings(groups: int, devices: int) -> list[str]:
    """Warn somebody who wants to serve ``groups`` KV heads on ``devices``, before anything is converted."""
    heads = counted(groups, "KV head")
    found = []
    if devices % groups and groups % devices:
        found.append(
            f"{heads} cannot be distributed over {devices} devices: vLLM, SGLang and TensorRT-LLM want the "
            "one to divide the other"
        )
    elif groups < devices:
        found.append(
            f"{heads} on {devices} devices: this needs replication, {devices // groups} copies of each: the cache "
            f"of a device shrinks no further, and transformers refuses. Max TP without KV replication = {groups}"
        )
    if groups & (groups - 1):
        found.append(f"{heads} are not a power of two, as numbers of devices usually are")
    return found
