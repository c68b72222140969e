"""The link keeper announces, looks up, dials, retries and remembers."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Collection

import pytest

from p2p_diloco.errors import PeerError
from p2p_diloco.ids import PeerId, sha256, short_peer_id
from p2p_diloco.node import link_keeper, peer_records
from p2p_diloco.node.link_keeper import CALM_LOOK_SECONDS
from p2p_diloco.signing import SigningKey
from p2p_diloco.transport.directory import PeerRecord, PeerRole, decode_record, sign_record
from tests.swarm.link_stage import ANN, BEN, CLEO, DAN, EVE, RUN, Scene, now, play


def test_peers_find_each_other_in_the_directory_and_link() -> None:
    async def act(scene: Scene) -> None:
        await scene.keeper(ANN)
        await scene.keeper(BEN, dialable=False)
        await asyncio.sleep(3.0)
        assert scene.linked(ANN) == {BEN.peer}
        assert scene.linked(BEN) == {ANN.peer}

    play(act)


def test_known_addresses_are_dialled_while_the_directory_is_down_and_its_failure_is_reported_once() -> None:
    async def act(scene: Scene) -> None:
        scene.directory.is_down = True
        await scene.transport(ANN)
        await scene.keeper(BEN, known=[ANN])
        await asyncio.sleep(10.0)
        assert scene.linked(BEN) == {ANN.peer}
        assert [topic for topic, _ in scene.heard] == ["directory", "directory"], "announcing failed, and looking"

    play(act)


def test_a_directory_that_refuses_this_peers_record_is_reported_once_until_it_accepts_one() -> None:
    """This happens if the directory's clock and this peer's differ by minutes."""

    async def act(scene: Scene) -> None:
        take = scene.directory.announce

        async def refuse(record: PeerRecord, expires_at: float) -> None:
            raise PeerError("none of 1 peers of the directory stored the record")

        keeper = await scene.keeper(ANN)
        for times in (1, 2):
            scene.directory.announce = refuse  # type: ignore[method-assign]
            keeper.announce_again()
            await asyncio.sleep(300.0)
            assert [topic for topic, _ in scene.heard] == ["directory"] * times
            scene.directory.announce = take  # type: ignore[method-assign]
            await asyncio.sleep(300.0)
            assert len(await scene.directory.peers()) == 1

    play(act)


def test_a_peer_that_is_down_is_redialled_with_growing_pauses_and_reported_once() -> None:
    async def act(scene: Scene) -> None:
        await scene.transport(CLEO)
        await scene.keeper(BEN, known=[ANN, CLEO])
        await asyncio.sleep(300.0)
        times = [at for at, peer in scene.dials if peer == ANN.peer]
        pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
        assert pauses[0] < 3.0
        assert pauses[-1] >= link_keeper.LAST_RETRY_SECONDS
        assert len(times) < 15
        ((topic, text),) = scene.heard
        assert topic == "link"
        assert short_peer_id(ANN.peer) in text
        await scene.transport(ANN)
        await asyncio.sleep(70.0)
        assert scene.linked(BEN) == {ANN.peer, CLEO.peer}

    play(act)


def test_a_peer_without_any_link_keeps_trying_so_that_it_is_back_soon_after_its_line_is() -> None:
    async def act(scene: Scene) -> None:
        await scene.keeper(BEN, known=[ANN])
        await asyncio.sleep(300.0)
        assert len(scene.dials) < 35
        await scene.transport(ANN)
        await asyncio.sleep(link_keeper.LAST_ALONE_RETRY_SECONDS + CALM_LOOK_SECONDS)
        assert scene.linked(BEN) == {ANN.peer}

    play(act)


def test_a_steady_link_is_redialled_at_once() -> None:
    async def act(scene: Scene) -> None:
        await scene.transport(ANN)
        await scene.keeper(BEN, known=[ANN])
        await asyncio.sleep(120.0)
        transport = scene.network.find(BEN.peer)
        assert transport is not None
        transport.hang_up(ANN.peer)
        await asyncio.sleep(CALM_LOOK_SECONDS + 1.0)
        assert scene.linked(BEN) == {ANN.peer}

    play(act)


def test_a_link_that_keeps_being_closed_is_redialled_less_and_less_often() -> None:
    async def act(scene: Scene) -> None:
        await scene.transport(ANN)
        await scene.keeper(BEN, known=[ANN])
        transport = scene.network.find(BEN.peer)
        assert transport is not None
        for _ in range(600):
            await asyncio.sleep(1.0)
            transport.hang_up(ANN.peer)  # for example, another version of this program sends unreadable frames
        assert len(scene.dials) < 20

    play(act)


def test_this_peer_is_announced_again_before_its_record_expires() -> None:
    async def act(scene: Scene) -> None:
        await scene.keeper(ANN)
        for _ in range(30):
            await asyncio.sleep(60.0)
            (record,) = await scene.directory.peers()
            assert record.peer == ANN.peer
            assert now() - record.issued_at <= link_keeper.ANNOUNCE_SECONDS + CALM_LOOK_SECONDS + 60.0

    play(act)


def test_introductions_link_strangers_without_a_directory() -> None:
    async def act(scene: Scene) -> None:
        scene.directory.is_down = True
        await scene.transport(CLEO)
        ann = await scene.keeper(ANN, known=[])
        ann.introduced((scene.record(CLEO).encode(),))
        await asyncio.sleep(1.0)
        assert scene.linked(ANN) == {CLEO.peer}
        told = [decode_record(encoded).peer for encoded in ann.introductions()]
        assert told == [ANN.peer, CLEO.peer], "the own record first"

    play(act)


def test_the_addresses_of_the_invite_stay_known_beside_those_of_a_record() -> None:
    """On a LAN whose router turns nothing back, the one that works may stand in the invite alone."""

    async def act(scene: Scene) -> None:
        keeper = await scene.keeper(ANN, known=[CLEO], runs=False)
        (given,) = keeper.known.values()
        elsewhere = ("/ip4/45.10.0.1/tcp/1",)
        record = sign_record(
            CLEO, run=RUN, addresses=elsewhere, can_be_dialled=True, role=PeerRole.TRAINER, issued_at=9.0
        )
        keeper.introduced((record.encode(),))
        assert keeper.known == {CLEO.peer: (*elsewhere, *given)}

    play(act)


def test_forged_foreign_older_and_own_records_are_ignored() -> None:
    async def act(scene: Scene) -> None:
        keeper = await scene.keeper(ANN, runs=False)
        record = scene.record(CLEO, issued_at=100.0)
        forged = bytearray(record.encode())
        forged[-1] ^= 1
        keeper.introduced((bytes(forged), b"", scene.record(CLEO, run=b"x").encode(), scene.record(ANN).encode()))
        assert keeper.known == {}
        keeper.introduced((record.encode(),))
        older = sign_record(
            CLEO, run=RUN, addresses=("/ip4/10.0.0.1/tcp/1",), can_be_dialled=True, role=PeerRole.TRAINER, issued_at=9.0
        )
        keeper.introduced((older.encode(),))
        assert keeper.known == {CLEO.peer: record.addresses}

    play(act)


def test_strangers_cannot_fill_the_memory_and_linked_peers_are_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_records, "MOST_KNOWN", 3)

    async def act(scene: Scene) -> None:
        await scene.transport(BEN)
        keeper = await scene.keeper(ANN)
        keeper.introduced((scene.record(BEN, issued_at=1.0).encode(),))
        await asyncio.sleep(2.0)
        assert scene.linked(ANN) == {BEN.peer}
        sybils = [SigningKey(sha256(b"sybil %d" % number)) for number in range(5)]
        keeper.introduced(tuple(scene.record(sybil, issued_at=2.0 + n).encode() for n, sybil in enumerate(sybils)))
        assert keeper.known.keys() == {BEN.peer, sybils[3].peer, sybils[4].peer}

    play(act)


def test_a_failed_dial_does_not_end_the_keeper() -> None:
    async def act(scene: Scene) -> None:
        keeper = await scene.keeper(ANN, known=[BEN], runs=False)
        keeper.known[CLEO.peer] = ()
        task = asyncio.ensure_future(keeper.run())
        await asyncio.sleep(30.0)
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert {short_peer_id(BEN.peer), short_peer_id(CLEO.peer)} == {
            name
            for name in (short_peer_id(BEN.peer), short_peer_id(CLEO.peer))
            if any(name in t for _, t in scene.heard)
        }
        with pytest.raises(PeerError):
            await scene.network.transport(CLEO.peer, run=RUN).dial(ANN.peer, (), now() + 1.0)

    play(act)


def test_only_links_that_are_needed_are_dialled_and_kept() -> None:
    async def act(scene: Scene) -> None:
        await scene.transport(BEN)
        await scene.transport(CLEO)
        others = [SigningKey(sha256(b"other %d" % n)) for n in range(3)]
        dan, eve = others[0].peer, others[1].peer
        needed: set[PeerId] = {BEN.peer, CLEO.peer, eve}
        for other in others:
            await scene.transport(other)
        await scene.keeper(ANN, known=(BEN, CLEO, *others), wanted=lambda _: frozenset(needed))
        await asyncio.sleep(5.0)
        assert scene.linked(ANN) >= {BEN.peer, CLEO.peer, eve}
        needed.add(dan)
        await asyncio.sleep(90.0)
        assert scene.linked(ANN) == {BEN.peer, CLEO.peer, dan, eve}, "who was dialled while there were few is let go"
        needed.remove(CLEO.peer)
        await asyncio.sleep(link_keeper.UNNEEDED_SECONDS / 2)
        assert CLEO.peer in scene.linked(ANN), "it may be needed again in a moment"
        await asyncio.sleep(link_keeper.UNNEEDED_SECONDS)
        assert scene.linked(ANN) == {BEN.peer, dan, eve}
        needed.clear()
        await asyncio.sleep(4 * link_keeper.UNNEEDED_SECONDS)
        assert len(scene.linked(ANN)) == link_keeper.KEPT_LINKS, "nobody cuts itself off"

    play(act)


def test_unneeded_links_are_not_all_dropped_at_once() -> None:
    async def act(scene: Scene) -> None:
        others = [SigningKey(sha256(b"other %d" % n)) for n in range(6)]
        for other in others:
            await scene.transport(other)
        dead = frozenset({PeerId(sha256(b"dead"))})

        def wanted(announced: Collection[PeerId]) -> frozenset[PeerId] | None:
            is_cut_off = len(scene.linked(ANN)) < link_keeper.FEW_LINKS
            return None if is_cut_off else dead

        await scene.keeper(ANN, known=others, wanted=wanted)
        await asyncio.sleep(300.0)
        assert len(scene.linked(ANN)) == link_keeper.KEPT_LINKS
        assert len(scene.dials) <= len(others) + link_keeper.FEW_LINKS, "each once, and not again and again"

    play(act)


def test_an_announced_peer_is_looked_up_until_its_record_is_old() -> None:
    async def act(scene: Scene) -> None:
        told: set[PeerId] = set()

        def wanted(announced: Collection[PeerId]) -> frozenset[PeerId]:
            told.clear()
            told.update(announced)
            return frozenset()

        await scene.directory.announce(scene.record(BEN), now() + link_keeper.RECORD_LIFETIME_SECONDS)
        await scene.keeper(ANN, known=(CLEO,), wanted=wanted)
        await asyncio.sleep(10.0)
        assert told == {BEN.peer}, "an address from an invite is no sign that somebody is there"
        await asyncio.sleep(3 * link_keeper.RECORD_LIFETIME_SECONDS)
        assert told == set()

    play(act)


def test_a_link_dialled_by_the_other_end_is_left_to_it() -> None:
    async def act(scene: Scene) -> None:
        for key in (CLEO, SigningKey(sha256(b"dan"))):
            await scene.keeper(key, known=(ANN,))
        await scene.keeper(BEN, known=(ANN,))
        await scene.keeper(ANN, wanted=lambda _: frozenset())
        await asyncio.sleep(4 * link_keeper.UNNEEDED_SECONDS)
        assert BEN.peer in scene.linked(ANN)

    play(act)


def test_an_invite_names_linked_peers_that_this_peer_has_dialled() -> None:
    async def act(scene: Scene) -> None:
        await scene.keeper(ANN)
        await asyncio.sleep(1.0)
        ben = await scene.keeper(BEN)
        await asyncio.sleep(5.0)
        await scene.keeper(CLEO)
        await asyncio.sleep(5.0)
        assert scene.linked(BEN) == {ANN.peer, CLEO.peer}, "and Cleo, who came last, has dialled Ben"
        assert ben.invited() == (scene.record(ANN).addresses,)
        scene.network.kill(ANN.peer)
        await asyncio.sleep(1.0)
        assert ben.invited() == ()

    play(act)


def test_an_invite_names_bootstraps_first_and_no_address_of_a_third_party() -> None:
    async def act(scene: Scene) -> None:
        for key in (ANN, CLEO, DAN):
            await scene.transport(key)
        ben = await scene.keeper(BEN)
        foreign = scene.record(EVE).addresses
        own = {key: scene.record(key).addresses for key in (ANN, CLEO, DAN)}
        ben.introduced(
            tuple(
                sign_record(
                    key, run=RUN, addresses=addresses, can_be_dialled=can_be_dialled, role=role, issued_at=now()
                ).encode()
                for key, addresses, can_be_dialled, role in (
                    (ANN, (*foreign, *own[ANN]), True, PeerRole.TRAINER),
                    (CLEO, own[CLEO], True, PeerRole.BOOTSTRAP),
                    (DAN, own[DAN], False, PeerRole.TRAINER),
                )
            )
        )
        await asyncio.sleep(5.0)
        assert scene.linked(BEN) == {ANN.peer, CLEO.peer, DAN.peer}
        assert ben.invited() == (own[CLEO], own[ANN])

    play(act)


def test_an_invite_names_at_most_two_bootstraps_that_dialled_this_peer() -> None:
    async def act(scene: Scene) -> None:
        ben = await scene.keeper(BEN)
        for key in (ANN, CLEO, DAN, EVE):
            caller = await scene.transport(key)
            await caller.dial(BEN.peer, scene.record(BEN).addresses, now() + 5.0)
            role = PeerRole.TRAINER if key is EVE else PeerRole.BOOTSTRAP
            record = sign_record(
                key, run=RUN, addresses=scene.record(key).addresses, can_be_dialled=True, role=role, issued_at=now()
            )
            ben.introduced((record.encode(),))
        assert len(scene.linked(BEN)) == 4
        bootstraps = {scene.record(key).addresses for key in (ANN, CLEO, DAN)}
        assert len(ben.invited()) == 2
        assert set(ben.invited()) < bootstraps

    play(act)


def test_addresses_that_worked_are_kept_before_those_that_never_did() -> None:
    async def act(scene: Scene) -> None:
        await scene.transport(CLEO)
        await scene.transport(DAN)
        ben = await scene.keeper(BEN, known=[ANN, CLEO, DAN, EVE])
        await asyncio.sleep(3.0)
        scene.network.kill(CLEO.peer)
        await asyncio.sleep(3.0)
        assert list(ben.kept_addresses()) == [DAN.peer, CLEO.peer, ANN.peer, EVE.peer]
        assert set(ben.failures) >= {ANN.peer, EVE.peer}

    play(act)


def test_a_copy_of_this_peers_state_folder_on_another_machine_is_reported_once() -> None:
    async def act(scene: Scene) -> None:
        ann = await scene.keeper(ANN)
        await asyncio.sleep(5.0)

        def elsewhere(issued_at: float, *addresses: str) -> bytes:
            return sign_record(
                ANN, run=RUN, addresses=addresses, can_be_dialled=True, role=PeerRole.TRAINER, issued_at=issued_at
            ).encode()

        ann.introduced((scene.record(ANN).encode(), elsewhere(now() - 60.0, "/ip4/10.0.0.1/tcp/1")))
        assert [topic for topic, _ in scene.heard] == [], "its own, and one of an earlier start"
        ann.introduced((elsewhere(now(), "/ip4/10.0.0.2/tcp/1"), elsewhere(now() + 1.0, "/ip4/10.0.0.2/tcp/1")))
        ((topic, text),) = scene.heard
        assert topic == "identity"
        assert "another process has this peer's identity and announces '/ip4/10.0.0.2/tcp/1'" in text

    play(act)


def test_a_reachable_peer_waits_for_an_undialable_one_to_dial_and_finally_tries_again() -> None:
    async def scene(stage: Scene) -> None:
        ann = await stage.keeper(ANN)
        for key in (BEN, CLEO):
            await stage.transport(key, dialable=False)
        ann.introduced((stage.record(BEN, is_proved=False).encode(), stage.record(CLEO).encode()))
        await asyncio.sleep(link_keeper.LEAVE_TO_THEM_SECONDS - 1.0)
        dialled = [peer for _, peer in stage.dials]
        assert dialled.count(BEN.peer) == 1, "at once, and then it is Ben's turn"
        assert dialled.count(CLEO.peer) > 1
        await asyncio.sleep(3.0)
        assert [peer for _, peer in stage.dials].count(BEN.peer) == 2

    play(scene)


def test_a_peer_displaced_by_a_flood_of_introductions_before_its_dial_ends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer_records, "MOST_KNOWN", 1)

    async def act(scene: Scene) -> None:
        flood = [scene.record(SigningKey(sha256(b"stranger %d" % number))).encode() for number in range(100)]

        def wanted(announced: Collection[PeerId]) -> frozenset[PeerId] | None:
            if announced and flood:
                asyncio.get_running_loop().call_soon(keeper.introduced, (flood.pop(),))
            return None

        keeper = await scene.keeper(ANN, wanted=wanted)
        keeper.introduced((scene.record(CLEO).encode(),))
        await asyncio.sleep(2.0)
        flood.clear()
        await scene.transport(BEN)
        keeper.introduced((scene.record(BEN).encode(),))
        await asyncio.sleep(60.0)
        assert scene.linked(ANN) == {BEN.peer}, "it goes on dialling"

    play(act)


# -- strangers


def crowd(count: int) -> list[SigningKey]:
    return [SigningKey(sha256(b"stranger %d" % number)) for number in range(count)]


def test_a_stranger_that_cannot_be_dialled_is_left_alone_for_ten_minutes_and_a_member_is_not() -> None:
    async def act(scene: Scene) -> None:
        members = {BEN.peer}
        keeper = await scene.keeper(ANN, known=[DAN], is_stranger=lambda peer: peer not in members)
        keeper.introduced((scene.record(BEN).encode(), scene.record(CLEO).encode()))
        await asyncio.sleep(550.0)
        dials = {key.peer: sum(peer == key.peer for _, peer in scene.dials) for key in (BEN, CLEO, DAN)}
        assert dials[CLEO.peer] == 1
        assert min(dials[BEN.peer], dials[DAN.peer]) >= 10, "a member, and one that the invite names"
        assert not any(short_peer_id(CLEO.peer) in text for _, text in scene.heard), "anybody can sign records"
        members.add(CLEO.peer)
        await asyncio.sleep(20.0)
        assert sum(peer == CLEO.peer for _, peer in scene.dials) > 1, "it has become a member"

    play(act)


def test_records_that_name_a_third_party_cause_only_a_few_dials_to_it() -> None:
    async def act(scene: Scene) -> None:
        keeper = await scene.keeper(ANN, is_stranger=lambda peer: True)
        for minute in range(20):
            victim = f"/ip4/203.0.113.5/tcp/{minute + 1}"
            records = (scene.record(key, addresses=(victim,), issued_at=now()) for key in crowd(200))
            keeper.introduced(tuple(record.encode() for record in records))
            await asyncio.sleep(60.0)
        assert 4 <= len(scene.dials) <= 4 * 3

    play(act)


def test_thousands_of_introductions_cause_a_few_dozen_dials_and_then_one_every_other_second() -> None:
    async def act(scene: Scene) -> None:
        keeper = await scene.keeper(ANN, is_stranger=lambda peer: True)
        keeper.introduced(tuple(scene.record(key).encode() for key in crowd(2000)))
        await asyncio.sleep(120.0)
        assert len(scene.dials) <= 32 + 60 + 1

    play(act)


def test_a_record_from_the_future_is_ignored_and_displaces_no_peer() -> None:
    async def act(scene: Scene) -> None:
        keeper = await scene.keeper(ANN, runs=False)
        keeper.introduced((scene.record(BEN, issued_at=now() + 3601.0).encode(),))
        assert keeper.known == {}
        keeper.introduced((scene.record(BEN, issued_at=now() + 600.0).encode(),))
        assert keeper.known.keys() == {BEN.peer}

    play(act)


def test_members_are_introduced_and_kept_before_peers_that_sign_many_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer_records, "MOST_KNOWN", 80)

    async def act(scene: Scene) -> None:
        keeper = await scene.keeper(ANN, runs=False, is_stranger=lambda peer: peer != BEN.peer)
        keeper.introduced((scene.record(BEN, issued_at=1.0).encode(),))
        keeper.introduced(tuple(scene.record(key, issued_at=2.0).encode() for key in crowd(200)))
        told = [decode_record(encoded).peer for encoded in keeper.introductions()]
        assert told[:2] == [ANN.peer, BEN.peer]
        assert list(keeper.kept_addresses()) == [BEN.peer], "at the next start they would count as known"

    play(act)


def test_strangers_that_were_reached_are_not_known_at_the_next_start() -> None:
    """Dials of known peers have no budget, and the records of these may name a third party by then."""

    async def act(scene: Scene) -> None:
        strangers = crowd(4)
        for key in (BEN, *strangers):
            await scene.transport(key)
        keeper = await scene.keeper(ANN, is_stranger=lambda peer: peer != BEN.peer)
        keeper.introduced(tuple(scene.record(key).encode() for key in (BEN, *strangers)))
        await asyncio.sleep(5.0)
        assert scene.linked(ANN) == {key.peer for key in (BEN, *strangers)}
        kept = keeper.kept_addresses()
        for key in (ANN, *strangers):
            scene.network.kill(key.peer)
        scene.dials.clear()
        known = [key for key in (BEN, *strangers) if key.peer in kept]
        started = await scene.keeper(CLEO, known=known, is_stranger=lambda peer: peer != BEN.peer)
        for minute in range(10):
            victim = (f"/ip4/203.0.113.5/tcp/{minute + 1}",)
            records = (scene.record(key, addresses=victim, issued_at=now()) for key in strangers)
            started.introduced(tuple(record.encode() for record in records))
            await asyncio.sleep(60.0)
        dialled = Counter(peer for _, peer in scene.dials)
        assert sum(dialled[key.peer] for key in strangers) <= 8
        assert list(kept) == [BEN.peer]

    play(act)


def test_with_too_many_strangers_the_newest_link_of_the_busiest_address_is_closed() -> None:
    async def act(scene: Scene) -> None:
        members = {key.peer for key in (BEN, CLEO)}
        await scene.keeper(ANN, is_stranger=lambda peer: peer not in members)
        transport = scene.network.find(ANN.peer)
        assert transport is not None

        async def remote_hosts() -> dict[PeerId, tuple[str, ...]]:
            hosts = dict.fromkeys(transport.linked_peers(), ("203.0.113.5",))
            return {**hosts, CLEO.peer: ("198.51.100.7",)}

        transport.remote_hosts = remote_hosts  # type: ignore[method-assign]
        for key in (BEN, CLEO, *crowd(70)):
            caller = await scene.transport(key, dialable=False)
            await caller.dial(ANN.peer, transport.listen_addresses(), now() + 5.0)
            await asyncio.sleep(1.0)
        await asyncio.sleep(10.0)
        assert scene.linked(ANN) == members | {key.peer for key in crowd(64)}
        late = crowd(70)[-1]
        caller = scene.network.find(late.peer)
        assert caller is not None
        with pytest.raises(PeerError, match="refused the link"):
            await caller.dial(ANN.peer, transport.listen_addresses(), now() + 5.0)
        members.add(late.peer)
        await caller.dial(ANN.peer, transport.listen_addresses(), now() + 5.0)

    play(act)


def test_strangers_of_unknown_address_keep_their_links() -> None:
    async def act(scene: Scene) -> None:
        await scene.keeper(ANN, is_stranger=lambda peer: True)
        transport = scene.network.find(ANN.peer)
        assert transport is not None

        async def remote_hosts() -> dict[PeerId, tuple[str, ...]]:
            raise PeerError("not now")

        transport.remote_hosts = remote_hosts  # type: ignore[method-assign]
        for key in crowd(66):
            caller = await scene.transport(key, dialable=False)
            await caller.dial(ANN.peer, transport.listen_addresses(), now() + 5.0)
        await asyncio.sleep(10.0)
        assert len(scene.linked(ANN)) == 66

    play(act)


def test_an_undialable_copy_is_detected_by_records_that_this_peer_has_not_issued() -> None:
    async def act(scene: Scene) -> None:
        ann = await scene.keeper(ANN)
        await asyncio.sleep(5.0)

        def hidden(issued_at: float) -> bytes:
            return sign_record(
                ANN, run=RUN, addresses=(), can_be_dialled=False, role=PeerRole.TRAINER, issued_at=issued_at
            ).encode()

        own = ann.introductions()[0]
        await asyncio.sleep(1.0)
        earlier_start = hidden(now() + 60.0)  # by a clock that was ahead
        ann.introduced((own, earlier_start, hidden(now() - 60.0)))
        await asyncio.sleep(100.0)
        ann.introduced((own, earlier_start))
        assert scene.heard == []
        ann.introduced((hidden(now() - 1.0),))
        ann.introduced((hidden(now() - 0.5),))
        ((topic, text),) = scene.heard
        assert topic == "identity"
        assert text == (
            "another process has this peer's identity and announces no address of its own; both take part as one peer "
            "and disturb each other: stop one of them, and give it its own state directory instead of a copy"
        )

    play(act)
