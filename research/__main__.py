"""`python -m research NAME`: plays a question of learning on many islands in one process and prints its table."""

from __future__ import annotations

import sys

from research.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
