"""Fuzz the targets: `python -m tests.fuzz.run [--inputs N] [--corpus FOLDER]`; needs `pip install atheris`.

It begins with the corpus, adds inputs that reach new code, and prints each input that raises.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

CORPUS = Path(__file__).with_name("corpus")


def main(arguments: list[str]) -> None:
    """Fuzz until a number of inputs were given, or one raises."""
    import atheris  # type: ignore[import-not-found, unused-ignore]

    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.run", description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="number of inputs (default: %(default)s)")
    parser.add_argument("--corpus", type=Path, default=CORPUS, help="folder of inputs (default: %(default)s)")
    parser.add_argument("--longest", type=int, default=4096, help="longest input, bytes (default: %(default)s)")
    options = parser.parse_args(arguments)
    with atheris.instrument_imports(include=["p2p_diloco"]):
        from tests.fuzz.targets import feed
    words = [sys.argv[0], f"-runs={options.inputs}", f"-max_len={options.longest}", "-timeout=5", str(options.corpus)]
    atheris.Setup(words, feed)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1:])
