"""A joiner asks the peers of its invite for the manifest."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from p2p_diloco.errors import ConfigError, DialFailure, NetworkError, NobodyAnswered, NotReached
from p2p_diloco.ids import Digest, PeerId, format_peer_id, sha256, short_peer_id
from p2p_diloco.node.manifest_fetch import FetchedManifest, fetch_manifest
from p2p_diloco.protocol.wire.messages import (
    Introductions,
    ManifestReply,
    ManifestRequest,
    Message,
    decode_message,
    encode_message,
)
from p2p_diloco.transport.link import Lane, Transport, TransportListener
from simulator.faulty_network import FaultyNetwork
from simulator.virtual_time import run_virtual

RUN = sha256(b"the run")
ME, BOOTSTRAP, SECOND, STRANGER = (PeerId(sha256(name)) for name in (b"me", b"boot", b"second", b"stranger"))
MANIFEST = b"a signed manifest"


def soon() -> float:
    return asyncio.get_running_loop().time() + 5.0


class Answering(TransportListener):
    """Answers a request for the manifest with some messages; the first `deaf_for` requests get no answer."""

    def __init__(self, transport: Transport, *answers: Message, deaf_for: int = 0) -> None:
        self._transport = transport
        self._answers = answers
        self._deaf_for = deaf_for

    def frame_received(self, peer: PeerId, lane: Lane, frame: bytes) -> None:
        assert isinstance(decode_message(frame), ManifestRequest)
        self._deaf_for -= 1
        if self._deaf_for < 0:
            for answer in self._answers:
                self._transport.post(peer, encode_message(answer), lane=Lane.CONTROL, deadline=soon())


class Scene:
    """A joiner, and the peers that a test adds."""

    def __init__(self, exits: AsyncExitStack) -> None:
        self.network = FaultyNetwork(3)
        self._exits = exits

    async def add(self, peer: PeerId, *answers: Message, deaf_for: int = 0, run: Digest = RUN) -> Transport:
        transport = self.network.transport(peer, run=run)
        transport.serve(Answering(transport, *answers, deaf_for=deaf_for))
        return await self._exits.enter_async_context(transport)

    async def fetch(
        self, *bootstraps: PeerId, timeout_seconds: float = 60.0, check: Callable[[bytes], object] = len
    ) -> FetchedManifest:
        joiner = self.network.transport(ME, run=RUN, can_be_dialled=False)
        listener = joiner.listener
        await self._exits.enter_async_context(joiner)
        addresses = {peer: self.network.transport(peer, run=RUN).listen_addresses() for peer in bootstraps}
        try:
            return await fetch_manifest(joiner, addresses, timeout_seconds, check)
        finally:
            assert joiner.listener is listener, "the listener is put back"


def play(act: Any) -> Any:
    async def whole() -> Any:
        async with AsyncExitStack() as exits:
            return await act(Scene(exits))

    return run_virtual(whole())


def test_the_first_answer_is_used_and_introductions_are_kept() -> None:
    async def act(scene: Scene) -> FetchedManifest:
        await scene.add(BOOTSTRAP, Introductions(records=(b"record",)), ManifestReply(manifest=MANIFEST))
        return await scene.fetch(BOOTSTRAP)

    assert play(act) == FetchedManifest(peer=BOOTSTRAP, manifest=MANIFEST, records=(b"record",))


def test_a_bootstrap_that_is_down_is_skipped() -> None:
    async def act(scene: Scene) -> FetchedManifest:
        await scene.add(SECOND, ManifestReply(manifest=MANIFEST))
        return await scene.fetch(BOOTSTRAP, SECOND)

    assert play(act).manifest == MANIFEST


def test_a_live_peer_listed_after_sixty_dead_ones_answers_in_time() -> None:
    async def act(scene: Scene) -> tuple[FetchedManifest, float]:
        dead = [PeerId(sha256(bytes([number]))) for number in range(60)]
        for peer in dead:
            scene.network.cut(ME, peer)  # like addresses no longer in use: no refusal, only silence
        await scene.add(SECOND, ManifestReply(manifest=MANIFEST))
        begin = asyncio.get_running_loop().time()
        return await scene.fetch(*dead, SECOND), asyncio.get_running_loop().time() - begin

    found, seconds = play(act)
    assert found.peer == SECOND
    assert seconds < 5.0, "all at once"


def test_the_error_describes_only_the_first_few_of_many_peers() -> None:
    async def act(scene: Scene) -> str:
        dead = [PeerId(sha256(bytes([number]))) for number in range(60)]
        with pytest.raises(NetworkError) as caught:
            await scene.fetch(*dead)
        return str(caught.value)

    text = play(act)
    assert "none of the 60 peers asked answered within 60 s" in text
    assert "and 52 more" in text
    assert len(text) < 2000


def test_a_peer_outside_the_run_is_asked_again_while_another_may_answer() -> None:
    async def act(scene: Scene) -> FetchedManifest:
        async with AsyncExitStack() as starting:
            old = scene.network.transport(BOOTSTRAP, run=sha256(b"another run"))
            await starting.enter_async_context(old)
            fetching = asyncio.ensure_future(scene.fetch(BOOTSTRAP, SECOND))
            await asyncio.sleep(3.0)
        await scene.add(BOOTSTRAP, ManifestReply(manifest=MANIFEST))
        return await fetching

    assert play(act).peer == BOOTSTRAP


def test_a_lost_request_is_repeated() -> None:
    async def act(scene: Scene) -> FetchedManifest:
        await scene.add(BOOTSTRAP, ManifestReply(manifest=MANIFEST), deaf_for=2)
        return await scene.fetch(BOOTSTRAP)

    assert play(act).manifest == MANIFEST


def test_after_the_timeout_the_error_describes_each_peer() -> None:
    async def act(scene: Scene) -> float:
        await scene.add(BOOTSTRAP)
        begin = asyncio.get_running_loop().time()
        with pytest.raises(NetworkError) as caught:
            await scene.fetch(BOOTSTRAP, SECOND, timeout_seconds=30.0)
        text = str(caught.value)
        assert "none of the 2 peers asked answered within 30 s" in text
        assert f"{short_peer_id(BOOTSTRAP)}: connected, but it sent no manifest" in text
        assert f"{short_peer_id(SECOND)}: cannot be dialled: /memory/1/p2p/" in text
        assert "refused" in text
        return asyncio.get_running_loop().time() - begin

    assert play(act) <= 31.0


def test_a_look_that_the_deadline_cuts_short_does_not_replace_what_an_earlier_one_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def why_unreachable(_: Transport, peer: PeerId, host: str, port: int, deadline: float) -> NotReached:
        loop = asyncio.get_running_loop()
        if deadline - loop.time() > 1.0:
            return NotReached("it is silent", DialFailure.SILENT)
        await asyncio.sleep(deadline - loop.time())
        return NotReached("it timed out", DialFailure.TIMED_OUT)

    async def act(scene: Scene) -> tuple[NotReached, ...]:
        monkeypatch.setattr(Transport, "why_unreachable", why_unreachable)
        transport = await scene.add(ME)
        with pytest.raises(NobodyAnswered) as caught:
            await fetch_manifest(transport, {BOOTSTRAP: (f"/ip4/1.2.3.4/tcp/5/p2p/{format_peer_id(BOOTSTRAP)}",)}, 6.0)
        return caught.value.failures

    assert [failed.failure for failed in play(act)] == [DialFailure.SILENT]


def test_an_invite_whose_peers_are_all_in_other_runs_fails_at_once() -> None:
    async def act(scene: Scene) -> float:
        await scene.add(BOOTSTRAP, run=sha256(b"another run"))
        begin = asyncio.get_running_loop().time()
        with pytest.raises(ConfigError, match="check the invite") as caught:
            await scene.fetch(BOOTSTRAP)
        assert short_peer_id(BOOTSTRAP) in str(caught.value)
        return asyncio.get_running_loop().time() - begin

    assert play(act) < 5.0


def test_strangers_and_bad_frames_are_ignored() -> None:
    async def act(scene: Scene) -> FetchedManifest:
        await scene.add(BOOTSTRAP, ManifestReply(manifest=MANIFEST), deaf_for=1)
        stranger = await scene.add(STRANGER)
        fetching = asyncio.ensure_future(scene.fetch(BOOTSTRAP))
        await asyncio.sleep(0.5)
        joiner = scene.network.find(ME)
        assert joiner is not None
        joiner.listener.frame_received(STRANGER, Lane.CONTROL, encode_message(ManifestReply(manifest=b"forged")))
        joiner.listener.frame_received(BOOTSTRAP, Lane.CONTROL, b"\xff")
        assert stranger.peer == STRANGER
        return await fetching

    assert play(act).manifest == MANIFEST


def refuse_forged(manifest: bytes) -> None:
    if manifest != MANIFEST:
        raise ConfigError("not signed by its organiser")


def test_a_wrong_first_answer_does_not_hide_a_good_one() -> None:
    async def act(scene: Scene) -> FetchedManifest:
        await scene.add(BOOTSTRAP, ManifestReply(manifest=b"forged"))
        await scene.add(SECOND, ManifestReply(manifest=MANIFEST))
        return await scene.fetch(BOOTSTRAP, SECOND, check=refuse_forged)

    assert play(act).manifest == MANIFEST


def test_a_wrong_answer_that_comes_late_does_not_end_the_wait_for_another_peer() -> None:
    async def act(scene: Scene) -> FetchedManifest:
        await scene.add(BOOTSTRAP, ManifestReply(manifest=MANIFEST), deaf_for=1)
        fetching = asyncio.ensure_future(scene.fetch(BOOTSTRAP, SECOND, check=refuse_forged))
        await asyncio.sleep(0.5)
        joiner = scene.network.find(ME)
        assert joiner is not None
        joiner.listener.frame_received(SECOND, Lane.CONTROL, encode_message(ManifestReply(manifest=b"forged")))
        return await fetching

    assert play(act).manifest == MANIFEST


def test_when_all_answers_are_wrong_the_fetch_fails_at_once_and_names_each() -> None:
    async def act(scene: Scene) -> float:
        await scene.add(BOOTSTRAP, ManifestReply(manifest=b"forged"))
        begin = asyncio.get_running_loop().time()
        with pytest.raises(ConfigError, match="sent a wrong manifest: not signed by its organiser; check the invite"):
            await scene.fetch(BOOTSTRAP, check=refuse_forged)
        return asyncio.get_running_loop().time() - begin

    assert play(act) < 5.0
