"""Find each tensor's bytes in a ``pytorch_model.bin`` without reading weights and without running code.

torch.save writes a zip archive whose members are stored as they are, one per storage. torch.load on the meta device
with ``weights_only`` gives names, shapes and strides, and says at which offset of the file each storage begins.
https://docs.pytorch.org/docs/stable/notes/serialization.html
"""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

from ...errors import CheckpointError, UnsupportedError
from ..git_lfs import is_pointer, pointer_error
from ..header import Header, TensorInfo, dtype_name

if TYPE_CHECKING:
    import torch

_SAVE_AGAIN = "Save it again as safetensors: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)."
_LONGEST_ORDER = len("little")
_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")


def read_pickle(file: Path) -> Header:
    """List the tensors of one ``.bin`` file in the order of their bytes. Names that share a storage keep their order.

    Raises:
        CheckpointError: the file is missing or damaged.
        UnsupportedError: it holds more than a state dict of plain tensors, or its bytes cannot be used in place.
    """
    entries = _load(file)
    if not isinstance(entries, dict):
        raise _no_state_dict(file, f"a {type(entries).__name__}")
    size = file.stat().st_size
    tensors = sorted((_tensor(file, name, entry, size) for name, entry in entries.items()), key=lambda t: t.begin)
    return Header(tuple(tensors), {})


def _load(file: Path) -> Any:
    import torch

    try:
        # torch would call the pointer a damaged pickle, which hides what to do.
        if is_pointer(file):
            raise pointer_error(file.parent, [Path(file.name)])
        if zipfile.is_zipfile(file):
            _refuse_other_archive(file)
        return torch.load(file, map_location="meta", weights_only=True)
    except UnpicklingError as problem:
        raise _unsafe(file, str(problem)) from problem
    except OSError as problem:
        raise CheckpointError(f"{file} cannot be read: {problem.strerror or problem}.") from problem
    # zipfile and torch raise any of these for damaged bytes
    except (
        zipfile.BadZipFile,
        RuntimeError,
        EOFError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        IndexError,
    ) as problem:
        raise CheckpointError(f"{file} is damaged: torch cannot read it.", "Fetch this file again.") from problem


def _unsafe(file: Path, report: str) -> CheckpointError | UnsupportedError:
    """Tell a pickle that runs code from damaged bytes: torch's report names the class that weights_only forbids."""
    named = _GLOBAL.search(report)
    if named is None:
        return CheckpointError(f"{file} is damaged: torch cannot read it.", "Fetch this file again.")
    return UnsupportedError(
        f"{file} holds the Python object {named[1]}, and loading that could run code; headfold loads tensors only.",
        "If you trust the file, load it yourself and save its tensors as safetensors.",
    )


def _refuse_other_archive(file: Path) -> None:
    """Refuse an archive that torch did not write, or wrote on a big-endian machine.

    The directory of the archive decides before any member is read: a compressed one may be inflated to any size.
    """
    with zipfile.ZipFile(file) as archive:
        # torch stores members as they are; a file that was zipped again has no bytes to copy from
        if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
            raise UnsupportedError(f"{file} was compressed after it was written.", _SAVE_AGAIN)
        if any(member.file_size != member.compress_size for member in archive.infolist()):
            raise CheckpointError(f"{file} is damaged: torch cannot read it.", "Fetch this file again.")
        order = next((member for member in archive.infolist() if member.filename.endswith("/byteorder")), None)
        if order is not None and (order.file_size > _LONGEST_ORDER or archive.read(order) != b"little"):
            raise UnsupportedError(f"{file} was written on a big-endian machine.", _SAVE_AGAIN)


def _tensor(file: Path, name: object, entry: object, size: int) -> TensorInfo:
    import torch

    from ...libraries.torch_internals import offset_in_file

    if not isinstance(name, str) or not isinstance(entry, torch.Tensor):
        raise _no_state_dict(file, f"{name!r}, a {type(entry).__name__},")
    if entry.layout != torch.strided or entry.is_quantized:
        raise UnsupportedError(f"{name} in {file} is a sparse or quantised tensor.", _SAVE_AGAIN)
    start = offset_in_file(entry)
    if start is None:
        raise UnsupportedError(f"{file} was saved in the format of torch before 1.6.", _SAVE_AGAIN)
    begin = int(start + entry.storage_offset() * entry.itemsize)
    end = begin + _span(entry)
    # A crafted stride could reach into other members of the archive.
    if end > min(start + entry.untyped_storage().nbytes(), size):
        raise CheckpointError(f"{file} is damaged: {name} reaches beyond its bytes.", "Fetch this file again.")
    strides = None if entry.is_contiguous() else entry.stride()
    return TensorInfo(name, dtype_name(entry.dtype), tuple(entry.shape), file, begin, end, strides)


def _span(tensor: torch.Tensor) -> int:
    """Count the bytes from the first to the last element."""
    if tensor.numel() == 0:
        return 0
    last = sum((side - 1) * step for side, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def _no_state_dict(file: Path, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"{file} is not a plain state dict: it holds {what} where a named tensor should be.",
        "It may be training state; save the model's state_dict alone, best as safetensors.",
    )
