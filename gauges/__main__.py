"""`python -m gauges`: measure a checkout. `python -m gauges mutants`: see how many planted mistakes its tests find."""

from __future__ import annotations

import sys

from gauges.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
