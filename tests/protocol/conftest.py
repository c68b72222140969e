"""Lets the tests of this folder import the swarm driver and its parts, which are in the same folder."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
