"""Exchange checkpoints with the Hugging Face hub: download one by its id, push a finished folder."""

from __future__ import annotations

import re
from collections.abc import Sequence
from glob import escape
from pathlib import Path

from ...console import warn
from ...errors import HeadfoldError, UsageError, reason
from ...local_paths import expanded
from .modules import module_paths

FOREIGN_WEIGHTS = (
    *("*.bin", "*.pt", "*.pth", "*.pt2", "*.pte", "*.ckpt", "*.ckpt.*", "*.h5", "*.keras", "*.msgpack", "*.npz"),
    *("*.gguf", "*.ggml", "*.llamafile", "*.onnx", "*.onnx_data*", "*.onnx.data*", "*.ot", "*.pb", "*.tflite"),
    *("*.data-[0-9]*-of-[0-9]*", "*.pdparams", "*.pdopt", "*.nemo", "*.mlmodel", "*.trt", "openvino_*.xml"),
)
"""Weights in other formats and training state. They are not copied: they would carry the source's heads along."""
_PICKLED = ("pytorch_model*.bin", "pytorch_model*.bin.index.json")  # only where a repository has nothing better
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def find_folder(spec: str | Path, revision: str | None = None, *, weights: bool = True) -> Path:
    """Find the local folder of ``spec``: a path, or a hub id, which is downloaded into huggingface_hub's cache.

    Args:
        weights: False leaves out the weights of a hub id.

    Raises:
        UsageError: there is no such folder, and no such repository can be reached.
    """
    folder = expanded(spec)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise UsageError(f"{folder} is a file; a checkpoint is a folder.", "Give the folder that holds config.json.")
    name = str(spec)
    if not _HUB_ID.fullmatch(name) or name.startswith("."):
        raise UsageError(f"There is no folder {folder}.", "Check the path.")
    left_out = FOREIGN_WEIGHTS if weights else (*FOREIGN_WEIGHTS, "*.safetensors")
    folder = _download(name, revision, left_out=left_out)
    # Many repositories have the same weights twice, so pickled ones are downloaded only if there are no others.
    if weights and not any(folder.glob("*.safetensors")):
        folder = _download(name, revision, only=_PICKLED)
    modules = module_paths(folder) if weights else []
    if modules:  # some keep their weights in a pickled file
        folder = _download(name, revision, only=[f"{escape(path)}/*" for path in modules])
    return folder


def _download(
    name: str, revision: str | None, *, only: Sequence[str] | None = None, left_out: Sequence[str] | None = None
) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=None if only is None else list(only),
                ignore_patterns=None if left_out is None else list(left_out),
            )
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as problem:
        raise UsageError(
            f"There is no folder {name} here, and no such checkpoint could be downloaded: {reason(problem)}",
            "Check the spelling and the network; private models need `hf auth login`.",
        ) from problem


def require_login(repo_id: str) -> None:
    """Check the name and the login before any work is done.

    Raises:
        UsageError: the name is not valid, or the hub does not accept the login.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined] # public, but exported lazily

    try:
        validate_repo_id(repo_id)
    except HFValidationError as problem:
        raise UsageError(
            f"{repo_id!r} is not a valid repository name: {reason(problem)}", "Write it as OWNER/NAME."
        ) from problem
    try:
        HfApi().whoami()
    except LocalTokenNotFoundError as problem:
        raise UsageError("There is no login for the hub.", "Run `hf auth login` first, or set HF_TOKEN.") from problem
    except Exception as problem:  # whatever stands between here and the hub
        raise UsageError(
            f"The hub does not accept the login: {reason(problem)}", "Check the network and `hf auth whoami`."
        ) from problem


def _warn_about_paths(folder: Path) -> None:
    """Name the files that hold paths of this user, such as a config.json of the user's own making."""
    home = f"{Path.home()}/".encode()
    texts = [file for ending in ("*.json", "*.md", "*.txt", "*.jsonl") for file in sorted(folder.rglob(ending))]
    found = [file.relative_to(folder) for file in texts if ".cache" not in file.parts and home in file.read_bytes()]
    if found and home != b"/":
        warn(f"These files name folders of yours, and go to the hub as they are: {', '.join(map(str, found))}.")


def push(folder: Path, repo_id: str, *, private: bool = False) -> str:
    """Upload ``folder`` to ``repo_id``, which is created if it is missing.

    Returns:
        The address of the commit.

    Raises:
        HeadfoldError: the upload failed; the folder is unchanged.
    """
    from huggingface_hub import HfApi

    _warn_about_paths(folder)
    api = HfApi()
    try:
        # None, not False: an organisation may make its repositories private by default
        api.create_repo(repo_id, private=private or None, exist_ok=True)
        return str(api.upload_folder(folder_path=folder, repo_id=repo_id, commit_message="Made by headfold"))
    except Exception as problem:  # the library raises what the network raises
        raise HeadfoldError(
            f"{folder} is finished, but could not be pushed to {repo_id}: {reason(problem)}",
            f"Push it again: hf upload {repo_id} {folder}",
        ) from problem
