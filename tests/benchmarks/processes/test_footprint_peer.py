"""A peer of the footprint benchmark reports errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.footprint.peer import SwarmPeer
from benchmarks.footprint.play import FootprintPlan, orders_of
from p2p_diloco.errors import ConfigError, NetworkError

ORDER = orders_of(FootprintPlan(num_peers=1, parameters=(200_000,)), 200_000)[0]


def test_an_invalid_invite_is_refused(tmp_path: Path) -> None:
    peer = SwarmPeer({**ORDER, "place": 1, "folder": str(tmp_path)})
    assert peer.found(seconds=1.0) == {}
    with pytest.raises(ConfigError):
        peer.join("none")


def test_a_missing_exchange_is_named() -> None:
    peer = SwarmPeer({**ORDER, "place": 1, "folder": "unused"})
    with pytest.raises(NetworkError, match="an exchange did not happen within 0 s; last events of the peer: nothing"):
        peer.exchange(rounds=1, seconds=0.05)
