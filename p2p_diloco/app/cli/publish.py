"""`p2p-diloco publish`: upload an export to the Hugging Face Hub."""

from __future__ import annotations

import os
import re
from glob import escape
from pathlib import Path
from typing import Any

from p2p_diloco.app.cli.output import print_to_stderr
from p2p_diloco.app.extra import import_extra
from p2p_diloco.errors import ConfigError, NetworkError
from p2p_diloco.rate import counted
from p2p_diloco.wording import first_line, format_bytes

TOKEN = "HF_TOKEN"  # its name, not its value
WEIGHTS = ("model.safetensors", "adapter_model.safetensors")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_LICENCE = re.compile(r"^license: *\S", re.MULTILINE)


def publish_export(folder: Path, repository: str, *, is_public: bool, is_dry_run: bool) -> int:
    """Upload the files of an export, without hidden files and folders; return the exit code.

    Args:
        repository: the owner and name on the Hub; it is created if it does not exist.
        is_public: whether everybody may see it.
        is_dry_run: only print what would be uploaded; this needs neither a token nor a network.
    Raises:
        ConfigError: the folder is no export, the name is invalid, there is no token or it is refused, or the repository
            is public and `is_public` is not set.
        NetworkError: the Hub cannot be reached, or fails.
    """
    if not _NAME.fullmatch(repository):
        raise ConfigError(f"{repository!r} is not the name of a repository; expected owner/name")
    run = _run_of(folder)
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if _is_part(path)}
    if not _LICENCE.search((folder / "README.md").read_text(errors="replace").split("---")[1]):
        print_to_stderr(
            f"p2p-diloco: the card {folder / 'README.md'} names no licence, so nobody may use the model; add a line "
            "such as `license: apache-2.0` to the lines at its top"
        )
    for name, size in files.items():
        print(f"{format_bytes(size):>10}  {name}")
    what = f"{counted(len(files), 'file')}, {format_bytes(sum(files.values()))},"
    place = f"https://huggingface.co/{repository} ({'public' if is_public else 'private'})"
    if is_dry_run:
        print(f"would upload {what} to {place}")
        return 0
    _upload(folder, repository, [escape(name) for name in files], is_public=is_public, message=f"p2p_diloco run {run}")
    print(f"uploaded {what} to {place}")
    return 0


def _is_part(path: Path) -> bool:
    return path.is_file() and not path.name.startswith(".")


def _run_of(folder: Path) -> str:
    """Return the run whose model a folder holds; `export` writes it into the file of the weights.

    Raises:
        ConfigError: it holds no export.
    """
    import safetensors  # imported late: it imports NumPy

    try:
        weights = next(folder / name for name in WEIGHTS if (folder / name).is_file())
        with safetensors.safe_open(weights, "numpy") as file:
            run = str((file.metadata() or {})["run"])
        if (folder / "README.md").read_text(errors="replace").startswith("---"):
            return run
    except (StopIteration, KeyError, OSError, safetensors.SafetensorError):
        pass
    raise ConfigError(f"{folder} is not an export of a run; make one with p2p-diloco export FOLDER")


def _upload(folder: Path, repository: str, patterns: list[str], *, is_public: bool, message: str) -> None:
    token = os.environ.get(TOKEN)
    if not token:
        raise ConfigError(
            f"set {TOKEN} to a token that may write to {repository}; make one at https://huggingface.co/settings/tokens"
        )
    hub: Any = import_extra("huggingface_hub", "publish").HfApi(token=token)
    try:
        hub.create_repo(repository, private=not is_public, exist_ok=True)
        if not is_public and not hub.model_info(repository).private:
            raise ConfigError(f"{repository} exists and is public; add --public to upload to it, or name another")
        hub.upload_folder(repo_id=repository, folder_path=folder, allow_patterns=patterns, commit_message=message)
    except ConfigError:
        raise
    except Exception as error:  # of huggingface_hub, and of the client that it uses
        reason = first_line(error)
        if getattr(getattr(error, "response", None), "status_code", None) in (401, 403):
            raise ConfigError(f"the Hub refuses {TOKEN} for {repository} ({reason}); use one that may write") from error
        raise NetworkError(f"cannot upload to {repository} ({reason}); nothing is lost, so try again") from error
