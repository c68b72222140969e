"""`p2p-diloco id` and `members`: who the peer of this machine is, and who else is or was in its run."""

from __future__ import annotations

import json

from p2p_diloco.app.cli.owner import is_running
from p2p_diloco.config.settings import PeerSettings
from p2p_diloco.errors import StateError
from p2p_diloco.ids import format_peer_id, short_peer_id
from p2p_diloco.status.status_file import read_status
from p2p_diloco.storage.identity import load_or_create_identity, read_name, write_name


def show_identity(settings: PeerSettings, name: str | None, *, as_json: bool) -> int:
    """Print the id and the name of the peer of a state directory; make its key if it has none yet.

    Args:
        name: the name to store first; empty: remove the stored one; None: change nothing.
    Raises:
        ConfigError: it is not a name, or the key cannot be read.
        StateError: the state directory cannot be written.
    """
    folder = settings.state_directory
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise StateError(
            f"cannot write {folder}: {error.strerror}; choose another place with --state-directory"
        ) from None
    if name is not None:
        write_name(folder, name)
    peer, kept = load_or_create_identity(settings.identity_file).peer, read_name(folder)
    if as_json:
        print(json.dumps({"peer": format_peer_id(peer), "short": short_peer_id(peer), "name": kept}, indent=2))
        return 0
    print(f"id     {format_peer_id(peer)}\nshort  {short_peer_id(peer)}\nname   {kept or 'none'}")
    status = read_status(folder)
    if status is not None and is_running(status) and status.name != kept:
        print("the peer that is running takes this name at its next start")
    return 0
