"""Run for the benchmark: its own manifest and organiser, one fragment, rounds twice as long as a turn may take."""

from __future__ import annotations

from typing import Any

from benchmarks.new_run import order_of_new_run
from p2p_diloco.codec.codec import CODEC_NAMES
from p2p_diloco.errors import ConfigError


def our_orders(*, codec: str, spans: int, turn_seconds: float) -> dict[str, Any]:
    """Return the configuration of our peers: the signed manifest and the organiser's key, in hexadecimal.

    Args:
        codec: codec of contributions and entries.
        turn_seconds: longest time of a turn. Contributions are accepted until the middle of a round.
    Raises:
        ConfigError: the codec is unknown, or the number of spans is invalid.
    """
    check_codec(codec)
    round_seconds = 2.0 * turn_seconds
    return order_of_new_run(
        {
            "codec": {"contribution": codec, "entry": codec},
            "rounds": {"round_seconds": round_seconds, "fragments": 1, "spans_per_fragment": spans},
        }
    )


def check_codec(codec: str) -> None:
    """Check the name of a codec.

    Raises:
        ConfigError: the codec is unknown.
    """
    if codec not in CODEC_NAMES:
        raise ConfigError(f"--codec is {codec!r}; expected one of {', '.join(CODEC_NAMES)}")
