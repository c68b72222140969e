"""Declarations: which are kept, which are news, which are forwarded, and which a promise shows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from council import BOOT, LEAD, NEW, NOW, OTHER, ROSTER, STRANGER, THIRD, A, B, C, D, applicant, member_of_three, sent
from fake_run import CYCLE_SECONDS, ROUND_SECONDS, ballot_number, peer_id, verify
from hypothesis import given
from hypothesis import strategies as st
from made import (
    NO_SIGNATURE,
    certify,
    change,
    child_of,
    declaration,
    founding,
    heartbeat,
    member,
    membership_of,
    proof_of,
    roster_1,
)

from p2p_diloco.ids import PeerId, sha256
from p2p_diloco.protocol.membership import declarations as module
from p2p_diloco.protocol.membership.declarations import (
    FIRST_WAIT_SECONDS,
    LONGEST_WAIT_SECONDS,
    MOST_FORWARDED,
    Returns,
)
from p2p_diloco.protocol.wire.ballot import MOST_DECLARATION_BYTES, MOST_DECLARATIONS, declarations_bytes
from p2p_diloco.protocol.wire.member import Declaration


def test_a_voter_forwards_a_declaration_only_once() -> None:
    here = member_of_three()
    assert {send.to for send in sent(here.receive(NEW, applicant(), NOW), Declaration)} == {LEAD, THIRD}
    assert here.receive(NEW, applicant(), NOW) == []
    assert here.receive(LEAD, declaration(D, cycle=1), NOW) == [], "it was passed on already"
    assert here.declarations.newest[D] == declaration(D, cycle=1)
    assert membership_of(A).receive(NEW, applicant(), NOW) == []


def test_ever_later_incarnations_of_a_peer_are_forwarded_once_in_a_cycle() -> None:
    here = member_of_three()
    cycle = here.rules.clock.cycle(here.rules.clock.round_at(NOW))
    sent_for = [
        len(sent(here.receive(NEW, applicant(incarnation=number, cycle=cycle), NOW), Declaration))
        for number in range(1, 100)
    ]
    assert sent_for == [2, *[0] * 98]
    assert here.declarations.newest[NEW].incarnation == 99, "it is noted, and shown in this peer's own promise"
    later = NOW + CYCLE_SECONDS
    assert sent(here.receive(NEW, applicant(incarnation=100, cycle=cycle + 1), later), Declaration)


def test_of_a_crowd_of_applicants_few_are_forwarded_in_a_cycle_and_members_always() -> None:
    here = member_of_three()
    cycle = here.rules.clock.cycle(here.rules.clock.round_at(NOW))
    crowd = [peer_id(f"sybil {number}") for number in range(3 * MOST_FORWARDED)]
    forwarded = [peer for peer in crowd if here.receive(peer, declaration(peer, cycle=cycle), NOW)]
    assert forwarded == crowd[:MOST_FORWARDED]
    assert sent(here.receive(LEAD, declaration(LEAD, incarnation=9, cycle=cycle), NOW), Declaration)


@pytest.mark.parametrize(
    ("sender", "is_taken"),
    [(LEAD, True), (peer_id("boot"), True), (peer_id("mallory"), False)],
    ids=["member", "founder", "stranger"],
)
def test_forwarded_declarations_are_accepted_only_from_members_and_the_founder(sender: PeerId, is_taken: bool) -> None:
    here = membership_of(A)
    here.rosters.take((founding(), roster_1(3)), NOW)
    here.receive(sender, applicant(), NOW)
    assert (NEW in here.declarations.newest) is is_taken


NEWS: list[tuple[str, Declaration, bool]] = [
    ("an application", applicant(cycle=3), True),
    ("an application of two cycles ago", applicant(), True),
    ("an old application", applicant(cycle=0), False),
    ("a good-bye of a stranger", applicant(leaving=True), False),
    ("a member as it is", declaration(A, incarnation=2, cycle=3), False),
    ("a member that leaves", declaration(A, incarnation=2, leaving=True), True),
    ("another incarnation", declaration(A, incarnation=3, cycle=1), True),
    ("another incarnation, three cycles ago", declaration(A, incarnation=3, cycle=0), False),
    ("an earlier incarnation", declaration(A, incarnation=1, leaving=True), False),
    ("a member that cannot be reached any more", declaration(A, incarnation=2, reachable=False, cycle=3), True),
    ("a small change of share", declaration(A, incarnation=2, share=7, cycle=3), False),
    ("a change of share", declaration(A, incarnation=2, share=6, cycle=3), True),
    ("a change of share where it reduces nothing", declaration(B, reachable=False, share=1, cycle=3), False),
    ("one that can be reached now", declaration(B, reachable=True, cycle=3), True),
    ("one that cannot be reached, and says otherwise", declaration(B, proofs=(proof_of(B, B),), cycle=3), False),
    ("one that a fresh identity has proved", declaration(B, proofs=(proof_of(B, NEW),), cycle=3), False),
    ("one that one of three who may prove it has proved", declaration(B, proofs=(proof_of(B, A),), cycle=3), False),
    ("one that two of them have proved", declaration(B, proofs=(proof_of(B, A), proof_of(B, C)), cycle=3), True),
    ("a member that reduces, by its own word", declaration(C, proofs=(proof_of(C, NEW),), cycle=3), False),
    ("the bootstrap, whatever it says of its reach", declaration(BOOT, reachable=False, trains=False, cycle=3), False),
]
MIXED = certify(
    child_of(
        founding().roster,
        [
            member(BOOT, counts=False, trains=False),
            member(A, incarnation=2),
            member(C),
            member(B, reduces=False),
        ],
    ),
    [BOOT],
)


@pytest.mark.parametrize(("word", "is_news"), [case[1:] for case in NEWS], ids=[case[0] for case in NEWS])
def test_a_declaration_that_changes_something_is_forwarded_to_leaders(word: Declaration, is_news: bool) -> None:
    here, now = membership_of(C, founding(), MIXED), 3 * CYCLE_SECONDS + 0.1
    assert bool(sent(here.receive(word.peer, word, now), Declaration)) is is_news
    assert (word in here.presence.view(MIXED.roster, now).declarations) is is_news


def test_a_reducer_that_cannot_be_reached_any_more_is_told_before_those_that_wish_to_reduce() -> None:
    """As on a LAN of 16 that a friend outside cannot reach: their claims filled the promises, and five went on."""
    wishing = [peer_id(f"wishing-{number}") for number in range(20)]
    listed = [member(A, incarnation=2), member(C), *(member(peer, reduces=False) for peer in wishing)]
    roster = certify(child_of(founding().roster, [member(BOOT, counts=False, trains=False), *listed]), [BOOT])
    here = membership_of(C, founding(), roster)
    lost = declaration(A, incarnation=2, reachable=False, cycle=3)
    for word in (lost, *(declaration(peer, cycle=3, proofs=(proof_of(peer, BOOT),)) for peer in wishing)):
        assert here.declarations.take(word, 3)
    seen = [here.presence.view(roster.roster, cycle * CYCLE_SECONDS + 0.1).declarations for cycle in (3, 5, 6)]
    assert [words[0] for words in seen[:2]] == [lost, lost]
    assert 1 < len(seen[0]) < 1 + len(wishing), "not all fit"
    assert seen[2] == (), "two cycles later they count no more"


def test_a_peer_that_the_manifest_does_not_list_is_not_news() -> None:
    here = member_of_three(listed=frozenset({A, B, C}))
    assert here.receive(NEW, applicant(), NOW) == []


def test_a_peer_declares_itself_while_the_roster_differs_from_its_state() -> None:
    stranger = membership_of(NEW, founding(), roster_1(3))
    assert stranger.declarations.own_news(NOW) is None, "it is not ready"
    stranger.local.set_ready(True)
    word = stranger.declarations.own_news(NOW)
    assert word is not None
    assert (word.peer, word.cycle, word.leaving) == (NEW, 1, False)
    again = member_of_three(OTHER, incarnation=2)
    assert again.declarations.own_news(NOW) is not None
    assert membership_of(A).declarations.own_news(NOW) is None


def test_a_bootstrap_declares_itself_only_while_it_is_needed() -> None:
    few = certify(child_of(founding().roster, map(member, (A, B))), [BOOT])
    for certified, is_needed in ((few, True), (roster_1(3), False)):
        boot = membership_of(BOOT, founding(), certified, trains=False)
        boot.local.set_ready(True)
        assert boot.declarations.is_needed() is is_needed
        assert (boot.declarations.own_news(NOW) is not None) is is_needed
    assert not membership_of(BOOT, trains=False).declarations.is_needed()
    assert not membership_of(BOOT, founding(), few).declarations.is_needed(), "it trains"
    assert not membership_of(NEW, founding(), few, trains=False).declarations.is_needed(), "it did not found the run"


def test_a_promise_shows_its_voters_own_declaration_and_leavers_before_applicants(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = member_of_three()
    change(here, can_be_dialled=False)
    for n in range(40):
        here.receive(A, declaration(peer_id(f"new {n}"), cycle=1, reachable=n % 4 == 0), NOW)
    here.receive(A, declaration(THIRD, leaving=True, cycle=1), NOW)
    words = here.presence.view(ROSTER, NOW).declarations
    assert len(words) <= MOST_DECLARATIONS
    assert {word.peer for word in words} >= {OTHER, THIRD}
    strangers = [word for word in words if word.peer not in ROSTER.peers()]
    assert all(word.reachable for word in strangers), "those first that can be reached"
    assert MOST_DECLARATION_BYTES // 4 < declarations_bytes(strangers) <= MOST_DECLARATION_BYTES // 2


def test_applicants_without_proofs_come_after_those_with_proofs() -> None:
    here = member_of_three()
    proved = peer_id("proved")
    for n in range(40):
        peer = peer_id(f"new {n}")
        here.receive(A, declaration(peer, cycle=1, proofs=(proof_of(peer, peer_id("accomplice"), cycle=1),)), NOW)
    here.receive(A, declaration(proved, cycle=1), NOW)
    assert here.presence.view(ROSTER, NOW).declarations[0].peer == proved


def test_members_that_count_come_before_fresh_ones_with_repeated_declarations() -> None:
    crowd = [peer_id(f"fresh {n}") for n in range(30)]
    many = certify(
        child_of(
            founding().roster,
            [*map(member, (A, B, C)), *(member(peer, counts=False, reduces=False) for peer in crowd)],
        ),
        [BOOT],
    )
    here = membership_of(A, founding(), many)
    for peer in crowd:
        here.receive(peer, declaration(peer, cycle=1), NOW)
    here.receive(B, declaration(B, cycle=1, reachable=False), NOW)
    words = here.presence.view(many.roster, NOW).declarations
    assert words[0].peer == B
    assert len(words) > 1


def test_half_of_the_declarations_are_reserved_for_applicants_without_claims() -> None:
    here = member_of_three()
    for n in range(40):
        here.receive(A, declaration(peer_id(f"new {n}"), cycle=1, reachable=False), NOW)
    assert len(here.presence.view(ROSTER, NOW).declarations) >= MOST_DECLARATIONS // 2 - 2


def test_old_applications_are_dropped_after_a_while() -> None:
    here = member_of_three()
    here.receive(NEW, applicant(), NOW)
    for cycle, is_kept in ((3, True), (4, False)):
        here.tick(cycle * CYCLE_SECONDS + 0.1)
        assert (NEW in here.declarations.newest) is is_kept


def test_a_good_bye_from_before_the_listing_does_not_take_a_member_away() -> None:
    roster = child_of(
        founding().roster,
        [member(peer, since=10, incarnation=2 if peer == B else 1) for peer in (A, B, C, D)],
        cycle=10,
    )
    here = membership_of(A, founding(), certify(roster, [BOOT], ballot_number(20, 0)))
    now = here.rules.clock.begin(40)
    assert here.liveness.take(heartbeat(B, incarnation=2, sequence=7), now)
    assert here.receive(C, declaration(B, incarnation=9, leaving=True, cycle=3), now) == []
    assert B in here.liveness.alive(now)


def test_a_good_bye_is_forgotten_once_its_peer_is_listed_again() -> None:
    """As for a peer that slept while the member was dropped and came back."""
    three = [member(peer, since=1) for peer in (A, C, D)]
    first = child_of(founding().roster, [*three, member(B, incarnation=9, since=1)], cycle=1)
    second = child_of(first, three, cycle=4)
    third = child_of(second, [*three, member(B, incarnation=2, since=10, counts=False)], cycle=10)
    here = membership_of(A, founding(), certify(first, [BOOT], ballot_number(2, 0)))
    assert here.declarations.take(declaration(B, incarnation=9, leaving=True, cycle=3), 3)
    now = here.rules.clock.begin(40)
    rosters = certify(second, [A, C, D], ballot_number(8, 0)), certify(third, [A, C, D], ballot_number(20, 0))
    here.rosters.take(rosters, now)
    here.tick(now)
    assert here.liveness.take(heartbeat(B, incarnation=2), now)
    assert B in here.liveness.alive(now)


def test_the_own_declaration_is_signed_and_describes_the_peer() -> None:
    here = membership_of(A, founding(), roster_1(3), incarnation=3)
    change(here, share=0, can_be_dialled=False)
    word = here.declarations.declare(5 * ROUND_SECONDS)
    assert verify(A, word.statement(), word.signature)
    assert (word.cycle, word.incarnation, word.reachable, word.trains) == (2, 3, False, True)
    assert word.share == 1, "a share of nothing is not declared"
    assert not word.leaving
    assert here.declarations.declare(-99.0).cycle == 0, "before round 0"
    assert here.declarations.newest == {A: here.declarations.declare(-99.0)}


def test_a_declaration_counts_if_it_is_new_signed_and_of_this_run() -> None:
    here = member_of_three(A)
    assert here.declarations.take(declaration(B, cycle=4), 5)
    for old in (
        declaration(B, cycle=4),
        declaration(B, cycle=3),
        declaration(C, run=sha256(b"other")),
        declaration(C, cycle=7),
        replace(declaration(C), signature=NO_SIGNATURE),
        declaration(A, incarnation=9),
    ):
        assert not here.declarations.take(old, 5)
    for newer in (declaration(B, cycle=6), declaration(B, leaving=True), declaration(B, incarnation=2)):
        assert here.declarations.take(newer, 5)
        assert here.declarations.newest[B] == newer


def test_nothing_is_kept_about_peers_that_the_manifest_does_not_list() -> None:
    here = membership_of(A, founding(), roster_1(3), listed=frozenset({B}))
    assert here.declarations.take(declaration(B), 0)
    assert not here.declarations.take(declaration(STRANGER), 0)


def test_declarations_use_bounded_memory_and_strangers_displace_no_member(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MOST_KEPT", 2)
    here = member_of_three(A)
    strangers = [declaration(peer_id(str(n))) for n in range(4)]
    assert [here.declarations.take(word, 0) for word in strangers] == [True, True, False, False]
    assert here.declarations.take(declaration(B), 0)
    assert here.declarations.take(declaration(peer_id("0"), cycle=1), 0)


def test_old_applications_are_dropped_and_declarations_of_members_are_kept() -> None:
    here = member_of_three(A)
    for word in (declaration(STRANGER, cycle=4), declaration(peer_id("new"), cycle=5), declaration(B, cycle=1)):
        assert here.declarations.take(word, 6)
    here.declarations.forget_old(6)
    assert here.declarations.newest.keys() == {STRANGER, peer_id("new"), B}
    here.declarations.forget_old(7)
    assert here.declarations.newest.keys() == {peer_id("new"), B}
    assert not here.declarations.take(declaration(STRANGER, cycle=4), 7), "it has expired"


def test_a_peer_that_declared_its_leaving_is_gone_until_its_next_incarnation() -> None:
    here = member_of_three(A)
    assert not here.declarations.has_left(B, 1)
    here.liveness.take(heartbeat(B), 0.0)
    here.declarations.take(declaration(B), 0)
    assert here.liveness.alive(0.0).keys() == {B}
    here.declarations.take(declaration(B, leaving=True), 0)
    assert here.declarations.has_left(B, 1)
    assert here.liveness.alive(0.0) == {}
    here.liveness.take(heartbeat(B, incarnation=2), 0.0)
    assert here.liveness.alive(0.0).keys() == {B}


ANN, BOB = peer_id("ann"), peer_id("bob")


def test_each_wait_is_twice_as_long_as_the_last_and_at_most_ten_minutes() -> None:
    returns, now, waits = Returns(), 100.0, []
    for _ in range(8):
        returns.dropped(ANN, 1, 25.0, now)
        waits.append(returns.wait_seconds(ANN, 1, now))
        now += waits[-1] + 25.0
    assert waits == [20.0, 40.0, 80.0, 160.0, 320.0, 600.0, 600.0, 600.0]


def test_others_and_restarted_peers_do_not_wait() -> None:
    returns = Returns()
    returns.dropped(ANN, 1, 25.0, 100.0)
    assert returns.wait_seconds(BOB, 1, 100.0) == 0.0
    assert returns.wait_seconds(ANN, 2, 100.0) == 0.0
    assert returns.wait_seconds(ANN, 1, 100.0 + FIRST_WAIT_SECONDS) == 0.0
    returns.dropped(ANN, 2, 25.0, 130.0)
    assert returns.wait_seconds(ANN, 2, 130.0) == FIRST_WAIT_SECONDS


def test_a_member_that_was_listed_for_long_waits_as_short_as_at_first() -> None:
    returns = Returns()
    for now in (0.0, 50.0, 130.0):
        returns.dropped(ANN, 1, 25.0, now)
    returns.dropped(ANN, 1, LONGEST_WAIT_SECONDS, 900.0)
    assert returns.wait_seconds(ANN, 1, 900.0) == FIRST_WAIT_SECONDS


@given(
    st.lists(st.tuples(st.integers(1, 3), st.floats(0.0, 2000.0), st.floats(0.0, 1e5)), max_size=30), st.floats(0, 1e5)
)
def test_no_wait_is_longer_than_the_longest_whatever_the_clock_does(
    drops: list[tuple[int, float, float]], now: float
) -> None:
    returns = Returns()
    for incarnation, listed_seconds, at in drops:
        returns.dropped(ANN, incarnation, listed_seconds, at)
    assert all(0.0 <= returns.wait_seconds(ANN, number, now) <= LONGEST_WAIT_SECONDS for number in (1, 2, 3))
