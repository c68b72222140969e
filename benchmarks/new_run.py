"""The run of a benchmark: made for it alone, so that all peers may know the organiser's key."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from typing import Any

from p2p_diloco.config.run_file import draft_manifest
from p2p_diloco.signing import SigningKey


def order_of_new_run(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what each peer of a new run is given: the signed manifest and the organiser's key, in hexadecimal.

    Args:
        values: manifest values that differ from the defaults.
    Raises:
        ConfigError: a value is not valid.
    """
    key = SigningKey(secrets.token_bytes(32))
    manifest = draft_manifest(organiser=key.peer, now_seconds=time.time(), name="bench", values=values)
    return {"manifest": manifest.sign(key).encode().hex(), "organiser": key.private_bytes().hex()}
