"""Run for the benchmark: its own manifest and organiser, one fragment, rounds twice as long as a turn may take."""

from __future__ import annotations

import secrets
import time
from typing import Any

from p2p_diloco.codec.codec import CODEC_NAMES
from p2p_diloco.config.run_file import draft_manifest
from p2p_diloco.errors import ConfigError
from p2p_diloco.signing import SigningKey


def our_orders(*, codec: str, spans: int, turn_seconds: float) -> dict[str, Any]:
    """Return the configuration of our peers: the signed manifest and the organiser's key, in hexadecimal.

    Args:
        codec: codec of contributions and entries.
        turn_seconds: longest time of a turn. Contributions are accepted until the middle of a round.
    Raises:
        ConfigError: the codec is unknown, or the number of spans is invalid.
    """
    check_codec(codec)
    organiser = SigningKey(secrets.token_bytes(32))
    round_seconds = 2.0 * turn_seconds
    manifest = draft_manifest(
        organiser=organiser.peer,
        now_seconds=time.time(),
        name="bench",
        values={
            "codec": {"contribution": codec, "entry": codec},
            "rounds": {"round_seconds": round_seconds, "fragments": 1, "spans_per_fragment": spans},
        },
    )
    return {"manifest": manifest.sign(organiser).encode().hex(), "organiser": organiser.private_bytes().hex()}


def check_codec(codec: str) -> None:
    """Check the name of a codec.

    Raises:
        ConfigError: the codec is unknown.
    """
    if codec not in CODEC_NAMES:
        raise ConfigError(f"--codec is {codec!r}; expected one of {', '.join(CODEC_NAMES)}")
