"""Open a Hugging Face checkpoint on disk by its headers. A weight is read only when it is needed."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError, UnsupportedError
from ..local_paths import expanded
from .digest import combined, hash_files
from .folder.hub import find_folder
from .folder.side_files import find_side_files
from .folder.weights import INDEX_NAME, find_weights, other_format
from .git_lfs import is_pointer, pointer_error
from .header import Header, TensorInfo, read_tensor
from .record import METRICS_NAME, RECORD_NAME

if TYPE_CHECKING:
    import torch

CONFIG_NAME = "config.json"
_REPLACED = (CONFIG_NAME, RECORD_NAME, METRICS_NAME)  # the result gets its own
_CODE_AND_TOKENIZER = (
    *("*.py", "tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken"),
    *("special_tokens_map.json", "added_tokens.json"),
)
"""Side files that decide numbers. README.md and the like do not."""
_CACHED = re.compile(
    r"(^|[._])([kv]|key|value|kv|wk_dv|wv_dv|qkv|query_key_value|c_attn|Wqkv|W_pack)(_proj)?(\.linear)?\.weight$"
)
"""Projections of keys and values, alone or fused with queries."""
_TOWER = re.compile(r"(^|[._])(vision|visual|audio|image|video)[._]|(vision|audio)_(tower|model|encoder)")


@dataclass(frozen=True)
class Checkpoint:
    """Contents of a checkpoint folder.

    Attributes:
        spec: path or hub id as the user gave it. ``folder`` is where the files are.
        config: config.json, parsed. ``config_text`` is the same file, unparsed.
        headers: weight file → its header, without files that the index does not name.
        sharded: whether an index says where each tensor is.
        tensors: name → place on disk, over all weight files.
        side_files: every other file to copy, relative to ``folder``.
        left_out: files and folders that are not copied → the reason.
        notes: oddities of the folder, one sentence each.
    """

    spec: str
    folder: Path
    config: dict[str, Any]
    config_text: str
    headers: dict[Path, Header] = field(default_factory=dict)
    sharded: bool = False
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    side_files: tuple[Path, ...] = ()
    left_out: Mapping[Path, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @classmethod
    def open(cls, spec: str | Path, *, revision: str | None = None, weights: bool = True) -> Checkpoint:
        """Open a local folder or a hub id.

        Args:
            revision: branch, tag or commit of a hub id.
            weights: False reads config.json only, and leaves headers and tensors empty.

        Raises:
            UsageError: there is nothing of that name.
            CheckpointError: files are missing, damaged or contradict each other.
            UnsupportedError: the folder holds no weights that can be read.
        """
        named = expanded(spec)
        foreign = other_format(named) if named.is_file() else None
        if foreign is not None:
            raise foreign
        folder = find_folder(spec, revision, weights=weights)
        config_text, config = _read_config(folder)
        if not weights:
            beside = find_side_files(folder, replaced=_REPLACED)
            return cls(str(spec), folder, config, config_text, side_files=beside.copied, left_out=beside.left_out)
        found = find_weights(folder)
        headers = {file: found.format.read(file) for file in found.files}
        tensors, notes = _collect_tensors(headers, found.named)
        if _ties_head(config):
            # only here: a class that does not tie its head would miss the second name
            headers, tied = _without_twins(headers)
            notes += [f"{name} shares its bytes with {first}, so it is written once" for name, first in tied.items()]
            tensors = {name: info for name, info in tensors.items() if name not in tied}
        beside = find_side_files(
            folder,
            used={file.relative_to(folder) for file in found.files},
            tensors=tensors,
            replaced=(*_REPLACED, found.format.index, INDEX_NAME),
        )
        strays = [str(path) for path in beside.left_out if path.parent == Path() and path.suffix == ".safetensors"]
        if strays:
            notes.append(f"not named by the index, so not read: {', '.join(strays)}")
        return cls(
            str(spec),
            folder,
            config,
            config_text,
            headers,
            found.named is not None,
            tensors,
            beside.copied,
            beside.left_out,
            tuple(notes),
        )

    @property
    def weight_files(self) -> list[Path]:
        """Absolute paths of the weight files that are read, in the order of the index."""
        return list(self.headers)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors, without headers."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def element_bytes(self) -> int:
        """Bytes of one number of the KV cache as it is served; two for FP8.

        The cache has the dtype of the text decoder's keys and values. Single norms or the head may be stored in another
        dtype. Without such names, the dtype of most weights counts.
        """
        named = [info for name, info in self.tensors.items() if _CACHED.search(name) and not _TOWER.search(name)]
        elements = Counter[str]()
        for info in named or self.tensors.values():
            elements[info.dtype] += info.elements
        return {"F64": 8, "F32": 4}.get(elements.most_common(1)[0][0], 2)

    @property
    def elements(self) -> int:
        """The number of weights, whatever their dtypes."""
        return sum(tensor.elements for tensor in self.tensors.values())

    @property
    def config_dtype(self) -> torch.dtype:
        """The dtype that config.json names, float32 where it names none."""
        import torch

        text = self.config.get("text_config")
        places = (self.config, text if isinstance(text, dict) else {})
        # transformers 4 writes torch_dtype, version 5 writes dtype
        named = next((place[key] for place in places for key in ("dtype", "torch_dtype") if place.get(key)), None)
        dtype = getattr(torch, str(named).removeprefix("torch."), None)
        return dtype if isinstance(dtype, torch.dtype) else torch.float32

    def read(self, name: str) -> torch.Tensor:
        """Map one tensor from its file, see :func:`.header.read_tensor`."""
        return read_tensor(self.tensors[name])

    def digest(self, *, quiet: bool = False, stop: threading.Event | None = None) -> str:
        """Hash config.json, the code and the tokenizer that come along, and every byte of the weight files.

        Each version of a file is read once, see :mod:`.digest`, which also describes the arguments.

        Raises:
            CheckpointError: a file cannot be read, or changes meanwhile.
        """
        small = [path for path in self.side_files if any(fnmatch(path.name, form) for form in _CODE_AND_TOKENIZER)]
        files = [*(self.folder / path for path in small), *self.weight_files]
        hashes = hash_files(files, "hashing weights", quiet=quiet, stop=stop)
        return combined([self.config_text, *hashes])


def _read_config(folder: Path) -> tuple[str, dict[str, Any]]:
    try:
        # as bytes: line ends must survive, since config.json is edited and compared as text
        text = (folder / CONFIG_NAME).read_bytes().decode("utf-8-sig")
        config = json.loads(text)
    except FileNotFoundError as problem:
        raise _no_config(folder) from problem
    except OSError as problem:
        raise CheckpointError(f"{folder / CONFIG_NAME} cannot be read: {problem.strerror}.") from problem
    except (ValueError, RecursionError) as problem:
        if is_pointer(folder / CONFIG_NAME):
            raise pointer_error(folder, [Path(CONFIG_NAME)]) from problem
        raise CheckpointError(
            f"{folder / CONFIG_NAME} is not valid JSON: {problem}.", "Fetch or repair this file."
        ) from problem
    if not isinstance(config, dict):
        raise CheckpointError(f"{folder / CONFIG_NAME} is not a JSON object.", "Fetch or repair this file.")
    return text, config


def _no_config(folder: Path) -> CheckpointError | UnsupportedError:
    missing = CheckpointError(f"{folder} has no {CONFIG_NAME}.", "Give the folder of a Hugging Face checkpoint.")
    return other_format(folder) or missing


def _ties_head(config: dict[str, Any]) -> bool:
    text = config.get("text_config")
    places = (config, text if isinstance(text, dict) else {})
    return any(place.get("tie_word_embeddings") is True for place in places)


def _without_twins(headers: dict[Path, Header]) -> tuple[dict[Path, Header], dict[str, str]]:
    """Drop names of a pickled file that share all their bytes with an earlier name, as a tied head does.

    Safetensors files have no such names. If config.json does not tie the head, the class may need both names.
    """
    kept: dict[Path, Header] = {}
    twins: dict[str, str] = {}
    for file, header in headers.items():
        first: dict[tuple[Any, ...], TensorInfo] = {}
        for info in header.tensors:
            owner = first.setdefault((info.begin, info.end, info.shape, info.dtype), info)
            if owner is not info and info.nbytes:
                twins[info.name] = owner.name
        kept[file] = Header(tuple(info for info in header.tensors if info.name not in twins), header.metadata)
    return kept, twins


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
