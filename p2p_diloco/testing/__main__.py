"""`python -m p2p_diloco.testing`: run simulated swarms, with or without planted mistakes."""

from __future__ import annotations

import sys

from p2p_diloco.testing.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
