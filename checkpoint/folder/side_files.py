"""Sort the files beside the weights: tokenizer, templates, code and parts of the model are copied, the rest is named.

The rest are other forms of the same weights, training state, unfinished downloads and links that lead elsewhere. Names
decide first. What no name gives away is decided by its first bytes and by its size.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from ...console import info, warn
from ...errors import CheckpointError
from ..git_lfs import is_pointer, pointer_error
from ..header import TensorInfo, read_header
from .hub import FOREIGN_WEIGHTS
from .modules import module_folders

WEIGHTS = "weights in another form"
STATE = "training state"
UNFINISHED = "unfinished downloads"
ADAPTER = "adapters of the source's weights; merge them first"
OUTSIDE = "links that lead out of the checkpoint"
NESTED = "links below a linked folder, or back to a folder above"
SPECIAL = "no regular files"
LARGE = "large files of an unknown kind"
_EXPECTED = (WEIGHTS, STATE, UNFINISHED)
"""Reasons that need no warning."""

_SKIPPED_FOLDERS = {".git", ".cache", "__pycache__", ".ipynb_checkpoints"}
_STATE_FOLDERS = (
    *("checkpoint-[0-9]*", "global_step*", "iter_[0-9]*", "step-[0-9]*", "optimizer_[0-9]*", "pytorch_model_fsdp*"),
    *("mp_rank_*", "wandb", "mlruns", "lightning_logs"),
)
_STATE_FILES = (
    *("*.distcp", "trainer_state.json", "training_args.*", "rng_state*", "random_states_*"),
    *("zero_pp_rank_*", "mp_rank_*", "zero_to_fp32.py", "latest", "latest_checkpointed_iteration.txt"),
    *("optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt", "events.out.tfevents.*"),
)
_WEIGHT_FOLDERS = ("saved_model", "*.mlpackage", "*.mlmodelc", "*.nemo")
_UNFINISHED_FILES = (
    *("*.part", "*.part[0-9]*", "*.part-*", "*.partial", "*.filepart", "*.incomplete", "*.tmp", "*.temp"),
    *("*.aria2", "*.aria2__temp", "*.crdownload", "*.opdownload", "*.download", "*.!qb", "*.!ut"),
)
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.*", "adapter_model-*")
_LOADED_BY_NAME = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges*", "*.model", "*.tiktoken"),
    *("chat_template*", "generation_config.json", "*processor_config.json", "configuration_*.py", "modeling_*.py"),
)
"""Files that loading needs. They may be links to files of the same name elsewhere."""
_PLAIN = (".json", ".model", ".txt", ".py", ".jinja", ".tiktoken", ".vocab", ".spm", ".bpe", ".md")
"""Endings of text and tokenizers, which may be large."""
_LARGEST_UNKNOWN = 64 * 2**20  # the largest tokenizers in use have 35 MB
_BEGINNINGS = (b"GGUF", b"\x89HDF\r\n\x1a\n", b"\x93NUMPY", b"\x80\x02\x8a\nl\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.")
"""First bytes of GGUF, HDF5, numpy, and of torch before version 1.6."""


@dataclass(frozen=True)
class SideFiles:
    """The files beside the weights, relative to the folder.

    Attributes:
        left_out: file or folder → the reason why it is not copied.
    """

    copied: tuple[Path, ...]
    left_out: dict[Path, str]


def find_side_files(
    folder: Path,
    *,
    used: Collection[Path] = (),
    tensors: Mapping[str, TensorInfo] | None = None,
    replaced: Collection[str] = (),
) -> SideFiles:
    """Sort all files below a folder.

    Args:
        used: weight files that are read, relative to the folder.
        tensors: the tensors in them. None: weights are not looked at, so none are copied.
        replaced: names of files at the top that a result has of its own.

    Raises:
        CheckpointError: a file to copy is a Git LFS pointer, or a link to nothing.
    """
    sorter = _Sorter(folder, set(used), dict(tensors or {}), set(replaced), module_folders(folder))
    sorter.visit(Path(), [os.path.realpath(folder)], linked=False)
    sorter.add_indices()
    if sorter.pointers:
        raise pointer_error(folder, sorter.pointers)
    return SideFiles(tuple(sorted(sorter.copied)), dict(sorted(sorter.left_out.items())))


def announce(folder: Path, left_out: Mapping[Path, str]) -> None:
    """Name everything that is not copied, reason by reason."""
    for reason in dict.fromkeys(left_out.values()):
        paths = [path for path, why in left_out.items() if why == reason]
        named = ", ".join(f"{path}/" if (folder / path).is_dir() else str(path) for path in paths)
        (info if reason in _EXPECTED else warn)(f"Not copied ({reason}): {named}.")


@dataclass
class _Sorter:
    """Walks through a folder and decides about each entry."""

    folder: Path
    used: set[Path]
    tensors: dict[str, TensorInfo]
    replaced: set[str]
    modules: set[Path]
    copied: list[Path] = field(default_factory=list)
    left_out: dict[Path, str] = field(default_factory=dict)
    pointers: list[Path] = field(default_factory=list)
    indices: list[Path] = field(default_factory=list)

    def visit(self, place: Path, above: list[str], *, linked: bool) -> None:
        """Sort the entries of ``place``.

        Args:
            above: real paths of the folders that lead here, this one included.
            linked: one of them is a link.
        """
        for name in sorted(entry.name for entry in (self.folder / place).iterdir()):
            path = place / name
            full = self.folder / path
            if not full.is_dir():
                self._sort_file(path, full)
                continue
            if name in _SKIPPED_FOLDERS:
                continue
            reason = self._reason_for_folder(path, full, above, linked)
            if reason is None:
                self.visit(path, [*above, os.path.realpath(full)], linked=linked or full.is_symlink())
            else:
                self.left_out[path] = reason

    def _reason_for_folder(self, path: Path, full: Path, above: list[str], linked: bool) -> str | None:
        if full.is_symlink():
            if not self._is_inside(full):
                return OUTSIDE
            # followed once only, so that links to each other end
            if linked or os.path.realpath(full) in above:
                return NESTED
        if any(path in file.parents for file in self.used) or self._in_module(path):
            return None
        if _matches(path.name, _STATE_FOLDERS) or any(full.glob("*.distcp")):
            return STATE
        if _matches(path.name, _WEIGHT_FOLDERS):
            return WEIGHTS
        # a second copy of the model, with the config that belongs to it
        if (full / "config.json").exists() and any(self._holds_our_tensors(one) for one in full.glob("*.safetensors")):
            return WEIGHTS
        return None

    def _sort_file(self, path: Path, full: Path) -> None:
        if path in self.used or (path.parent == Path() and path.name in self.replaced):
            return
        if self._is_index(path):
            self.indices.append(path)
            return
        reason = self._reason_by_name(path) or self._reason_by_content(path, full)
        if reason is not None:
            self.left_out[path] = reason
        elif is_pointer(full):
            self.pointers.append(path)
        else:
            self.copied.append(path)

    def _reason_by_name(self, path: Path) -> str | None:
        name = path.name
        if _matches(name, _UNFINISHED_FILES):
            return UNFINISHED
        if self._in_module(path):
            return None
        if _matches(name, _ADAPTER_FILES):
            return ADAPTER
        if _matches(name, _STATE_FILES):
            return STATE
        return WEIGHTS if _matches(name, FOREIGN_WEIGHTS) else None

    def _reason_by_content(self, path: Path, full: Path) -> str | None:
        """Look into a file whose name tells nothing."""
        if not full.exists():
            raise CheckpointError(f"{full} is a link to a file that is gone.", "Fetch the checkpoint again.")
        if full.is_symlink() and not self._is_inside(full) and not _is_tokenizer_link(full):
            return OUTSIDE
        if not full.is_file():
            return SPECIAL
        if path.suffix == ".safetensors":
            return None if self._is_part_of_the_model(path, full) else WEIGHTS
        if self._in_module(path) or path.suffix.lower() in _PLAIN:
            return None
        if _looks_like_weights(full):
            return WEIGHTS
        return LARGE if full.stat().st_size > _LARGEST_UNKNOWN else None

    def _is_part_of_the_model(self, path: Path, full: Path) -> bool:
        """Tell a part, such as the dense layer of an embedding model, from the same weights in another form."""
        if self._in_module(path) or is_pointer(full):
            return True
        return path.parent != Path() and bool(self.tensors) and self._holds_our_tensors(full) is False

    def _holds_our_tensors(self, full: Path) -> bool | None:
        """Return None if the file cannot be read."""
        try:
            found = read_header(full).tensors
        except CheckpointError:
            return None
        ours = sum(one.name in self.tensors and self.tensors[one.name].shape == one.shape for one in found)
        return 2 * ours > len(found)

    def _is_index(self, path: Path) -> bool:
        return path.name.endswith(".index.json") and not self._in_module(path)

    def add_indices(self) -> None:
        """Copy an index of shards with its shards, and leave it out without them."""
        for path in self.indices:
            if any(one.suffix == ".safetensors" and one.parent == path.parent for one in self.copied):
                self.copied.append(path)
            else:
                self.left_out[path] = WEIGHTS

    def _in_module(self, path: Path) -> bool:
        return any(module == path or module in path.parents for module in self.modules)

    def _is_inside(self, link: Path) -> bool:
        """Tell whether a link leads to a place inside the folder, or into the hub's cache that the folder is from."""
        target = Path(os.path.realpath(link))
        root = Path(os.path.realpath(self.folder))
        if root.parent.name == "snapshots" and (root.parent.parent / "blobs").is_dir():
            root = root.parent.parent
        # earlier versions of the hub's library filled a local folder with links to its cache
        cached = target.parent.name == "blobs" and target.parent.parent.name.startswith("models--")
        return root in target.parents or cached


def _is_tokenizer_link(link: Path) -> bool:
    return Path(os.path.realpath(link)).name == link.name and _matches(link.name, _LOADED_BY_NAME)


def _looks_like_weights(file: Path) -> bool:
    with file.open("rb") as stream:
        head = stream.read(32)
    if head.startswith(_BEGINNINGS):
        return True
    # a safetensors file under another name: the length of its header, and the header
    if head[8:10] == b'{"' and int.from_bytes(head[:8], "little") < file.stat().st_size:
        return True
    if not head.startswith(b"PK"):
        return False
    try:
        with zipfile.ZipFile(file) as archive:  # what torch.save writes
            return any(PurePosixPath(name).name == "data.pkl" for name in archive.namelist())
    except zipfile.BadZipFile:
        return False


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name.lower(), pattern) for pattern in patterns)
