"""`python -m benchmarks`: run benchmarks on this machine and print tables, ratios first."""

from __future__ import annotations

import sys

from benchmarks.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
