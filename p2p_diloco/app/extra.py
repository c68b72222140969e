"""Packages of the extra `hf`, which only some commands need and import late."""

from __future__ import annotations

import importlib
from typing import Any

from p2p_diloco.errors import ConfigError
from p2p_diloco.wording import install_line


def import_extra(package: str, purpose: str) -> Any:
    """Return a package.

    Args:
        purpose: what needs it, for the error, such as "publish".
    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError:
        raise ConfigError(f"{purpose} needs {package}; install the extra: {install_line('hf')}") from None
