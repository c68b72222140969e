"""Train one model on many machines that never wait for each other, with no server in the middle.

Join a run from your own training loop:

    with p2p_diloco.join("p2pdiloco://…", model, optimizer) as swarm:
        for batch in loader:
            ...
            optimizer.step()
            if not swarm.step(tokens=batch.numel()):
                break

These names are stable: they are deprecated for one release before they are removed or changed. All other modules are
internal and may change at any time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from p2p_diloco.api import Swarm, found, join, new_run
    from p2p_diloco.config.manifest import RunManifest as Manifest
    from p2p_diloco.config.settings import PeerSettings as Settings
    from p2p_diloco.errors import ConfigError, NetworkError, P2PDilocoError, StateError
    from p2p_diloco.status.event_log import PeerEvent as Event
    from p2p_diloco.status.status_file import PeerStatus as Status

__all__ = [
    "ConfigError",
    "Event",
    "Manifest",
    "NetworkError",
    "P2PDilocoError",
    "Settings",
    "StateError",
    "Status",
    "Swarm",
    "found",
    "join",
    "new_run",
]

_HOMES = {
    "api": ("Swarm", "found", "join", "new_run"),
    "errors": ("ConfigError", "NetworkError", "P2PDilocoError", "StateError"),
    "config.manifest": ("RunManifest",),
    "config.settings": ("PeerSettings",),
    "status.event_log": ("PeerEvent",),
    "status.status_file": ("PeerStatus",),
}
_RENAMED = {"Manifest": "RunManifest", "Settings": "PeerSettings", "Event": "PeerEvent", "Status": "PeerStatus"}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `import p2p_diloco` imports neither PyTorch nor hivemind."""
    if name in __all__:
        import importlib

        own = _RENAMED.get(name, name)
        home = next(module for module, names in _HOMES.items() if own in names)
        return getattr(importlib.import_module(f"p2p_diloco.{home}"), own)
    raise AttributeError(f"module 'p2p_diloco' has no attribute {name!r}")
