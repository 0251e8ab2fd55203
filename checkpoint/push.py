"""Send a finished folder to the Hugging Face hub, by the library's own calls."""

from __future__ import annotations

from pathlib import Path

from ..errors import HeadfoldError, UsageError


def require_login(repo_id: str) -> None:
    """Check name and login before any work is done.

    Raises:
        UsageError: the hub could not have a repository of this name, or there is no login that it accepts.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined] # public, but exported lazily

    try:
        validate_repo_id(repo_id)
    except HFValidationError as problem:
        raise UsageError(
            f"{repo_id!r} is no name of a repository: {_reason(problem)}", "Write it as OWNER/NAME."
        ) from problem
    try:
        HfApi().whoami()
    except LocalTokenNotFoundError as problem:
        raise UsageError("There is no login for the hub.", "Run `hf auth login` first, or set HF_TOKEN.") from problem
    except Exception as problem:  # whatever stands between here and the hub
        raise UsageError(
            f"The hub does not accept the login: {_reason(problem)}", "Check the network and `hf auth whoami`."
        ) from problem


def push(folder: Path, repo_id: str, *, private: bool = False) -> str:
    """Upload ``folder`` to ``repo_id``, which is created where it is missing.

    Returns:
        The address of the commit.

    Raises:
        HeadfoldError: it did not work; the folder is as it was.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(repo_id, private=private or None, exist_ok=True)
        return str(api.upload_folder(folder_path=folder, repo_id=repo_id, commit_message="Made by headfold"))
    except Exception as problem:  # the library raises what the network raises
        raise HeadfoldError(
            f"{folder} is finished, but could not be pushed to {repo_id}: {_reason(problem)}",
            f"Push it again: hf upload {repo_id} {folder}",
        ) from problem


def _reason(problem: Exception) -> str:
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return lines[0] if lines else type(problem).__name__
