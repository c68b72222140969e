"""An environment beside the current one, for packages that peers do not need: `python -m benchmarks.side_environment`.

It uses the packages of the current environment too, because PyTorch is large. Its own packages are not visible from
the current one.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

from p2p_diloco.errors import NetworkError

_LAST_WORDS = 400


def python_of(folder: Path) -> Path:
    """Return the Python interpreter of an environment."""
    return folder / "bin" / "python"


def install_beside(folder: Path, words: Sequence[str]) -> None:
    """Create an environment unless it exists, and install into it.

    Args:
        words: arguments of `pip install`.
    Raises:
        NetworkError: pip could not install a package.
    """
    venv.create(folder, with_pip=True)
    own = sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)})
    # The name sorts last, so that the environment's own packages come first.
    seen = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    Path(own, "zz-seen.pth").write_text(seen, encoding="utf-8")
    command = [str(python_of(folder)), "-m", "pip", "install", "--disable-pip-version-check", "--quiet", *words]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise NetworkError(f"pip could not install {words[-1]}: {done.stderr.strip()[-_LAST_WORDS:]}")


if __name__ == "__main__":
    try:
        install_beside(Path(sys.argv[1]), sys.argv[2:])
    except NetworkError as error:
        sys.exit(str(error))
