"""The memory network beyond the contract: killed peers and peers that are online twice."""

from __future__ import annotations

import asyncio

import pytest

from p2p_diloco.errors import ConfigError, PeerError
from p2p_diloco.transport.link import Lane
from simulator.virtual_time import run_virtual
from tests.transport.stage import RUN, act, in_seconds, link
from tests.transport.test_contract import MemoryStage


def test_a_killed_peer_receives_nothing_more_and_may_return() -> None:
    async def scene(stage: MemoryStage) -> None:
        (one, one_heard), (two, two_heard) = await stage.add(), await stage.add()
        await link(one, two, two_heard)
        stage.network.kill(two.peer)
        stage.network.kill(two.peer)
        assert not two.post(one.peer, b"ghost", lane=Lane.CONTROL, deadline=in_seconds(1))
        with pytest.raises(PeerError, match="this peer is offline"):
            await two.dial(one.peer, one.listen_addresses(), in_seconds(1))
        await asyncio.sleep(1)
        assert one_heard.kinds() == ["up", "lost"]
        assert two_heard.kinds() == ["up"]
        async with stage.network.transport(two.peer, run=RUN) as again:
            await again.dial(one.peer, one.listen_addresses(), in_seconds(1))
            assert one_heard.kinds() == ["up", "lost", "up"]

    run_virtual(act(MemoryStage(), scene))


def test_a_peer_is_online_only_once() -> None:
    async def scene(stage: MemoryStage) -> None:
        one, _ = await stage.add()
        with pytest.raises(ConfigError, match="is already online"):
            await stage.network.transport(one.peer, run=RUN).__aenter__()

    run_virtual(act(MemoryStage(), scene))
