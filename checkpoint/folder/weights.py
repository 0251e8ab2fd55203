"""Find the weight files of a folder: shards with an index, or a single file; safetensors or pickled."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath, PureWindowsPath

from ...errors import CheckpointError, UnsupportedError
from ..git_lfs import is_pointer, pointer_error
from ..header import Header, read_header
from .hub import FOREIGN_WEIGHTS
from .pickled import read_pickle

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


@dataclass(frozen=True)
class WeightFormat:
    """File names of one format of weights, and the function that reads the layout of such a file."""

    single: str
    index: str
    suffix: str
    read: Callable[[Path], Header]


FORMATS = (
    WeightFormat(SINGLE_NAME, INDEX_NAME, ".safetensors", read_header),
    WeightFormat("pytorch_model.bin", "pytorch_model.bin.index.json", ".bin", read_pickle),
)
"""In the order in which transformers looks for them."""


@dataclass(frozen=True)
class WeightFiles:
    """The weight files that are read.

    Attributes:
        files: absolute, in the order of the index.
        named: tensor → file name, from the index; None for a single file.
    """

    format: WeightFormat
    files: tuple[Path, ...]
    named: dict[str, str] | None


def find_weights(folder: Path) -> WeightFiles:
    """Find the weight files of ``folder`` without reading their headers.

    Raises:
        CheckpointError: files are missing, or the index is damaged or points out of the folder.
        UnsupportedError: there are only weights in another format.
    """
    for form in FORMATS:
        # An index counts before a single file: a folder with both holds a stray file of an older save.
        if _present(folder / form.index):
            named = _read_index(folder, form)
            return WeightFiles(form, tuple(folder / name for name in dict.fromkeys(named.values())), named)
        if _present(folder / form.single):
            return WeightFiles(form, (folder / form.single,), None)
    raise _no_weights(folder)


def safetensors_name(path: Path) -> Path:
    """Name a weight file of the result: ``pytorch_model-1-of-2.bin`` → ``model-1-of-2.safetensors``."""
    return path.with_name(path.name.removeprefix("pytorch_")).with_suffix(".safetensors")


@dataclass(frozen=True)
class OtherFormat:
    """A format that headfold does not read, by the names of its files, and the way to a checkpoint that it reads."""

    patterns: tuple[str, ...]
    what: str
    way_out: str

    def files(self, folder: Path) -> list[str]:
        """List the names of such files in ``folder``, which may also be a single file."""
        names = [folder.name] if folder.is_file() else sorted(file.name for file in folder.iterdir())
        return [name for name in names if any(fnmatch(name, pattern) for pattern in self.patterns)]


_FETCH = "Fetch the original Hugging Face checkpoint (config.json and safetensors)"
# The first match counts, so names of one format stand before endings that several share.
OTHER_FORMATS = (
    OtherFormat(
        ("adapter_config.json",),
        "only a PEFT adapter, not a model",
        "Merge it first (PeftModel.merge_and_unload, then save_pretrained) and convert the merged checkpoint.",
    ),
    OtherFormat(
        ("*.gguf",),
        "llama.cpp's GGUF",
        f"{_FETCH} that it was made from, convert that, and make a GGUF of the result. If there is only the GGUF: "
        "AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=NAME).save_pretrained(NEW_FOLDER).",
    ),
    OtherFormat(
        ("consolidated*.pth", "consolidated*.safetensors"),
        "weights in their maker's own layout",
        f"{_FETCH}: the same repository usually has both.",
    ),
    OtherFormat(("lit_model.pth",), "a LitGPT checkpoint", "Turn it back first: litgpt convert_from_litgpt."),
    OtherFormat(("*.nemo",), "a NeMo archive", "Export it with NeMo first: llm.export_ckpt(…, target='hf')."),
    OtherFormat(
        ("*.onnx", "*.engine", "openvino_model.*", "*.mlmodel", "*.tflite"),
        "an export for an inference runtime",
        f"{_FETCH} that it was exported from.",
    ),
    OtherFormat(
        ("*.distcp", "mp_rank_*", "*_model_states.pt", "optimizer.pt"),
        "the state of a training run",
        "Write the model out first with the trainer's own tool (accelerate merge-weights, zero_to_fp32.py, …).",
    ),
    OtherFormat(
        (*FOREIGN_WEIGHTS, "*.npz"),
        "weights in a format that headfold does not read",
        "Save it again as safetensors: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER).",
    ),
)


def other_format(place: Path) -> UnsupportedError | None:
    """Make the error for a folder or a file in a format that is not read, or None."""
    for form in OTHER_FORMATS:
        names = form.files(place)
        if names:
            shown = f"{', '.join(names[:3])}{' …' if len(names) > 3 else ''}"
            held = f"is {form.what}" if place.is_file() else f"holds {form.what} ({shown})"
            return UnsupportedError(f"{place} {held}. No weights in it can be read.", form.way_out)
    return None


def _present(file: Path) -> bool:
    return file.is_symlink() or file.exists()  # a link to a missing file counts, so that it is refused by name


def _no_weights(folder: Path) -> CheckpointError | UnsupportedError:
    shards = sorted(file.name for file in folder.glob("*.safetensors") if not fnmatch(file.name, "consolidated*"))
    found = other_format(folder)
    # A folder may hold shards and an export of them. The missing index is the news then, but an adapter has no index.
    if shards and (found is None or not (folder / "adapter_config.json").exists()):
        return CheckpointError(
            f"{folder} holds {shards[0]} but neither {SINGLE_NAME} nor {INDEX_NAME}.",
            "The checkpoint is incomplete: fetch the index as well.",
        )
    return found or CheckpointError(
        f"{folder} holds no weights.", "Give a folder with model.safetensors or its shards."
    )


def _read_index(folder: Path, form: WeightFormat) -> dict[str, str]:
    """Read the weight map of the index. A name that leads out of the folder is refused: the file is not trusted."""
    index = folder / form.index
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8-sig"))["weight_map"]
        named = {str(tensor): str(file) for tensor, file in weight_map.items()}
    except OSError as problem:
        raise CheckpointError(f"{index} cannot be read: {problem.strerror}.") from problem
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
        if is_pointer(index):
            raise pointer_error(folder, [Path(form.index)]) from problem
        raise CheckpointError(f"{index} is not a valid index of shards.", "Fetch or repair this file.") from problem
    if not named:
        raise CheckpointError(f"{index} lists no tensors.", "Fetch or repair this file.")
    # Windows paths are tested on every system, because the index may have been made for one.
    for name in dict.fromkeys(named.values()):
        outside = PurePosixPath(name).is_absolute() or PureWindowsPath(name).drive or "\\" in name
        if outside or ".." in PurePosixPath(name).parts or "\0" in name or not name.endswith(form.suffix):
            raise CheckpointError(f"{index} points to {name!r}, which is not a {form.suffix} file inside the folder.")
        if not (folder / name).is_file():
            raise CheckpointError(
                f"{index} names {name}, which does not exist.", "The checkpoint is incomplete: fetch it again."
            )
    return named
