"""Measure a checkout. `picture` draws it; `mutants` shows how many planted mistakes its tests find."""

from __future__ import annotations

import sys

from gauges.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
