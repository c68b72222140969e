"""Lets the tests of this folder import the run that stands beside them and the sessions of the trainer's tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "peer"))
