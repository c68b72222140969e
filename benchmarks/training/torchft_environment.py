"""Separate environment for a pinned version of torchft, in this user's cache.

It is an environment of its own, apart from that of the extras, because torchft needs libraries that this project does
not use.
"""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path

from platformdirs import user_cache_path

from benchmarks.side_environment import install_beside, python_of
from p2p_diloco.errors import ConfigError, NetworkError
from p2p_diloco.ids import sha256

VERSION = "2026.10.26"
PACKAGE = f"torchft-nightly=={VERSION}"
INSTALL_COMMAND = "python -m benchmarks install-torchft"
_DONE_FILE = "installed"


def environment_folder() -> Path:
    """Return the folder of the environment, which depends on torchft's version and on the current environment."""
    seen = sha256(sysconfig.get_path("purelib").encode()).hex()[:8]
    return user_cache_path("p2p-diloco") / f"torchft-{VERSION}-{seen}"


def torchft_interpreter(folder: Path | None = None) -> str:
    """Return the Python interpreter of the environment.

    Raises:
        ConfigError: torchft is not installed; the text explains how to install it.
    """
    folder = folder if folder is not None else environment_folder()
    if not (folder / _DONE_FILE).is_file():
        raise ConfigError(
            f"torchft is not installed for the benchmark; install it with: {INSTALL_COMMAND} (into {folder}), "
            "or leave it out with --against blocking"
        )
    return str(python_of(folder))


def install_torchft(show: Callable[[str], None], folder: Path | None = None) -> Path:
    """Create the environment unless it exists, and return its folder.

    Args:
        show: called with progress messages.
    Raises:
        NetworkError: pip could not install the package; the incomplete environment is removed.
    """
    folder = folder if folder is not None else environment_folder()
    if (folder / _DONE_FILE).is_file():
        show(f"{PACKAGE} is installed in {folder}")
        return folder
    show(f"installing {PACKAGE} into {folder}")
    try:
        install_beside(folder, (PACKAGE,))
    except NetworkError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    (folder / _DONE_FILE).write_text(PACKAGE + "\n", encoding="utf-8")
    show("done")
    return folder
