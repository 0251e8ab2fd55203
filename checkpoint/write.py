"""Write a checkpoint folder: headers first, then copied tensors as byte ranges, and computed ones in their place."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import split_state_dict_into_shards_factory

from ..console import Advance, human_bytes
from ..errors import CheckpointError, HeadfoldError
from ..working_folder import flush
from .folder.weights import INDEX_NAME, SINGLE_NAME
from .header import TensorInfo, byte_size, encode_header, read_tensor, torch_dtype
from .source import Checkpoint

if TYPE_CHECKING:
    import torch

_CHUNK_BYTES = 64 * 2**20
_NO_KERNEL_COPY = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.ETXTBSY}


@dataclass(frozen=True)
class OutTensor:
    """A tensor of the result.

    Attributes:
        source: where its bytes are copied from; None if :meth:`ShardWriter.put` will bring them.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    source: TensorInfo | None

    @property
    def nbytes(self) -> int:
        return byte_size(self.dtype, self.shape)


@dataclass(frozen=True)
class OutFile:
    """A weight file of the result: path relative to the folder, tensors in order, and metadata."""

    path: Path
    tensors: tuple[OutTensor, ...]
    metadata: dict[str, str]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


class ShardWriter:
    """Writes the weight files of one checkpoint, whose layout is fixed before any weight is written.

    ``create`` writes the headers and gives every file its full length (a hole on most file systems), so that a model
    class can check names and shapes before the long work begins. ``start_copying`` copies bytes on a thread of its own,
    while ``put`` writes the computed tensors. ``finish`` waits for the copies. Leaving the ``with`` block stops a copy
    that is not finished.
    """

    def __init__(self, folder: Path, files: Sequence[OutFile]) -> None:
        self.folder = folder
        self.files = list(files)
        self._places: dict[str, tuple[Path, int, OutTensor]] = {}
        self._workers = ThreadPoolExecutor(2, "headfold-copy")  # one copies, one flushes what is copied
        self._tasks: list[Future[None]] = []
        self._stopped = threading.Event()  # a running copy cannot be cancelled, but it looks here after every chunk
        self._started = False
        self._copied_bytes = 0

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *problem: object) -> None:
        self._stopped.set()
        self._workers.shutdown(cancel_futures=True)

    @property
    def sharded(self) -> bool:
        """Return True if the files need an index."""
        return [file.path for file in self.files] != [Path(SINGLE_NAME)]

    @property
    def bytes_to_copy(self) -> int:
        return sum(tensor.nbytes for file in self.files for tensor in file.tensors if tensor.source is not None)

    def create(self) -> None:
        """Write the headers, and give every file its length."""
        for file in self.files:
            entries = [(tensor.name, tensor.dtype, tensor.shape) for tensor in file.tensors]
            header = encode_header(entries, {**file.metadata, "format": "pt"})
            target = self.folder / file.path
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as stream:
                stream.write(header)
                # also shows at once if the file system cannot hold a file of this size
                stream.truncate(len(header) + file.nbytes)
            position = len(header)
            for tensor in file.tensors:
                self._places[tensor.name] = (target, position, tensor)
                position += tensor.nbytes

    def discard(self) -> None:
        """Stop, and remove the files."""
        self.__exit__()
        for file in self.files:
            (self.folder / file.path).unlink(missing_ok=True)

    def write_index(self) -> None:
        """Write the index of the shards. Totals count tensors as they are on disk: a tied head counts once."""
        weight_map = {tensor.name: file.path.as_posix() for file in self.files for tensor in file.tensors}
        totals = {
            "total_parameters": sum(math.prod(tensor.shape) for file in self.files for tensor in file.tensors),
            "total_size": sum(file.nbytes for file in self.files),
        }
        index = {"metadata": totals, "weight_map": dict(sorted(weight_map.items()))}
        (self.folder / INDEX_NAME).write_text(json.dumps(index, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    def start_copying(self) -> None:
        """Begin to copy every tensor that has a source, neighbours in one go. A second call does nothing."""
        if not self._started:
            self._started = True
            self._tasks.append(self._workers.submit(self._copy_all))

    def finish(self, advance: Advance) -> None:
        """Wait until everything is copied, and report the bytes to ``advance`` meanwhile.

        Raises:
            OSError: the disk is full, for example.
            CheckpointError: the source changed while it was copied.
        """
        told = 0
        while self._tasks:
            done, _ = wait(self._tasks[:1], timeout=0.2)
            copied = self._copied_bytes
            advance(copied - told)
            told = copied
            for task in done:
                self._tasks.remove(task)
                task.result()

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Write a computed tensor in its place, in the dtype of the header.

        Raises:
            CheckpointError: a number is beyond that dtype, or NaN.
        """
        import torch

        file, position, expected = self._places[name]
        if tuple(tensor.shape) != expected.shape:
            raise ValueError(f"{name}: computed {tuple(tensor.shape)}, planned {expected.shape}")
        stored = tensor.detach().to(torch_dtype(expected.dtype)).contiguous()
        if not torch.isfinite(stored).all():
            raise CheckpointError(
                f"{name} was computed as NaN, or with numbers that {expected.dtype} cannot hold.",
                "Save the source in bf16 or float32 and convert that.",
            )
        data = stored.reshape(-1).view(torch.uint8).numpy().data
        with file.open("r+b") as stream:
            stream.seek(position)
            stream.write(data)

    def _copy_all(self) -> None:
        for file in self.files:
            target = self.folder / file.path
            with target.open("r+b") as stream:
                for run in _runs(file.tensors):
                    self._copy_run(run, stream.fileno())
            # The disk writes it while the next file is copied. Publishing waits for what is left.
            self._tasks.append(self._workers.submit(flush, target))

    def _copy_run(self, run: list[OutTensor], target: int) -> None:
        first = run[0].source
        assert first is not None
        if first.strides is not None:  # its bytes are not in the order of a row-by-row tensor
            self.put(run[0].name, read_tensor(first))
            self._advance(run[0].nbytes)
            return
        position = self._places[run[0].name][1]
        length = sum(tensor.nbytes for tensor in run)
        with first.file.open("rb") as source:
            _copy_range(source.fileno(), target, first.begin, position, length, self._advance)

    def _advance(self, amount: float = 1) -> None:
        self._copied_bytes += int(amount)
        if self._stopped.is_set():
            raise CancelledError


def copy_side_files(source: Checkpoint, folder: Path) -> None:
    """Copy tokenizer, templates, remote code and the like byte for byte. Links become files, and no code is run."""
    for path in source.side_files:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source.folder / path, folder / path)


def require_space(folder: Path, nbytes: int) -> None:
    """Refuse, before anything is written, if the file system of ``folder`` has too little room.

    Raises:
        HeadfoldError: fewer than ``nbytes`` are free.
    """
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < nbytes:
        raise HeadfoldError(
            f"{folder} needs {human_bytes(nbytes)}, but only {human_bytes(free)} are free there.",
            "Free some space or choose another output path.",
        )


def _runs(tensors: Sequence[OutTensor]) -> Iterator[list[OutTensor]]:
    """Group copied tensors that are neighbours both in their source file and in the result."""
    run: list[OutTensor] = []
    for tensor in tensors:
        last = run[-1].source if run else None
        adjoins = last and tensor.source and _adjoin(last, tensor.source)
        if run and not adjoins:
            yield run
            run = []
        if tensor.source is not None:
            run.append(tensor)
    if run:
        yield run


def _adjoin(left: TensorInfo, right: TensorInfo) -> bool:
    in_rows = left.strides is None and right.strides is None
    return in_rows and left.file == right.file and left.end == right.begin


def _copy_range(source: int, target: int, begin: int, position: int, length: int, advance: Advance) -> None:
    """Copy bytes inside the kernel if the file systems allow it, else through a buffer."""
    in_kernel = hasattr(os, "copy_file_range")
    while length:
        count = min(length, _CHUNK_BYTES)
        if in_kernel:
            try:
                moved = os.copy_file_range(source, target, count, begin, position)
            except OSError as problem:
                if problem.errno not in _NO_KERNEL_COPY:
                    raise
                in_kernel = False
                continue
        else:
            moved = os.pwrite(target, os.pread(source, count, begin), position)
        if moved == 0:
            raise CheckpointError("A weight file of the source became shorter while it was read.")
        begin, position, length = begin + moved, position + moved, length - moved
        advance(moved)


def resharded(files: Sequence[OutFile], max_bytes: int) -> list[OutFile]:
    """Distribute the tensors over files of at most ``max_bytes``; a larger tensor gets a file of its own.

    The shards are the ones that ``save_pretrained`` would make. Header metadata of all files is kept.
    """
    tensors = {tensor.name: tensor for file in files for tensor in file.tensors}
    metadata = {key: value for file in files for key, value in file.metadata.items()}
    split = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=attrgetter("nbytes"),
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_bytes,
    )
    return [
        OutFile(Path(name), tuple(tensors[tensor] for tensor in names), metadata)
        for name, names in split.filename_to_tensors.items()
    ]
