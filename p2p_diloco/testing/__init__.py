"""The whole peer on virtual time, and what can go wrong; and `local_swarm`, to try a loop of one's own.

`local_swarm` is as stable as the names in `p2p_diloco.__all__`; the rest is this project's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from p2p_diloco.testing.local import local_swarm

__all__ = ["local_swarm"]


def __getattr__(name: str) -> Any:
    """Import `local_swarm` when it is first used: the simulator needs nothing of it."""
    if name in __all__:
        from p2p_diloco.testing.local import local_swarm

        return local_swarm
    raise AttributeError(f"module 'p2p_diloco.testing' has no attribute {name!r}")
