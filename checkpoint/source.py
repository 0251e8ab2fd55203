"""A Hugging Face checkpoint on disk, seen through its headers: no weight is read until it is asked for."""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError, UnsupportedError
from .header import Header, TensorInfo, read_header, torch_dtype
from .hub import FOREIGN_WEIGHTS, find_folder
from .record import METRICS_NAME, RECORD_NAME

if TYPE_CHECKING:
    import torch

CONFIG_NAME = "config.json"
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_NOT_COPIED = (*FOREIGN_WEIGHTS, "*.safetensors", "*.index.json", CONFIG_NAME, RECORD_NAME, METRICS_NAME)
_REPLACED = {CONFIG_NAME, INDEX_NAME, RECORD_NAME, METRICS_NAME}  # the result gets its own
_SKIPPED_FOLDERS = {".git", ".cache", "__pycache__"}
_SAMPLE_BYTES = 4096


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint folder holds.

    Attributes:
        spec: what the user called it; ``folder`` is where it lies.
        config: config.json, parsed; ``config_text`` is the same as it stands on disk.
        headers: weight file → its header; files that an index does not name are not here.
        tensors: name → where it lies, over all weight files.
        side_files: every other file to copy, relative to ``folder``; ``left_out`` those that are not copied.
        notes: what is odd about the folder, one sentence each.
    """

    spec: str
    folder: Path
    config: dict[str, Any]
    config_text: str
    headers: dict[Path, Header] = field(default_factory=dict)
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    side_files: tuple[Path, ...] = ()
    left_out: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()

    @classmethod
    def open(cls, spec: str | Path, *, revision: str | None = None, weights: bool = True) -> Checkpoint:
        """Look at a local folder or a hub id.

        Args:
            revision: branch, tag or commit of a hub id.
            weights: False needs config.json alone, so headers and tensors stay empty.

        Raises:
            UsageError: nothing is there.
            CheckpointError: files are missing, damaged or contradict each other.
            UnsupportedError: the folder holds no safetensors weights.
        """
        folder = find_folder(spec, revision, weights=weights)
        config_text, config = _read_config(folder)
        if not weights:
            return cls(str(spec), folder, config, config_text, side_files=tuple(_walk(folder)[0]))
        files, named = _weight_files(folder)
        headers = {file: read_header(file) for file in files}
        tensors, notes = _collect_tensors(headers, named)
        side_files, left_out = _walk(folder)
        used = {file.relative_to(folder) for file in files}
        strays = [path for path in left_out if path.suffix == ".safetensors" and path not in used]
        if strays:
            notes.append(f"not named by the index, so not read: {', '.join(map(str, strays))}")
        left_out = [path for path in left_out if path not in used and path.name not in _REPLACED]
        return cls(
            str(spec), folder, config, config_text, headers, tensors, tuple(side_files), tuple(left_out), tuple(notes)
        )

    @property
    def weight_files(self) -> list[Path]:
        """The weight files that count, absolute, in the order of the index."""
        return list(self.headers)

    @property
    def sharded(self) -> bool:
        """True when an index says where each tensor is."""
        return (self.folder / INDEX_NAME).exists()

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors, without headers."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def read(self, name: str) -> torch.Tensor:
        """One tensor, mapped from its file: its pages are the file's own and count as cache, not as memory in use."""
        import torch

        info = self.tensors[name]
        dtype = torch_dtype(info.dtype)
        count = math.prod(info.shape)
        if count == 0:
            return torch.empty(info.shape, dtype=dtype)
        base = info.begin - info.begin % mmap.ALLOCATIONGRANULARITY
        with info.file.open("rb") as stream:
            # A private copy-on-write map is writable for torch and never reaches the file.
            mapped = mmap.mmap(stream.fileno(), info.end - base, access=mmap.ACCESS_COPY, offset=base)
        offset = info.begin - base
        if offset % dtype.itemsize:
            return torch.frombuffer(bytearray(mapped[offset:]), dtype=dtype, count=count).reshape(info.shape)
        return torch.frombuffer(mapped, dtype=dtype, count=count, offset=offset).reshape(info.shape)

    def digest(self) -> str:
        """sha256 over config.json, every header and the first 4 KiB of every tensor.

        Cheap for any size, and it tells fine-tunes of one model apart.
        """
        state = hashlib.sha256(self.config_text.encode("utf-8"))
        for file, header in self.headers.items():
            with file.open("rb") as stream:
                for tensor in header.tensors:
                    state.update(f"\n{tensor.name} {tensor.dtype} {tensor.shape} ".encode())
                    stream.seek(tensor.begin)
                    state.update(stream.read(min(_SAMPLE_BYTES, tensor.nbytes)))
        return state.hexdigest()


def _read_config(folder: Path) -> tuple[str, dict[str, Any]]:
    try:
        text = (folder / CONFIG_NAME).read_bytes().decode("utf-8-sig")
        config = json.loads(text)
    except FileNotFoundError as problem:
        raise _no_config(folder) from problem
    except OSError as problem:
        raise CheckpointError(f"{folder / CONFIG_NAME} cannot be read: {problem.strerror}.") from problem
    except (ValueError, RecursionError) as problem:
        raise CheckpointError(
            f"{folder / CONFIG_NAME} is no valid JSON: {problem}.", "Fetch or repair this file."
        ) from problem
    if not isinstance(config, dict):
        raise CheckpointError(f"{folder / CONFIG_NAME} is no JSON object.", "Fetch or repair this file.")
    return text, config


def _no_config(folder: Path) -> CheckpointError | UnsupportedError:
    if (folder / "adapter_config.json").exists():
        return UnsupportedError(
            f"{folder} holds only a PEFT adapter, not a model.",
            "Merge it first (PeftModel.merge_and_unload, then save_pretrained) and convert the merged checkpoint.",
        )
    return CheckpointError(f"{folder} has no {CONFIG_NAME}.", "Give the folder of a Hugging Face checkpoint.")


def _weight_files(folder: Path) -> tuple[list[Path], dict[str, str] | None]:
    """The files that hold the weights, and the index (tensor → file name) where there is one."""
    if (folder / INDEX_NAME).is_symlink() or (folder / INDEX_NAME).exists():
        named = _read_index(folder)
        return [folder / name for name in dict.fromkeys(named.values())], named
    single = folder / SINGLE_NAME
    if single.is_symlink() or single.exists():
        return [single], None
    raise _no_weights(folder)


def _no_weights(folder: Path) -> CheckpointError | UnsupportedError:
    if (folder / "adapter_config.json").exists():
        return UnsupportedError(
            f"{folder} holds only a PEFT adapter, not a model.",
            "Merge it first (PeftModel.merge_and_unload, then save_pretrained) and convert the merged checkpoint.",
        )
    shards = sorted(file.name for file in folder.glob("*.safetensors"))
    if shards:
        return CheckpointError(
            f"{folder} holds {shards[0]} but neither {SINGLE_NAME} nor {INDEX_NAME}.",
            "The checkpoint is incomplete: fetch the index as well.",
        )
    others = sorted(file.name for file in folder.iterdir() if any(fnmatch(file.name, form) for form in FOREIGN_WEIGHTS))
    if others:
        return UnsupportedError(
            f"{folder} has no safetensors weights, only {', '.join(others[:4])}{' …' if len(others) > 4 else ''}.",
            "Save it again as safetensors: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER).",
        )
    return CheckpointError(f"{folder} holds no weights.", "Give a folder with model.safetensors or its shards.")


def _read_index(folder: Path) -> dict[str, str]:
    """The weight map of the index; its names come from strangers, so one that leaves the folder is refused."""
    index = folder / INDEX_NAME
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8-sig"))["weight_map"]
        named = {str(tensor): str(file) for tensor, file in weight_map.items()}
    except OSError as problem:
        raise CheckpointError(f"{index} cannot be read: {problem.strerror}.") from problem
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
        raise CheckpointError(f"{index} is no valid index of shards.", "Fetch or repair this file.") from problem
    if not named:
        raise CheckpointError(f"{index} names no tensor.", "Fetch or repair this file.")
    for name in dict.fromkeys(named.values()):
        outside = PurePosixPath(name).is_absolute() or PureWindowsPath(name).drive or "\\" in name
        if outside or ".." in PurePosixPath(name).parts or "\0" in name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{index} points to {name!r}, which is no safetensors file inside the folder.")
        if not (folder / name).is_file():
            raise CheckpointError(
                f"{index} names {name}, which is not there.", "The checkpoint is incomplete: fetch it again."
            )
    return named


def _collect_tensors(
    headers: dict[Path, Header], named: dict[str, str] | None
) -> tuple[dict[str, TensorInfo], list[str]]:
    tensors: dict[str, TensorInfo] = {}
    for header in headers.values():
        for info in header.tensors:
            if info.name in tensors:
                raise CheckpointError(f"{info.name} is in both {tensors[info.name].file.name} and {info.file.name}.")
            tensors[info.name] = info
    if not tensors:
        raise CheckpointError("The weight files hold no tensor.", "Fetch the checkpoint again.")
    notes = []
    if named is not None:
        for name, file in named.items():
            if name not in tensors or tensors[name].file.name != PurePosixPath(file).name:
                raise CheckpointError(
                    f"The index says that {name} is in {file}, but it is not.", "Fetch or repair the index."
                )
        extra = [name for name in tensors if name not in named]
        if extra:
            notes.append(
                f"{len(extra)} tensors are in the shards but not in the index, {extra[0]} for one; they are kept"
            )
    return tensors, notes


def _walk(folder: Path) -> tuple[list[Path], list[Path]]:
    """All files below ``folder``, relative: those to copy as they are, and those left out."""
    copied: list[Path] = []
    left_out: list[Path] = []
    seen: set[str] = set()
    for place, folders, files in os.walk(folder, followlinks=True):
        here = Path(place)
        folders[:] = sorted(name for name in folders if name not in _SKIPPED_FOLDERS)
        if os.path.realpath(place) in seen:  # a link that leads back up
            folders.clear()
            continue
        seen.add(os.path.realpath(place))
        for name in sorted(files):
            if not (here / name).exists():
                raise CheckpointError(f"{here / name} is a link to a file that is gone.", "Fetch the checkpoint again.")
            path = (here / name).relative_to(folder)
            unwanted = any(fnmatch(name, form) for form in _NOT_COPIED) or not (here / name).is_file()
            (left_out if unwanted else copied).append(path)
    return copied, left_out
