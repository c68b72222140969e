"""A simulator that runs whole peers on virtual time, with faults; and `local_swarm`, to try out a training loop.

`local_swarm` is as stable as the names in `p2p_diloco.__all__`; everything else here is internal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from p2p_diloco.testing.local import local_swarm

__all__ = ["local_swarm"]


def __getattr__(name: str) -> Any:
    """Import `local_swarm` on first use: the simulator does not need it."""
    if name in __all__:
        from p2p_diloco.testing.local import local_swarm

        return local_swarm
    raise AttributeError(f"module 'p2p_diloco.testing' has no attribute {name!r}")
