"""The compared systems (this project, hivemind's averager with two compressions, gloo) and their memory needs."""

from __future__ import annotations

from collections.abc import Sequence

from p2p_diloco.errors import ConfigError

OURS = "p2p_diloco"
HIVEMIND_FLOAT32, HIVEMIND_FLOAT16, GLOO = "hivemind_fp32", "hivemind_fp16", "gloo_fp32"
OPPONENTS: dict[str, tuple[str, ...]] = {"hivemind": (HIVEMIND_FLOAT32, HIVEMIND_FLOAT16), "gloo": (GLOO,)}
NOBODY = "none"

_MIB = 1024 * 1024
# Observed memory with a small margin: of a peer's processes without vectors, and per parameter.
_PEER_BYTES = {OURS: 450 * _MIB, HIVEMIND_FLOAT32: 700 * _MIB, HIVEMIND_FLOAT16: 700 * _MIB, GLOO: 300 * _MIB}
_PARAMETER_BYTES = {OURS: 32, HIVEMIND_FLOAT32: 28, HIVEMIND_FLOAT16: 28, GLOO: 16}
_SHARE_OF_MEMORY = 0.6


def systems_against(words: str) -> tuple[str, ...]:
    """Return the systems named by `--against`, such as `hivemind,gloo`, with ours first.

    Raises:
        ConfigError: a name is unknown, or there is none.
    """
    named = [word.strip() for word in words.split(",") if word.strip()]
    if named == [NOBODY]:
        return (OURS,)
    for word in named:
        if word not in OPPONENTS:
            known = ", ".join(OPPONENTS)
            raise ConfigError(f"--against names {word!r}; expected one or more of {known}, with commas, or {NOBODY}")
    if not named:
        raise ConfigError(f"--against is empty; expected one or more of {', '.join(OPPONENTS)}, or {NOBODY}")
    return (OURS, *(system for word in OPPONENTS for system in OPPONENTS[word] if word in named))


def expected_bytes(system: str, num_peers: int, parameters: int) -> int:
    """Return the approximate memory of all processes of a system."""
    return num_peers * (_PEER_BYTES[system] + _PARAMETER_BYTES[system] * parameters)


def can_all_stay(systems: Sequence[str], num_peers: int, parameters: int, available_bytes: int) -> bool:
    """Return whether the processes of all systems fit into memory together; if not, each is started for its turn."""
    return sum(expected_bytes(system, num_peers, parameters) for system in systems) <= (
        _SHARE_OF_MEMORY * available_bytes
    )
