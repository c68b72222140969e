"""Liveness checks: what must come true once the troubles have stopped.

Troubles stop: every message arrives within a tenth of a second, wall clocks are right to within 5 % of a round, all
disks have room, nobody is stopped, and whoever is not dead for good runs. At least one machine can be dialled: peers
that are all at home without a bootstrap have no place to meet.

I6  Two whole cycles after troubles have stopped (the cycle in which they stop does not count, nor does the time that
    peers take to be heard again: `SETTLE_SECONDS`, and `REDIAL_SECONDS` for those that have to find each other anew;
    where messages were lost, the last question that was is asked again within `ASKED_AGAIN_SECONDS`), all ready peers
    hold the same heads of all spans at the end of each cycle that they, and the round before it, were ready throughout.
    Where those who are dead for good were the majority, troubles stop for the others when the roster names the dead no
    more: before, rows whose reducers are dead get entries a round late. A cycle is one of the swarm's own time, which
    clocks may have moved. A degraded roster that comes after troubles have stopped has its own time: the others follow
    it once they have sat through a stall themselves. Clocks that are apart get the time in which they are slewed.
I8  At the same moments the rosters in force at ready peers lie on one chain: no fork, of one line or of several,
    outlives that time once both sides can hear each other. Peers whose disks came back from a backup may vote twice,
    and so set two lines going; these have the time of a degraded roster.
I1  A peer whose memory failed holds the true bytes again within two scrub periods and two cycles, if it can ask two
    peers that hold them and nobody has fetched the wrong ones from it meanwhile: two witnesses are needed against one.
I7  Every peer that runs and trains becomes ready, once no memory differs: witnesses that disagree vouch for nobody.
The run goes on: entries are made for every fragment. It can as long as enough members of the roster in force run and
    remember what they voted, and one of them holds the state; where they are no majority, after the void cycles that
    their share asks for. Nothing is promised if the only voter heard one other clock, a liar's, and dated a roster
    hours ahead: no other roster can follow before that time. A peer whose clock is right refuses that roster, so I6 is
    asked only of peers that go by the same one.
I9  No table of an engine is larger than the swarm explains.
"""

from __future__ import annotations

from p2p_diloco.protocol.membership.membership import PATIENT_STALLS
from p2p_diloco.protocol.wire.roster import Roster, is_majority, is_quarter
from p2p_diloco.testing.inspector import Violated
from p2p_diloco.testing.machine import Machine
from p2p_diloco.testing.simulation import Simulation

SETTLE_SECONDS = 12.0
ASKED_AGAIN_SECONDS = 60.0
"""A donor that says other things meanwhile may take so long for a piece of a span; a lost question looks the same."""
REDIAL_SECONDS = 75.0
"""Who has failed to dial somebody for long tries again so late."""
CYCLES_TO_GO_ON = 6


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
    # Who became ready a moment ago may lack an entry whose owner had not heard of that: a round, then it compares.
    ready = [machine for machine in ready_peers(swarm) if now - machine.ready_at > settled_seconds]
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
            raise Violated("I8", f"{machine} and {ready[0]} go by rosters of different branches", machine.name)


def newest_degraded(swarm: Simulation) -> int:
    """Return the cycle of the latest degraded roster that somebody goes by; -1: there is none."""
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
    """Return whether all ready peers go by one line of rosters; who has not followed a degraded one does not."""
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
    """Check that flipped bits have been found and mended (I1).

    Raises:
        Violated: a peer still holds other bytes than its chain says.
    """
    differing = swarm.inspector.differing
    for (name, span), since in differing.items():
        machine = swarm.machines[name]
        swarm.inspector.checks += 1
        if machine.runs and not machine.trains and not machine.running.serves_state:
            continue  # a bootstrap that is no member any more and has what it held then, for nobody
        donors = machine.running.donors(machine.swarm_now()) if machine.runs else []
        has_spread = sum(other == span for _, other in differing) > 1
        names = [swarm.by_peer[donor].name for donor in donors if donor in swarm.by_peer]
        if has_spread or sum((donor, span) not in differing for donor in names) < 2:
            swarm.inspector.skipped += 1
            continue
        raise Violated("I1", f"{name} holds wrong bytes of {span} since second {since:.1f}", name)


def check_ready(swarm: Simulation) -> None:
    """Check that all who run and train are ready (I7).

    Raises:
        Violated: one is not.
    """
    for machine in swarm.honest():
        swarm.inspector.checks += 1
        if not machine.running.ready:
            raise Violated("I7", f"{machine} is not ready; {swarm.describe()}", machine.name)


def check_tables(swarm: Simulation) -> None:
    """Check that nothing has grown beyond what the swarm explains (I9).

    Raises:
        Violated: a table has.
    """
    num_peers = len(swarm.inspected)
    for machine in swarm.running(trains=False):
        engine = machine.running
        swarm.inspector.checks += 1
        sizes = {"peers heard": len(engine.membership.heard), "links": len(engine.linked)}
        for what, size in sizes.items():
            if size > num_peers:
                raise Violated("I9", f"{machine} keeps {size} {what} in a swarm of {num_peers}", machine.name)


def fragment_heights(swarm: Simulation) -> list[int]:
    """Return for each fragment the entries that the foremost peer has absorbed."""
    heights = [0] * len(swarm.rules.num_spans)
    for machine in swarm.running():
        totals = [0] * len(heights)
        for span, head in machine.running.chains.heads.items():
            totals[span.fragment] += head.height
        heights = [max(pair) for pair in zip(heights, totals, strict=True)]
    return heights


def cycles_until_it_goes_on(swarm: Simulation) -> int | None:
    """Return after how many cycles entries must be made again; None where nothing is promised in a useful time."""
    roster = leading_roster(swarm)
    if roster is None or not any(_can_give_state(swarm, machine) for machine in swarm.running()):
        return None
    if _is_dated_ahead(swarm, roster):
        return None
    able = [member.peer for member in roster.members if _can_vote(swarm, roster, member.peer)]
    if is_majority(roster, able):
        return CYCLES_TO_GO_ON
    # Below a majority it may be for those whom nobody can dial to lead, and all draw lots for the turns.
    cycles = CYCLES_TO_GO_ON + swarm.rules.stalled_cycles + 1 + 4 * len(roster.members)
    if is_quarter(roster, able):
        return cycles
    return cycles + PATIENT_STALLS * swarm.rules.stalled_cycles if able else None


def still_names_dead(swarm: Simulation) -> bool:
    """Return whether most members of the roster that all will go by are dead."""
    roster = leading_roster(swarm)
    if roster is None:
        return False
    return not is_majority(
        roster, [m.peer for m in roster.members if m.peer in swarm.by_peer and swarm.by_peer[m.peer].runs]
    )


def _is_dated_ahead(swarm: Simulation, roster: Roster | None) -> bool:
    """Return whether a roster is of a time to come: the only voter heard one other clock, a liar's."""
    if roster is None or roster.cycle <= swarm.rules.clock.cycle(swarm.round) + CYCLES_TO_GO_ON:
        return False
    return any(machine.is_hostile for machine in swarm.machines.values())


def _can_give_state(swarm: Simulation, machine: Machine) -> bool:
    """Return whether all spans are here; a state that nobody holds is lost for good."""
    return len(machine.vectors.states) == len(swarm.spans)


def leading_roster(swarm: Simulation) -> Roster | None:
    """Return the roster that all will go by, as far as can be told: the longest, of the most work."""
    rosters = [m.running.book.in_force for m in swarm.running(trains=False)]
    known = (roster for roster in rosters if roster is not None)
    return max(known, key=lambda roster: (roster.height, roster.k, roster.digest()), default=None)


def _can_vote(swarm: Simulation, roster: Roster, peer: bytes) -> bool:
    machine = next((machine for machine in swarm.machines.values() if machine.peer == peer), None)
    member = next(m for m in roster.members if m.peer == peer)
    if machine is None or not machine.runs:
        return False
    return machine.remembers or machine.running.me.incarnation == member.incarnation
