"""`python -m p2p_diloco` is `p2p-diloco`."""

from __future__ import annotations

import sys

from p2p_diloco.app.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
