"""`python -m simulator`: run simulated swarms, with or without planted mistakes."""

from __future__ import annotations

import sys

from simulator.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
