"""Read and write safetensors headers without reading the weights behind them.

The format: 8 bytes little-endian length N, N bytes of JSON (name → dtype, shape, data_offsets), then one buffer without
gaps. https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError
from .git_lfs import is_pointer, pointer_error

if TYPE_CHECKING:
    import torch

_LENGTH_BYTES = 8
_LARGEST_HEADER = 100_000_000  # the limit of the safetensors library
_BITS = {
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}


_TORCH_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
}
FLOATS = ("F16", "BF16", "F32", "F64")
"""The dtypes whose values can be averaged. Those of 8-bit floats cannot: their scales are in other tensors."""


@dataclass(frozen=True)
class TensorInfo:
    """The place of one tensor on disk.

    Attributes:
        dtype: as safetensors spells it, for example ``BF16``.
        begin, end: absolute byte range in ``file``.
        strides: steps between elements of a pickled tensor that is not stored row by row; None for all others.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    end: int
    strides: tuple[int, ...] | None = None

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements when they are stored row by row."""
        return byte_size(self.dtype, self.shape)


@dataclass(frozen=True)
class Header:
    """Header of one file: its tensors in the order of their bytes, and its free-form metadata."""

    tensors: tuple[TensorInfo, ...]
    metadata: dict[str, str]


def byte_size(dtype: str, shape: tuple[int, ...]) -> int:
    """Count the bytes of a tensor.

    Raises:
        CheckpointError: the dtype is unknown.
    """
    if dtype not in _BITS:
        raise CheckpointError(f"The safetensors dtype {dtype} is unknown.", "Save the checkpoint in a standard dtype.")
    return math.prod(shape) * _BITS[dtype] // 8


def torch_dtype(dtype: str) -> torch.dtype:
    """``BF16`` → ``torch.bfloat16``.

    Raises:
        CheckpointError: headfold does not compute in this dtype.
    """
    import torch

    if dtype not in _TORCH_NAMES:
        raise CheckpointError(
            f"headfold does not compute with tensors of dtype {dtype}.", "Save the checkpoint in bf16 or float32."
        )
    found: torch.dtype = getattr(torch, _TORCH_NAMES[dtype])
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` → ``BF16``.

    Raises:
        CheckpointError: the dtype is unknown to safetensors or to headfold.
    """
    spelled = str(dtype).removeprefix("torch.")
    for name, torch_name in _TORCH_NAMES.items():
        if torch_name == spelled:
            return name
    raise CheckpointError(f"Tensors of dtype {spelled} cannot be converted.", "Save the checkpoint in bf16 or float32.")


def read_tensor(info: TensorInfo) -> torch.Tensor:
    """Map one tensor from its file. Its pages count as the system's cache, not as memory of this process.

    Raises:
        CheckpointError: headfold does not compute in its dtype.
    """
    import torch

    dtype = torch_dtype(info.dtype)
    if math.prod(info.shape) == 0:
        return torch.empty(info.shape, dtype=dtype)
    base = info.begin - info.begin % mmap.ALLOCATIONGRANULARITY
    with info.file.open("rb") as stream:
        # A private copy-on-write map is writable for torch and never reaches the file.
        mapped = mmap.mmap(stream.fileno(), info.end - base, access=mmap.ACCESS_COPY, offset=base)
    offset, count = info.begin - base, (info.end - info.begin) // dtype.itemsize
    if offset % dtype.itemsize:
        # safetensors allows unaligned tensors, torch does not: copy these
        flat = torch.frombuffer(bytearray(mapped[offset:]), dtype=dtype, count=count)
    else:
        flat = torch.frombuffer(mapped, dtype=dtype, count=count, offset=offset)
    return flat.reshape(info.shape) if info.strides is None else flat.as_strided(info.shape, info.strides)


def read_header(file: Path) -> Header:
    """Read and check the header of ``file`` without reading weights.

    Raises:
        CheckpointError: the file is missing, truncated or damaged.
    """
    try:
        with file.open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(0)
            head = stream.read(_LENGTH_BYTES)
            length = int.from_bytes(head, "little")
            if is_pointer(file):
                raise pointer_error(file.parent, [Path(file.name)])
            if len(head) < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, _LARGEST_HEADER):
                raise _damaged(file, "its header is truncated or damaged")
            entries = json.loads(stream.read(length).decode("utf-8"))
    except FileNotFoundError as problem:
        raise CheckpointError(f"{file} does not exist.", "The checkpoint is incomplete: fetch it again.") from problem
    except (UnicodeDecodeError, ValueError, RecursionError) as problem:
        raise _damaged(file, "its header is not JSON") from problem
    except OSError as problem:
        raise CheckpointError(f"{file} cannot be read: {problem.strerror}.", "Check its permissions.") from problem
    if not isinstance(entries, dict):
        raise _damaged(file, "its header is not a JSON object")
    metadata = _metadata(entries.pop("__metadata__", None))
    start = _LENGTH_BYTES + length
    tensors = sorted(
        (_tensor(file, name, entry, start) for name, entry in entries.items()), key=lambda t: (t.begin, t.end)
    )
    _check_layout(file, tensors, start, size)
    return Header(tuple(tensors), metadata)


def encode_header(tensors: Sequence[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str]) -> bytes:
    """Encode the header of a file that holds ``tensors`` (name, dtype, shape) in this order, without gaps."""
    entries: dict[str, Any] = {"__metadata__": metadata}
    begin = 0
    for name, dtype, shape in tensors:
        end = begin + byte_size(dtype, shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)  # the buffer starts aligned, as the library writes it
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _metadata(raw: object) -> dict[str, str]:
    """Read the free-form metadata. Some writers leave it out, or write null."""
    if not isinstance(raw, dict):
        return {}
    return {str(key): str(value) for key, value in raw.items()}


def _tensor(file: Path, name: str, entry: object, start: int) -> TensorInfo:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int(end)]} if (
            all(type(side) is int and side >= 0 for side in shape) and 0 <= begin <= end
        ):
            info = TensorInfo(name, dtype, tuple(shape), file, start + begin, start + end)
        case _:
            raise _damaged(file, f"the header entry of {name} is not valid")
    if end - begin != info.nbytes:
        raise _damaged(
            file, f"{name} has {end - begin} bytes, but its shape {list(shape)} in {dtype} needs another number"
        )
    return info


def _check_layout(file: Path, tensors: list[TensorInfo], start: int, size: int) -> None:
    position = start
    for tensor in tensors:
        if tensor.begin != position:
            raise _damaged(file, f"the bytes of {tensor.name} overlap others or leave a gap")
        position = tensor.end
    if position > size:
        raise _damaged(file, f"it is truncated: {size:,} bytes of {position:,}")
    if position < size:
        raise _damaged(file, f"it has {size - position:,} bytes too many at its end")


def _damaged(file: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{file} is damaged: {why}.", "Fetch or save this file again.")
