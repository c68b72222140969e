"""The real program with built-in training at a fixed step time: `python paced_peer.py SECONDS join …`.

Steps are made as usual; the rest of the time is slept. So four islands on two cores are as fast as four machines.
"""

from __future__ import annotations

import sys

from benchmarks.paced_steps import hold_steps
from p2p_diloco.app.cli.app import main

if __name__ == "__main__":
    hold_steps(float(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
