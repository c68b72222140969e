"""The systems that the training benchmark compares, and their names on the command line."""

from __future__ import annotations

from benchmarks.training.figures import BLOCKING, OURS, OWN_LOOP, TORCHFT
from p2p_diloco.errors import ConfigError

OPPONENTS = (OWN_LOOP, BLOCKING, TORCHFT)
NOBODY = "none"


def systems_against(words: str) -> tuple[str, ...]:
    """Return the systems named by `--against`, such as `blocking,torchft`, with ours first.

    Raises:
        ConfigError: a name is unknown, or there is none.
    """
    named = [word.strip() for word in words.split(",") if word.strip()]
    if named == [NOBODY]:
        return (OURS,)
    unknown = [word for word in named if word not in OPPONENTS]
    if unknown or not named:
        whom = repr(unknown[0]) if unknown else "nothing"
        known = ", ".join(OPPONENTS)
        raise ConfigError(f"--against names {whom}; expected one or more of {known}, with commas, or {NOBODY}")
    return (OURS, *(system for system in OPPONENTS if system in named))
