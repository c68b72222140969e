"""The real program with little memory: `python little_memory_peer.py BYTES join …`.

The address space may grow by so many bytes once the large libraries are loaded.
"""

from __future__ import annotations

import resource
import sys

import psutil
import torch  # noqa: F401  # what it maps counts before

from p2p_diloco.app.cli.app import main

if __name__ == "__main__":
    limit = psutil.Process().memory_info().vms + int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    sys.exit(main(sys.argv[2:]))
