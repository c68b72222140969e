"""`python -m research NAME`: run an experiment with many islands in one process and print its table."""

from __future__ import annotations

import sys

from research.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
