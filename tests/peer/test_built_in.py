"""The built-in training on a machine: what it refuses before anything is started."""

from __future__ import annotations

from typing import cast

import pytest

from p2p_diloco.config.settings import PeerSettings
from p2p_diloco.errors import ConfigError
from p2p_diloco.peer.built_in import BuiltInTraining
from p2p_diloco.peer.island import Island


def test_several_ranks_keep_no_trace() -> None:
    island = cast(Island, object())
    with pytest.raises(ConfigError, match="several ranks; leave out --keep-trace, or train with --ranks 1"):
        BuiltInTraining(island=island).check(PeerSettings(keep_trace=True), None)
    BuiltInTraining(island=island).check(PeerSettings(), None)
    BuiltInTraining().check(PeerSettings(keep_trace=True), None)
