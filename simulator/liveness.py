"""Liveness checks: what must become true once the troubles have stopped.

Once troubles have stopped, every message arrives within a tenth of a second, wall clocks are right to within 5 % of a
round, all disks have room, no process is stopped, and every machine runs unless it is dead for good. At least one
machine can be dialled: if all peers are at home and there is no bootstrap peer, they cannot meet.

I6  Two whole cycles after troubles have stopped, all ready peers hold the same heads of all spans at the end of each
    cycle, if they were ready throughout that cycle and the round before it.
    - The cycle in which troubles stop does not count, nor does the time that peers need to reconnect: `SETTLE_SECONDS`,
      plus `REDIAL_SECONDS` for peers that have to find each other again. If messages were lost, the last lost request
      is repeated within `ASKED_AGAIN_SECONDS`.
    - If the peers that are dead for good were the majority, troubles stop for the others when the roster no longer
      names the dead. Until then, rows whose reducers are dead get entries a round late.
    - Cycles are counted in swarm time, which clocks may have moved.
    - A degraded roster that appears after troubles have stopped has its own time: the other peers follow it once they
      have been through a stall themselves.
    - Clocks that differ get the time in which they are slewed.
I8  At the same moments the rosters in force at ready peers are on one chain. No fork, of one line or of several,
    outlasts that time once both sides can reach each other. Peers whose disks were restored from a backup may vote
    twice and so start two lines; these get the time of a degraded roster.
I1  A peer whose memory failed holds the true bytes again within two scrub periods and two cycles, if it can ask two
    peers that hold them and no peer has fetched the wrong bytes from it meanwhile: correcting one peer takes two
    witnesses.
I7  Every peer that runs and trains becomes ready, once no memory differs: witnesses that disagree confirm nothing. From
    then on it is in at least half of the entries under rosters that list it, from two cycles after each roster: its
    members may not be linked yet. A degraded roster, and each one after it, counts for a peer from two cycles after
    that peer followed the degraded one, which takes a long stall of its own at most: not all stalls end in one cycle.
The run continues: entries are made for every fragment. This is possible as long as enough members of the roster in
force run and remember their votes, and one of them holds the state. If they are not a majority, it takes the stalled
cycles that their share requires. Nothing is promised if the only voter received one other clock, a liar's, and dated a
roster hours ahead: no other roster can follow before that time. A peer whose clock is right refuses that roster, so I6
is required only among peers that follow the same one.
I9  No table of an engine is larger than the size of the swarm explains.
"""

from __future__ import annotations

from p2p_diloco.ids import Digest
from p2p_diloco.protocol.membership.reach import UNSEEN_SECONDS
from p2p_diloco.protocol.membership.stall import PATIENT_STALLS
from p2p_diloco.protocol.wire.entry import places_in
from p2p_diloco.protocol.wire.roster import Roster, is_majority, is_quarter
from simulator.inspector import Violated
from simulator.machine import Machine
from simulator.simulation import Simulation

SETTLE_SECONDS = 12.0
ASKED_AGAIN_SECONDS = 60.0
"""Time within which a lost request is repeated. A donor that sends other messages may take this long for a piece of a
span, and a lost request looks the same."""
REDIAL_SECONDS = 75.0
"""Maximum time until the next dial to a peer that could not be dialled for long."""
KNOWN_AFTER_SECONDS = UNSEEN_SECONDS + 12.0
"""Time after which a member of another network is known as such, and a roster follows from that."""
FEWEST_ENTRIES = 4
CYCLES_TO_GO_ON = 6
"""Cycles for the ballots and the repairs that a fault leads to."""


def ready_peers(swarm: Simulation) -> list[Machine]:
    """Return the honest machines that train and hold the agreed state."""
    return [machine for machine in swarm.honest() if machine.running.ready]


def check_agreement(swarm: Simulation) -> None:
    """Check I6 and the end of forks (I8), at the end of a cycle.

    Raises:
        Violated: two ready peers differ.
    """
    settled_seconds = swarm.rules.clock.round_seconds * (swarm.rules.clock.num_fragments + 1)
    now = swarm.loop.true_seconds()
    # A peer that has just become ready may lack an entry whose owner did not know it was; it compares after a round.
    ready = [machine for machine in ready_peers(swarm) if now - machine.ready_at > settled_seconds]
    if swarm.network.lans:
        ready = [machine for machine in ready if not _hears_late(swarm, machine)]
    is_dated_ahead = _is_dated_ahead(swarm, leading_roster(swarm))
    for machine in ready[1:]:
        first = ready[0].running
        swarm.inspector.checks += 1
        is_excused = is_dated_ahead and machine.running.book.in_force_digest != first.book.in_force_digest
        swarm.inspector.skipped += is_excused
        for span in () if is_excused else swarm.spans:
            mine, theirs = machine.running.chains.heads.get(span), first.chains.heads.get(span)
            if mine is None or theirs is None or mine.digest != theirs.digest:
                heights = f"{mine.height if mine else None} and {theirs.height if theirs else None}"
                text = f"{machine} and {ready[0]} are ready and differ at {span}, heights {heights}"
                raise Violated("I6", text, machine.name)
        mine_k, theirs_k = machine.running.book.in_force_digest, first.book.in_force_digest
        if mine_k is None or theirs_k is None:
            raise Violated("I8", f"{machine} or {ready[0]} is ready and knows no roster", machine.name)
        if not (machine.running.book.is_on_chain(theirs_k) or first.book.is_on_chain(mine_k)):
            raise Violated("I8", f"{machine} and {ready[0]} follow rosters of different branches", machine.name)


def _hears_late(swarm: Simulation, machine: Machine) -> bool:
    """Return whether reducers of a home network may not know yet whether a machine is there too, or is a member at all.

    Until then it gets what they averaged from others, and later.
    """
    roster, clock = leading_roster(swarm), swarm.rules.clock
    member = roster.member(machine.peer) if roster is not None else None
    return member is None or (
        swarm.loop.true_seconds() - clock.begin(member.since * clock.num_fragments) < KNOWN_AFTER_SECONDS
    )


def newest_degraded(swarm: Simulation) -> int:
    """Return the cycle of the newest degraded roster that any machine follows; -1 if there is none."""
    found = -1
    for machine in swarm.running(trains=False):
        book, digest = machine.running.book, machine.running.book.in_force_digest
        while digest is not None and digest in book and book.roster(digest).cycle > found:
            roster = book.roster(digest)
            if roster.degraded:
                found = roster.cycle
            digest = roster.parent
    return found


def is_one_line(swarm: Simulation) -> bool:
    """Return whether all ready peers follow one line of rosters.

    A peer that has not followed a degraded roster is not on the line.
    """
    books = [machine.running.book for machine in ready_peers(swarm) if machine.running.book.in_force is not None]
    if not books:
        return True
    longest = max(books, key=lambda book: book.in_force.k if book.in_force is not None else -1)
    digest, line = longest.in_force_digest, set()
    while digest is not None and digest in longest:
        line.add(digest)
        roster = longest.roster(digest)
        digest = roster.parent if roster.k and not roster.degraded else None
    return all(book.in_force_digest in line for book in books)


def check_memory(swarm: Simulation) -> None:
    """Check that flipped bits have been found and corrected (I1).

    Raises:
        Violated: a peer still holds bytes that differ from those of its chain.
    """
    differing = swarm.inspector.differing
    for (name, span), since in differing.items():
        machine = swarm.machines[name]
        swarm.inspector.checks += 1
        if machine.runs and not machine.trains and not machine.running.serves_state:
            continue  # a bootstrap peer that is no longer a member and serves its old spans to no peer
        donors = machine.running.repair.sources.donors(machine.swarm_now()) if machine.runs else []
        has_spread = sum(other == span for _, other in differing) > 1
        names = [swarm.by_peer[donor].name for donor in donors if donor in swarm.by_peer]
        if has_spread or sum((donor, span) not in differing for donor in names) < 2:
            swarm.inspector.skipped += 1
            continue
        raise Violated("I1", f"{name} has held wrong bytes of {span} since second {since:.1f}", name)


def check_ready(swarm: Simulation) -> None:
    """Check that all peers that run and train are ready (I7).

    Raises:
        Violated: one of them is not.
    """
    for machine in swarm.honest():
        swarm.inspector.checks += 1
        if not machine.running.ready:
            raise Violated("I7", f"{machine} is not ready; {swarm.describe()}", machine.name)


def check_included(swarm: Simulation, first_round: int) -> None:
    """Check that members that were ready throughout are in at least half of the entries since a round (I7).

    Raises:
        Violated: one is not.
    """
    clock, rosters = swarm.rules.clock, swarm.inspector.rosters
    begun = clock.begin(first_round)
    entries = [entry for entry in swarm.inspector.entries.values() if first_round <= entry.round < swarm.round]
    for machine in ready_peers(swarm):
        if machine.ready_at > begun - swarm.rules.cycle_seconds:
            continue
        cycle, digests = clock.cycle(first_round), {entry.roster for entry in entries}
        since = {digest: _followed_since(swarm, machine, digest, cycle) for digest in digests}
        listed = [
            entry
            for entry in entries
            if rosters[entry.roster].member(machine.peer) is not None
            and clock.cycle(entry.round) > since[entry.roster] + 1
        ]
        places = ((rosters[entry.roster].position(machine.peer), places_in(entry.included)) for entry in listed)
        num_in = sum(place in included for place, included in places)
        swarm.inspector.checks += 1
        if len(listed) >= FEWEST_ENTRIES and 2 * num_in < len(listed):
            raise Violated("I7", f"{machine} is in {num_in} of {len(listed)} entries of quiet rounds", machine.name)


def _followed_since(swarm: Simulation, machine: Machine, digest: Digest, first_cycle: int) -> int:
    """Return the cycle of a roster, or that in which a machine followed the last degraded one up to it, if later.

    A long stall of its own is time enough for that. It begins with the roster or the quiet time, if not earlier.
    """
    clock, rosters = swarm.rules.clock, swarm.inspector.rosters
    cycle = rosters[digest].cycle
    while not rosters[digest].degraded:
        digest = rosters[digest].parent
        if digest not in rosters:
            return cycle
    followed = max(first_cycle, rosters[digest].cycle) + PATIENT_STALLS * swarm.rules.stalled_cycles
    if digest in machine.followed_at:
        ahead_seconds = machine.swarm_now() - swarm.loop.true_seconds()
        followed = min(followed, clock.cycle_at(machine.followed_at[digest] + ahead_seconds))
    return max(cycle, followed)


def check_tables(swarm: Simulation) -> None:
    """Check that no table has grown beyond what the size of the swarm explains (I9).

    Raises:
        Violated: a table has.
    """
    num_peers = len(swarm.inspected)
    for machine in swarm.running(trains=False):
        engine = machine.running
        swarm.inspector.checks += 1
        sizes = {"peers heard": len(engine.membership.liveness.views), "links": len(engine.linked)}
        for what, size in sizes.items():
            if size > num_peers:
                raise Violated("I9", f"{machine} keeps {size} {what} in a swarm of {num_peers}", machine.name)


def fragment_heights(swarm: Simulation) -> list[int]:
    """Return, for each fragment, the number of entries that the most advanced peer has absorbed."""
    heights = [0] * len(swarm.rules.num_spans)
    for machine in swarm.running():
        totals = [0] * len(heights)
        for span, head in machine.running.chains.heads.items():
            totals[span.fragment] += head.height
        heights = [max(pair) for pair in zip(heights, totals, strict=True)]
    return heights


def cycles_until_it_goes_on(swarm: Simulation) -> int | None:
    """Return within how many cycles entries must be made again; None if nothing is promised in useful time."""
    roster = leading_roster(swarm)
    if roster is None or not any(_can_give_state(swarm, machine) for machine in swarm.running()):
        return None
    if _is_dated_ahead(swarm, roster):
        return None
    able = [member.peer for member in roster.members if _can_vote(swarm, roster, member.peer)]
    absent = -(-swarm.rules.absence_rounds // swarm.rules.clock.num_fragments)  # a stopped peer closes no link
    if is_majority(roster, able):
        return CYCLES_TO_GO_ON + absent
    # Without a majority, peers that cannot be dialled may have to lead, and the turns are drawn among all members.
    cycles = CYCLES_TO_GO_ON + absent + swarm.rules.stalled_cycles + 1 + 4 * len(roster.members)
    if is_quarter(roster, able):
        return cycles
    return cycles + PATIENT_STALLS * swarm.rules.stalled_cycles if able else None


def still_names_dead(swarm: Simulation) -> bool:
    """Return whether most members of the roster that all peers will follow are dead."""
    roster = leading_roster(swarm)
    if roster is None:
        return False
    return not is_majority(
        roster, [m.peer for m in roster.members if m.peer in swarm.by_peer and swarm.by_peer[m.peer].runs]
    )


def _is_dated_ahead(swarm: Simulation, roster: Roster | None) -> bool:
    """Return whether a roster is dated in the future, because the only voter received one other clock, a liar's."""
    if roster is None or roster.cycle <= swarm.rules.clock.cycle(swarm.round) + CYCLES_TO_GO_ON:
        return False
    return any(machine.is_hostile for machine in swarm.machines.values())


def _can_give_state(swarm: Simulation, machine: Machine) -> bool:
    """Return whether a machine holds all spans; a state that no machine holds is lost for good."""
    return len(machine.vectors.states) == len(swarm.spans)


def leading_roster(swarm: Simulation) -> Roster | None:
    """Return the roster that all peers will follow, as far as is known: the one with most entries, then the longest."""
    rosters = [m.running.book.in_force for m in swarm.running(trains=False)]
    known = (roster for roster in rosters if roster is not None)
    return max(known, key=lambda roster: (roster.height, roster.k, roster.digest()), default=None)


def _can_vote(swarm: Simulation, roster: Roster, peer: bytes) -> bool:
    machine = next((machine for machine in swarm.machines.values() if machine.peer == peer), None)
    member = next(m for m in roster.members if m.peer == peer)
    if machine is None or not machine.runs:
        return False
    return machine.remembers or machine.running.membership.local.me.incarnation == member.incarnation
