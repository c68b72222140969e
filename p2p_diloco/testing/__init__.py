"""For tests of your own training loop: a swarm in one process, on an in-memory network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from p2p_diloco.testing.swarm import LocalSwarm, local_swarm

__all__ = ["LocalSwarm", "local_swarm"]


def __getattr__(name: str) -> Any:
    """Import a swarm when it is first used: the network beneath it needs no PyTorch."""
    if name in __all__:
        from p2p_diloco.testing import swarm

        return getattr(swarm, name)
    raise AttributeError(f"module 'p2p_diloco.testing' has no attribute {name!r}")
