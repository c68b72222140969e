"""The choice between two lines of rosters: one vote makes no roster, and honest halves agree again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from fake_run import ALL_SPANS, MINUTE, ROUND_SECONDS, ballot_number, peer_id, run_rules, verify
from founded_swarms import founded, goes_on, recovers
from hypothesis import given
from hypothesis import strategies as st
from made import certify, child_of, heartbeat, ids, member, membership_of, roster_1, roster_of, self_of
from made import founding as founding_of
from swarm_driver import Swarm

from p2p_diloco.ids import PeerId, sha256
from p2p_diloco.protocol.actions import KeepActivity, KeepRoster, Report
from p2p_diloco.protocol.engine import PeerEngine, SavedState
from p2p_diloco.protocol.membership.histories import LONGEST_GAP_CYCLES, Activity, is_left_behind, is_sound, strength
from p2p_diloco.protocol.membership.membership import Membership
from p2p_diloco.protocol.membership.proposal import REFRESH_CYCLES
from p2p_diloco.protocol.wire.member import Member
from p2p_diloco.protocol.wire.messages import RosterReply
from p2p_diloco.protocol.wire.roster import CertifiedRoster, Roster

CYCLE_SECONDS = 2 * ROUND_SECONDS
A, B, C, D, E, F, *_ = ids(8)
BOOT = peer_id("boot")

# -- the rule

HOUR, NIGHT, WEEK = 225, 1_800, 37_800
"""Numbers of cycles of sixteen seconds."""
BEGIN = 1_000
PER_CYCLE = len(ALL_SPANS)


def parting_of(*members: Member) -> Roster:
    """The roster at which two lines part, in cycle 1,000."""
    return child_of(founding_of().roster, members, cycle=BEGIN, height=BEGIN * PER_CYCLE)


def line(
    parting: Roster,
    voters: Iterable[PeerId],
    first: int,
    last: int,
    *,
    entries: int = PER_CYCLE,
    degraded: bool = False,
    signers: Iterable[PeerId] = (),
) -> list[CertifiedRoster]:
    """The line that these voters continued: a roster in cycle `first`, one in each 64 cycles, one in cycle `last`.

    Args:
        entries: number of entries made in each of the cycles.
        degraded: whether the first roster had no majority.
        signers: members that signed the first roster too.
    """
    found: list[CertifiedRoster] = []
    parent, voters = parting, list(voters)
    for cycle in dict.fromkeys((*range(first, last, REFRESH_CYCLES), last)):
        height = parting.height + entries * (cycle - first)
        is_first = not found
        roster = child_of(parent, map(member, voters), cycle=cycle, height=height, degraded=degraded and is_first)
        found.append(certify(roster, {*voters, *(signers if is_first else ())}, ballot_number(2 * cycle, 0)))
        parent = roster
    return found


THREE, TWO = parting_of(*map(member, (A, B, C))), parting_of(member(A), member(B))
FOUR = parting_of(*map(member, (A, B, C, D)))
WITH_BOOT = parting_of(member(BOOT, trains=False, counts=False), member(A, counts=False), member(B, counts=False))
MORNING = BEGIN + NIGHT

Scene = tuple[str, Roster, list[CertifiedRoster], list[CertifiedRoster], int]
SCENES: list[Scene] = [
    (
        "a living majority, and one of three that is cut off",
        THREE,
        line(THREE, (B, C), BEGIN + 1, BEGIN + 50),
        line(THREE, (A,), BEGIN + 3, BEGIN + 50, degraded=True),
        BEGIN + 50,
    ),
    (
        "a living majority, and a key of the past that says what it likes",
        THREE,
        line(THREE, (A, B, C), BEGIN + 1, BEGIN + 3 * WEEK, entries=1),
        line(THREE, (A,), BEGIN + 3, BEGIN + 3 * WEEK, entries=10**6, degraded=True),
        BEGIN + 3 * WEEK,
    ),
    (
        "three weeks of the living, and the old disk of a dead provider",
        THREE,
        line(THREE, (A, B, D, E, F), BEGIN + 1, BEGIN + 3 * WEEK),
        line(THREE, (C,), BEGIN + 3 * WEEK - 5, BEGIN + 3 * WEEK, degraded=True),
        BEGIN + 3 * WEEK,
    ),
    (
        "three weeks of one that was left, and the old disks of two who meet",
        THREE,
        line(THREE, (A,), BEGIN + 3, BEGIN + 3 * WEEK, degraded=True),
        line(THREE, (B, C), BEGIN + 3 * WEEK - 5, BEGIN + 3 * WEEK),
        BEGIN + 3 * WEEK,
    ),
    (
        "a week alone, and thirty seconds alone",
        TWO,
        line(TWO, (A,), BEGIN + 3, BEGIN + WEEK, degraded=True),
        line(TWO, (B,), BEGIN + WEEK - 2, BEGIN + WEEK, degraded=True),
        BEGIN + WEEK,
    ),
    (
        "a night alone at N = 3, and two who meet in the morning",
        THREE,
        line(THREE, (A,), BEGIN + 3, MORNING, degraded=True),
        line(THREE, (B, C), MORNING - 3, MORNING),
        MORNING,
    ),
    (
        "a night alone, and two who met in the morning of one that was counted already",
        THREE,
        line(THREE, (A,), BEGIN + 3, MORNING, degraded=True),
        line(THREE, (B, C), MORNING - 3, MORNING, signers=(A,)),
        MORNING,
    ),
    (
        "half of four that made entries, and half that made fewer",
        FOUR,
        line(FOUR, (A, C), BEGIN + 3, BEGIN + 200, degraded=True),
        line(FOUR, (B, D), BEGIN + 3, BEGIN + 200, entries=4, degraded=True),
        BEGIN + 200,
    ),
    (
        "three of four without a majority since, and one",
        FOUR,
        line(FOUR, (B, C, D), BEGIN + 3, BEGIN + 200, entries=2, degraded=True),
        line(FOUR, (A,), BEGIN + 3, BEGIN + 200, degraded=True),
        BEGIN + 200,
    ),
    (
        "members alone with entries, and a bootstrap alone without any",
        WITH_BOOT,
        line(WITH_BOOT, (A, B), BEGIN + 3, BEGIN + 50, degraded=True),
        line(WITH_BOOT, (BOOT,), BEGIN + 1, BEGIN + 50, entries=0),
        BEGIN + 50,
    ),
    (
        "somebody who went on, and somebody who did not",
        TWO,
        line(TWO, (A,), BEGIN + 3, BEGIN + 4, degraded=True),
        [],
        BEGIN + 50,
    ),
]


@pytest.mark.parametrize(
    ("parting", "better", "worse", "cycle"), [scene[1:] for scene in SCENES], ids=[scene[0] for scene in SCENES]
)
def test_the_first_of_two_lines_is_better(
    parting: Roster, better: list[CertifiedRoster], worse: list[CertifiedRoster], cycle: int
) -> None:
    assert strength(parting, better, cycle) > strength(parting, worse, cycle)


DAY = 24 * HOUR


def lines_of_a_day(every: int) -> tuple[list[CertifiedRoster], list[CertifiedRoster]]:
    """The line of three that continued for a day, and a forged child of the founding roster by its only voter.

    Args:
        every: cycles from one forged roster to the next; each claims the largest possible number of entries.
    """
    start = founding_of()
    first = child_of(start.roster, [*start.roster.members, *(member(peer, counts=False) for peer in (A, B, C))])
    ours, parent = [certify(first, [BOOT])], first
    for cycle in range(8, DAY, REFRESH_CYCLES):
        parent = child_of(parent, map(member, (A, B, C)), cycle=cycle, height=cycle * PER_CYCLE)
        ours.append(certify(parent, [BOOT, A, B, C] if cycle == 8 else [A, B, C], ballot_number(2 * cycle, 0)))
    forged, parent = [], start.roster
    for cycle in range(1, DAY, every):
        height = parent.height + PER_CYCLE * (cycle - parent.cycle + 2)
        parent = child_of(parent, start.roster.members, cycle=cycle, height=height)
        forged.append(certify(parent, [BOOT], ballot_number(2 * cycle, 0)))
    return [start, *ours], forged


def hears_of_a_forged_line(every: int) -> tuple[Membership, list[CertifiedRoster]]:
    """One of the three, and the forged line; it knows all of that but the last roster."""
    ours, forged = lines_of_a_day(every)
    here = membership_of(A, *ours)
    for certified in forged[:-1]:
        here.book.add(certified, wins=False)
    return here, forged


@pytest.mark.parametrize("every", [1, REFRESH_CYCLES])
def test_no_past_voters_key_displaces_a_living_majority(every: int) -> None:
    """The holder of the only voting key can later certify a line without gaps that claims anything."""
    here, forged = hears_of_a_forged_line(every)
    for cycle in range(DAY):
        here.entry_absorbed(2 * cycle)
    assert here.rosters.history.is_better(forged[-1], DAY) is False


@pytest.mark.parametrize(("last", "is_kept"), [(DAY, True), (DAY - 9, False)])
def test_a_restarted_member_still_knows_that_its_line_continued(last: int, is_kept: bool) -> None:
    before, _ = hears_of_a_forged_line(1)
    for cycle in range(last + 1):
        before.entry_absorbed(2 * cycle)
    kept = before.rosters.keep_activity()
    assert [type(action) for action in kept] == [KeepActivity]
    assert before.rosters.keep_activity() == []

    here, forged = hears_of_a_forged_line(1)
    assert isinstance(kept[0], KeepActivity)
    here.rosters.history.recall(kept[0].activity)
    assert here.rosters.history.is_better(forged[-1], DAY) is not is_kept


def test_a_forged_line_that_a_member_refused_is_not_in_force_after_its_restart() -> None:
    """It was on its disk, where nothing says why it was refused."""
    ours, forged = lines_of_a_day(REFRESH_CYCLES)
    here, disk = membership_of(A, *ours), list(ours)
    for cycle in range(DAY):
        here.entry_absorbed(2 * cycle)
    (kept,) = here.rosters.keep_activity()
    assert isinstance(kept, KeepActivity)
    for certified in forged:
        actions = here.rosters.take((certified,), DAY * CYCLE_SECONDS)
        disk += [action.certified for action in actions if isinstance(action, KeepRoster) and action.is_in_force]
    assert here.book.in_force == ours[-1].roster
    saved = SavedState(rosters=tuple(disk), activity=kept.activity)
    started = PeerEngine(me=self_of(A), rules=run_rules(), verify=verify, recalled=saved)
    assert started.book.in_force == ours[-1].roster


@pytest.mark.parametrize(("cycle", "is_left"), [(5, False), (DAY, True)])
def test_a_line_that_goes_on_is_not_left_for_a_degraded_one_unless_it_ends_with_a_roster_of_tomorrow(
    cycle: int, is_left: bool
) -> None:
    """Its voter had just started, and heard one clock, which was a day ahead."""
    parting = roster_1(3)
    ours = certify(child_of(parting.roster, parting.roster.members, cycle=cycle), [A, B], ballot_number(2 * cycle, 0))
    theirs = child_of(parting.roster, parting.roster.members[1:], cycle=6, height=9, degraded=True)
    here = membership_of(A, founding_of(), parting, ours)
    here.entry_absorbed(2 * 5)
    assert here.rosters.history.is_better(certify(theirs, [B, C], ballot_number(12, 0)), 7) is is_left


FEW = member(E, counts=False)
"""A member that was listed once and never counted."""


@pytest.mark.parametrize(
    ("signers", "is_left"),
    [
        ((E,), False),  # it never counted
        ((E, F), False),  # nor did two
        ((C, D), True),  # half of the electorate, which claims more entries
    ],
)
def test_a_line_without_a_majority_is_not_left_for_one_that_nobody_signed_whose_vote_counted(
    signers: tuple[PeerId, ...], is_left: bool
) -> None:
    """A peer that was listed once can sign a child of the previous roster alone, and claim as many entries as fit."""
    fresh = [member(peer, counts=False) for peer in (E, F)]
    parting = certify(child_of(founding_of().roster, [*map(member, (A, B, C, D)), *fresh]), [BOOT])
    degraded = child_of(parting.roster, map(member, (A, B)), cycle=5, degraded=True, height=PER_CYCLE)
    ours = certify(degraded, [A, B], ballot_number(2 * 5, 0))
    here = membership_of(A, founding_of(), parting, ours)
    listed = [each for each in parting.roster.members if each.peer in signers]
    theirs = child_of(parting.roster, listed, cycle=12, height=PER_CYCLE * 14, degraded=True)
    here.rosters.take((certify(theirs, signers, ballot_number(2 * 12, 0)),), 12 * CYCLE_SECONDS)
    assert (here.book.in_force == theirs) is is_left


def stalled(*linked: PeerId, heard: float = 0.0, restarted: bool = False, remembers: bool = True) -> Membership:
    """A of three members that vote, beside E that does not; A has had no entries for twelve cycles.

    Args:
        linked: members to which A has links.
        heard: loop time since which it has heard them.
        restarted: whether A and they have later incarnations than those listed.
        remembers: whether A knows its earlier votes.
    """
    parting = certify(child_of(founding_of().roster, [*map(member, (A, B, C)), FEW]), [BOOT])
    now = 1 + restarted
    here = membership_of(A, founding_of(), parting, linked=frozenset(linked), incarnation=now, remembers=remembers)
    here.local.set_ready(True)
    here.stall.cycles_without_entries = 12  # beyond `PATIENT_STALLS`, so any member may continue
    for second in range(int(heard), int(STALL_ENDS) + 1):
        for peer in linked:
            beat = heartbeat(peer, sequence=second + 1, roster=parting.roster.digest(), incarnation=now)
            here.liveness.take(beat, float(second))
    return here


STALL_ENDS = 20 * CYCLE_SECONDS


@pytest.mark.parametrize(
    ("others", "signer", "listed", "heard", "is_taken"),
    [
        ((B, C, E), B, (A, B), 0.0, True),
        ((B, C, E), B, (B,), 0.0, False),  # it was linked all the time, and leaves A out
        ((B, C, E), B, (B,), STALL_ENDS - CYCLE_SECONDS, False),  # C waits here, too
        ((B, E), B, (B,), 0.0, False),
        ((B, E), B, (B,), STALL_ENDS - CYCLE_SECONDS, True),  # it, or A, was away
        ((B, C, E), E, (A, E), 0.0, False),  # it does not vote, and others that do are here
    ],
)
def test_in_a_stall_no_single_member_leaves_out_those_that_are_there(
    others: tuple[PeerId, ...], signer: PeerId, listed: tuple[PeerId, ...], heard: float, is_taken: bool
) -> None:
    here = stalled(*others, heard=heard)
    assert here.book.in_force is not None
    cycle = int(STALL_ENDS // CYCLE_SECONDS)
    members = [each for each in here.book.in_force.members if each.peer in listed]
    child = child_of(here.book.in_force, members, cycle=cycle, degraded=True)
    actions = here.rosters.take((certify(child, [signer], ballot_number(2 * cycle, 0)),), STALL_ENDS)
    assert (here.book.in_force == child) is is_taken, actions


@pytest.mark.parametrize(("remembers", "stall", "is_taken"), [(False, 12, True), (False, 3, False), (True, 12, False)])
def test_in_a_long_stall_voters_that_lost_their_votes_take_what_another_member_signed(
    remembers: bool, stall: int, is_taken: bool
) -> None:
    """They cannot sign anything before they are listed anew, so nobody else could end the stall."""
    here = stalled(B, C, E, restarted=True, remembers=remembers)
    here.stall.cycles_without_entries = stall
    assert here.book.in_force is not None
    cycle = int(STALL_ENDS // CYCLE_SECONDS)
    child = child_of(here.book.in_force, here.book.in_force.members, cycle=cycle, degraded=True)
    here.rosters.take((certify(child, [E], ballot_number(2 * cycle, 0)),), STALL_ENDS)
    assert (here.book.in_force == child) is is_taken


def test_in_a_stall_peers_without_the_state_take_what_the_others_signed() -> None:
    """Several of them would wait for each other for ever."""
    here = stalled(B, C, heard=0.0)
    here.local.set_ready(False)
    assert here.book.in_force is not None
    cycle = int(STALL_ENDS // CYCLE_SECONDS)
    child = child_of(here.book.in_force, [member(B)], cycle=cycle, degraded=True)
    here.rosters.take((certify(child, [B], ballot_number(2 * cycle, 0)),), STALL_ENDS)
    assert here.book.in_force == child


def test_observations_of_a_line_given_up_since_do_not_count() -> None:
    here, forged = hears_of_a_forged_line(1)
    here.rosters.history.recall(Activity(roster=forged[3].roster.digest(), first=0, last=DAY))
    assert here.rosters.history.is_better(forged[-1], DAY) is True


@pytest.mark.parametrize(
    ("cycles", "now", "expected"),
    [
        ([1, 2, 3], 4, True),
        ([], 1, False),
        ([1, 2, 3], 3 + LONGEST_GAP_CYCLES, True),
        ([1, 2, 3], 4 + LONGEST_GAP_CYCLES, False),  # it ended, as far as is known
        ([LONGEST_GAP_CYCLES], 80, True),
        ([LONGEST_GAP_CYCLES + 1], 80, False),  # another peer's night
        ([1, 2 + LONGEST_GAP_CYCLES, 80], 80, False),
        ([1, 60, 120, 180], 200, True),
    ],
)
def test_a_line_is_sound_if_a_majority_continued_it_without_a_long_gap(
    cycles: list[int], now: int, expected: bool
) -> None:
    rosters = [certify(child_of(THREE, THREE.members, cycle=BEGIN + n, height=THREE.height + n), [B]) for n in cycles]
    assert is_sound(THREE, rosters, BEGIN + now) is expected


def test_a_line_is_sound_only_if_all_its_rosters_have_a_majority_and_it_made_entries() -> None:
    assert is_sound(THREE, line(THREE, (B, C), BEGIN + 1, BEGIN + 9), BEGIN + 9)
    assert not is_sound(THREE, line(THREE, (B, C), BEGIN + 1, BEGIN + 9, degraded=True), BEGIN + 9)
    assert not is_sound(THREE, line(THREE, (B, C), BEGIN + 1, BEGIN + 9, entries=0), BEGIN + 9)


def test_signers_that_were_not_members_at_the_parting_do_not_count() -> None:
    alone = line(THREE, (A,), BEGIN + 3, BEGIN + 90, degraded=True)
    crowd = line(THREE, (A, *(peer_id(f"new {n}") for n in range(20))), BEGIN + 3, BEGIN + 90, degraded=True)
    assert strength(THREE, alone, BEGIN + 90)[:3] == strength(THREE, crowd, BEGIN + 90)[:3]


def test_the_smaller_digest_wins_if_all_else_is_equal() -> None:
    lines = [line(TWO, (peer,), BEGIN + 3, BEGIN + 9, degraded=True) for peer in (A, B)]
    better = max(lines, key=lambda each: strength(TWO, each, BEGIN + 9))
    assert better[0].roster.digest() == min(each[0].roster.digest() for each in lines)


SIDES = st.tuples(
    st.sets(st.sampled_from([A, B, C, D]), min_size=1),
    st.integers(1, 20),
    st.integers(0, 200),
    st.integers(0, PER_CYCLE),
    st.booleans(),
)


@given(SIDES, SIDES, st.integers(0, 100))
def test_both_sides_prefer_the_same_line(
    one: tuple[set[PeerId], int, int, int, bool], other: tuple[set[PeerId], int, int, int, bool], later: int
) -> None:
    lines = [
        line(FOUR, voters, BEGIN + first, BEGIN + first + length, entries=entries, degraded=degraded)
        for voters, first, length, entries, degraded in (one, other)
    ]
    now = lines[0][-1].roster.cycle + lines[1][-1].roster.cycle - BEGIN + later
    ours, theirs = (strength(FOUR, each, now) for each in lines)
    if lines[0][0].roster == lines[1][0].roster:
        return  # no two lines: they part later
    assert (ours > theirs) is not (theirs > ours)


def test_heartbeats_show_that_most_members_have_continued_without_a_peer() -> None:
    book = membership_of(A, founding_of(), roster_1(4)).book
    mine = roster_1(4).roster
    here = [heartbeat(peer, roster=mine.digest()) for peer in (B, C)]
    gone = [heartbeat(peer, roster=sha256(b"elsewhere")) for peer in (D, A, peer_id("stranger"))]
    assert is_left_behind(mine, [], book)
    assert is_left_behind(mine, gone, book)
    assert not is_left_behind(mine, [*here, gone[0], gone[2]], book), "one of three members, and strangers say nothing"
    assert not is_left_behind(mine, here, book)
    assert is_left_behind(mine, [*here, *gone, heartbeat(E, roster=sha256(b"x"))], book) is False, "half is not most"


# -- one peer that learns of two lines


def after(parent: Roster, voters: Sequence[PeerId], cycle: int, **changes: object) -> CertifiedRoster:
    members = [m for m in parent.members if m.peer in voters]
    return certify(child_of(parent, members, cycle=cycle, **changes), voters, ballot_number(2 * cycle, 0))


def test_a_degraded_child_that_most_members_follow_is_followed_after_two_checks() -> None:
    parent = roster_of(5)
    child = after(parent, (B, C), 10, degraded=True)
    for num_gone, wins in ((2, False), (3, True)):
        here = membership_of(A, founding_of(), roster_1(5))
        for peer in (B, C, D, E)[:num_gone]:
            here.liveness.take(heartbeat(peer, roster=child.roster.digest()), 400.0)
        for peer in (B, C, D, E)[num_gone:]:
            here.liveness.take(heartbeat(peer, roster=parent.digest()), 400.0)
        (report,) = here.rosters.take((child,), 400.0)
        assert isinstance(report, Report)
        assert report.topic == "roster-refused"
        assert here.book.in_force == parent
        here.rosters.take((child,), 408.0)
        assert here.book.in_force == parent, "one of those that it hears goes by the parent: it takes its time"
        stall = here.rules.stalled_cycles * here.rules.cycle_seconds
        for sequence, peer in enumerate((B, C, D, E), 2):
            roster = child.roster if peer in (B, C, D, E)[:num_gone] else parent
            here.liveness.take(heartbeat(peer, roster=roster.digest(), sequence=sequence), 400.0 + stall)
        here.rosters.take((child,), 400.0 + stall)
        assert (here.book.in_force == child.roster) is wins


@pytest.mark.parametrize("num_members", [5, 4], ids=["a member", "who follows and is no member"])
def test_a_peer_that_has_seen_a_stall_follows_a_degraded_child_at_once(num_members: int) -> None:
    """Two members that cannot reach each other may share only such a peer as a link, which forwards rosters to them."""
    me = ids(5)[4]
    parent = roster_1(num_members)
    child = after(parent.roster, (B, C), 10, degraded=True)
    here = membership_of(me, founding_of(), parent)
    here.local.set_ready(True)
    here.stall.cycles_without_entries = here.rules.stalled_cycles - 1
    here.rosters.take((child,), 400.0)
    assert here.book.in_force == parent.roster
    here.stall.cycles_without_entries = here.rules.stalled_cycles
    here.rosters.take((child,), 400.0)
    assert here.book.in_force == child.roster


def test_a_degraded_child_is_refused_while_most_voters_sign_that_they_follow_its_parent() -> None:
    """Two of three links are liars: the third forwards what unlinked voters have signed."""
    parent = roster_of(5)
    child = after(parent, (B, C), 10, degraded=True)
    here = membership_of(ids(6)[5], founding_of(), roster_1(5))
    for now in (400.0, 400.0 + 10 * here.rules.stalled_cycles * here.rules.cycle_seconds):
        for peer in (B, C):
            here.liveness.take(heartbeat(peer, roster=child.roster.digest(), sequence=int(now)), now)
        here.liveness.take(heartbeat(A, roster=parent.digest(), sequence=int(now)), now)
        here.rosters.note_signed_rosters({peer: (parent.digest(), now) for peer in (D, E)})
        here.rosters.take((child,), now)
        assert here.rosters.doubts
        assert here.book.in_force == parent
    here.rosters.note_signed_rosters({peer: (parent.digest(), 400.0) for peer in (D, E)})
    here.rosters.take((child,), now)
    assert here.book.in_force == child.roster, "that is long ago"


@pytest.mark.parametrize("is_signed", [False, True], ids=["heartbeats", "signed answers"])
@pytest.mark.parametrize(
    ("num_counting", "gone", "wins"),
    [(0, (BOOT,), True), (0, (B, C), False), (3, (B, C), True), (3, (B,), False), (4, (B, C), False)],
)
def test_a_degraded_child_that_most_voters_follow_is_followed_even_if_others_wait(
    num_counting: int, gone: Sequence[PeerId], *, is_signed: bool, wins: bool
) -> None:
    """Wiped members all followed the same old roster, and were half of all peers that each of them heard."""
    members = [member(peer, counts=n < num_counting) for n, peer in enumerate((B, C, D, A, E, F))]
    first = child_of(founding_of().roster, [member(BOOT, counts=False, trains=False), *members])
    child = after(first, gone, 10, degraded=True)
    here = membership_of(A, founding_of(), certify(first, [BOOT]))
    stall = here.rules.stalled_cycles * here.rules.cycle_seconds
    for now in (400.0, 400.0 + stall):
        for peer in (E, F, *(() if is_signed else gone)):
            roster = (child.roster if peer in gone else first).digest()
            here.liveness.take(heartbeat(peer, roster=roster, sequence=int(now), ready=peer in gone), now)
        here.rosters.note_signed_rosters({peer: (child.roster.digest(), now) for peer in gone} if is_signed else {})
        assert here.book.in_force == first
        here.rosters.take((child,), now)
    assert (here.book.in_force == child.roster) is wins


def test_voters_without_a_roster_have_not_continued() -> None:
    parent = roster_of(5)
    child = after(parent, (B,), 10, degraded=True)
    here = membership_of(A, founding_of(), roster_1(5))
    for now in (400.0, 460.0):
        here.liveness.take(heartbeat(B, roster=child.roster.digest(), sequence=int(now)), now)
        here.liveness.take(heartbeat(C, roster=parent.digest(), sequence=int(now)), now)
        for peer in (D, E):
            here.liveness.take(heartbeat(peer, sequence=int(now), ready=False), now)
        here.rosters.take((child,), now)
    assert here.book.in_force == parent


def test_a_degraded_child_that_all_heard_peers_follow_is_followed_soon() -> None:
    here = membership_of(A, founding_of(), roster_1(5))
    child = after(roster_of(5), (B, C), 10, degraded=True)
    for peer in (B, C):
        here.liveness.take(heartbeat(peer, roster=child.roster.digest()), 400.0)
    here.rosters.take((child,), 400.0)
    assert here.book.in_force == roster_of(5)
    here.rosters.take((child,), 408.0)
    assert here.book.in_force == child.roster


def test_a_degraded_child_is_not_followed_while_entries_arrive() -> None:
    here = membership_of(A, founding_of(), roster_1(5))
    child = after(roster_of(5), (B, C), 10, degraded=True)
    here.presence.note_entry({B}, (), 49)
    for now in (400.0, 408.0, 416.0):
        here.rosters.take((child,), now)
    assert here.book.in_force == roster_of(5)


@pytest.mark.parametrize(
    ("voters", "cycles_without_entries", "is_followed"), [((B, C), 3, True), ((B,), 3, False), ((B,), 12, True)]
)
def test_a_stalled_peer_follows_a_degraded_child_of_a_quarter_and_later_of_any_member(
    voters: tuple[PeerId, ...], cycles_without_entries: int, is_followed: bool
) -> None:
    here = membership_of(A, founding_of(), roster_1(5))
    here.stall.cycles_without_entries = cycles_without_entries
    child = after(roster_of(5), voters, 10, degraded=True)
    here.rosters.take((child,), 320.0)
    assert (here.book.in_force == child.roster) is is_followed


def test_a_peer_with_entries_on_its_line_does_not_leave_it_for_a_later_degraded_one() -> None:
    parent = roster_of(3)
    mine = after(parent, (A, B), 1)
    other = after(parent, (C,), 5, degraded=True, height=10)
    for absorbed, stays in (((4, 18), True), ((12, 18), False), ((4,), False), ((), False)):
        here = membership_of(A, founding_of(), roster_1(3), mine)
        for round_index in absorbed:
            here.entry_absorbed(round_index)
        actions = here.rosters.take((other,), 2 * 11 * ROUND_SECONDS)
        assert (here.book.in_force == mine.roster) is stays
        assert any(isinstance(action, Report) and action.topic == "branch" for action in actions) is not stays


def test_a_certificate_from_the_far_future_is_refused_by_a_member() -> None:
    here = membership_of(A, founding_of(), roster_1(1))
    far = certify(child_of(roster_1(1).roster, [member(A)]), [A], ballot=1 << 60)
    (report,) = here.rosters.take((far,), 20.0)
    assert isinstance(report, Report)
    assert "rounds from now" in report.text


# -- whole swarms


def num_degraded(swarm: Swarm, names: Iterable[str]) -> set[int]:
    """The number of rosters of their chains without a majority."""
    return {swarm.machines[name].rules_engine.book.num_degraded() for name in names}


def self_voted(swarm: Swarm, parent: Roster, voter: str) -> CertifiedRoster:
    """Return a degraded child of `parent` that only one member has certified, as plausible as possible."""
    current = swarm.rules.clock.round_at(swarm.now)
    cycle = max(swarm.rules.clock.cycle(current), parent.cycle + swarm.rules.stalled_cycles)
    height = parent.height + len(ALL_SPANS) * (cycle - parent.cycle + 2)
    listed = parent.member(peer_id(voter))
    assert listed is not None
    child = child_of(parent, [listed], degraded=True, cycle=cycle, height=height)
    return certify(child, [peer_id(voter)], ballot=ballot_number(max(current, 2 * cycle), 3))


def tell(swarm: Swarm, names: Iterable[str], lies: Sequence[CertifiedRoster], liar: str) -> None:
    for name in names:
        machine = swarm.machines[name]
        word = RosterReply(rosters=tuple(lies))
        swarm.perform(machine, machine.rules_engine.receive(peer_id(liar), word, swarm.now))


def insist(swarm: Swarm, names: list[str], lies: Sequence[CertifiedRoster], liar: str, seconds: float = MINUTE) -> None:
    """Send rosters to some peers again and again, as a peer does that is heard at each heartbeat."""
    for _ in range(int(seconds)):
        tell(swarm, names, lies, liar)
        swarm.run(1.0)


HONEST = ["p0", "p1", "p2"]


def test_a_degraded_roster_certified_by_one_member_is_not_in_force_while_entries_are_made() -> None:
    swarm = founded(4)
    swarm.run(4 * CYCLE_SECONDS)
    lie = self_voted(swarm, swarm.machines["p0"].roster, "p3")
    insist(swarm, HONEST, [lie], "p3")
    goes_on(swarm)
    assert num_degraded(swarm, HONEST) == {0}
    assert "roster-refused" in swarm.machines["p0"].topics()


def test_a_degraded_roster_certified_by_a_former_member_is_not_in_force() -> None:
    swarm = founded(4)
    with_p3 = swarm.machines["p0"].roster
    assert with_p3.member(peer_id("p3")) is not None
    swarm.kill("p3")
    swarm.run_until(swarm.all_members, MINUTE)
    goes_on(swarm)
    insist(swarm, HONEST, [self_voted(swarm, with_p3, "p3")], "p3")
    goes_on(swarm)
    assert num_degraded(swarm, HONEST) == {0}
    assert all("branch" not in swarm.machines[name].topics() for name in HONEST)


@pytest.mark.parametrize("k", [1, 2])
def test_a_degraded_child_of_an_old_roster_is_not_in_force(k: int) -> None:
    swarm = founded(4)
    swarm.run(2 * MINUTE)
    old = swarm.machines["p0"].rules_engine.book.chain()[k].roster
    lie = self_voted(swarm, old, swarm.by_id[old.members[0].peer].name)
    insist(swarm, HONEST, [lie], "p3")
    goes_on(swarm)
    assert num_degraded(swarm, HONEST) == {0}
    assert all("branch" not in swarm.machines[name].topics() for name in HONEST)


def test_one_liar_among_four_restarted_members_misleads_no_other() -> None:
    swarm = founded(4)
    swarm.run(2 * MINUTE)
    for name in swarm.machines:
        swarm.kill(name)
    swarm.run(10 * MINUTE)
    lie = self_voted(swarm, swarm.machines["p3"].disk.rosters[-1].roster, "p3")
    for name in HONEST:
        swarm.start(name)
        tell(swarm, [name], [lie], "p3")
    insist(swarm, HONEST, [lie], "p3")
    swarm.run_until(lambda: swarm.agreed(HONEST), MINUTE)
    goes_on(swarm)
    assert num_degraded(swarm, HONEST) == {0}


def test_a_joiner_that_hears_a_liar_first_ends_on_the_others_roster() -> None:
    swarm = founded(4)
    swarm.run(MINUTE)
    swarm.add("p4")
    tell(swarm, ["p4"], swarm.machines["p1"].rules_engine.book.chain()[:-1], "p3")
    lie = self_voted(swarm, swarm.machines["p4"].roster, swarm.by_id[swarm.machines["p4"].roster.members[0].peer].name)
    insist(swarm, ["p4"], [lie], "p3", 30.0)
    recovers(swarm, 4 * MINUTE)
    assert num_degraded(swarm, ["p4"]) == {0}


def test_a_line_that_makes_entries_after_its_last_change_takes_back_a_cut_off_member() -> None:
    """The only voter drops its only reducer, and then makes entries alone: nothing else would change its roster."""
    swarm = founded(1, "none")
    swarm.run(10 * CYCLE_SECONDS)
    swarm.kill("boot")
    swarm.run_until(lambda: swarm.members("p0") == {"p0"}, 2 * MINUTE)
    swarm.add("p1")
    listing = swarm.machines["p1"].rules_engine.book
    swarm.run_until(lambda: listing.in_force is not None and swarm.members("p1") == {"p0", "p1"}, 3 * MINUTE, 0.05)
    (before,) = num_degraded(swarm, ["p0"])
    swarm.partition(["p0"], ["p1"])
    swarm.pause("p0")  # it is late for the round that goes on, so that no entry comes before p1 is dropped
    swarm.run(ROUND_SECONDS)
    swarm.resume("p0")
    swarm.run_until(lambda: swarm.members("p0") == {"p0"}, 3 * MINUTE)
    with_both, alone = swarm.machines["p0"].rules_engine.book.chain()[-2:]
    assert alone.roster.height == with_both.roster.height
    swarm.run_until(lambda: swarm.members("p1") == {"p1"}, 3 * MINUTE)
    assert num_degraded(swarm, ["p1"]) == {before + 1}
    goes_on(swarm, "p1")
    swarm.heal()
    recovers(swarm, 4 * MINUTE)
    assert num_degraded(swarm, ["p0", "p1"]) == {before}, "the line that a majority certified is gone by"


def test_one_of_two_that_slept_through_it_follows_the_other() -> None:
    swarm = founded(2, bootstrap=False)
    swarm.run(8 * CYCLE_SECONDS)
    swarm.pause("p0")
    swarm.break_links()
    swarm.run_until(lambda: swarm.members("p1") == {"p1"}, 3 * MINUTE)
    goes_on(swarm, "p1")
    swarm.resume("p0")
    swarm.run_until(swarm.all_members, 8 * CYCLE_SECONDS)
    assert num_degraded(swarm, ["p0", "p1"]) == {1}


@pytest.mark.parametrize("armed", ["by nobody", "by a stranger", "by a voter", "by a voter, then entries"])
def test_a_degraded_child_seen_long_ago_does_not_shorten_the_wait(armed: str) -> None:
    """A peer that wakes up checks twice; what it saw before it slept must not count as the first time."""
    parent = roster_of(5)
    here = membership_of(A, founding_of(), roster_1(5))
    here.tick(399.0)
    if armed != "by nobody":
        votes = () if armed == "by a stranger" else (B,)
        here.rosters.take((certify(child_of(parent, [member(B)], cycle=1, degraded=True), votes),), 400.0)
    if armed.endswith("entries"):
        here.entry_absorbed(4999)
    here.presence.note_entry((B, C, D, E), (), 4999)
    now = ROUND_SECONDS * 5010
    late = after(parent, (B,), 2500, degraded=True)
    if not armed.endswith("entries"):
        here.tick(now)
    here.liveness.take(heartbeat(B, roster=late.roster.digest()), now)
    here.rosters.take((late,), now)
    assert here.book.in_force == parent
