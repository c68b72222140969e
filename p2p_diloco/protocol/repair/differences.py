"""Differences between this peer's tips and others', and which of them it must follow.

The claim of one peer is a reason to ask. Entries prove themselves, because their owner signed them. A whole span proves
nothing, so it is fetched only if a majority is at a tip to which no entries lead, or if no majority is possible.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from p2p_diloco.ids import Digest, PeerId, SpanId, short_peer_id
from p2p_diloco.protocol.actions import Action, RebuildParent, ReplaceSpan, Report
from p2p_diloco.protocol.clock import Stopwatch
from p2p_diloco.protocol.repair.donors import SHUN_SECONDS
from p2p_diloco.protocol.repair.fetcher import Fetcher, Want
from p2p_diloco.protocol.repair.reports import Reports
from p2p_diloco.protocol.repair.scrub import Scrub
from p2p_diloco.protocol.results import ParentRebuilt
from p2p_diloco.protocol.round.chain import wins_tie
from p2p_diloco.protocol.wire.messages import EntryRequest, HeadsReply, HeadsRequest
from p2p_diloco.span_log import SpanHead

NEARLY_LEVEL = 2
"""Number of entries of a span that a peer lacks at most, and to which new ones are sent as to members: on a long line,
asking for each takes as long as the others need for the next one. If it lacked more, they would fill a thin line."""
MOST_LACKING = 2
"""Number of donors without an entry, plus unanswered requests to the peer ahead, above which that peer is given up."""


@dataclass(slots=True)
class _Tie:
    """A tie: another peer's tip is another child of our tip's parent, or seems to descend from one.

    Attributes:
        ahead: a peer with a higher tip that does not descend from ours; None: its tip is as high as ours, and wins.
        parent, state: the span before our last entry, from this peer's disk; None until the disk has answered.
    """

    tip: Digest
    ahead: PeerId | None
    parent: SpanHead | None = None
    state: bytes | None = None

    def rebuilt(self, parent: SpanHead, state: bytes | None) -> None:
        self.parent, self.state = parent, state

    def overtaken_by(self, peer: PeerId) -> None:
        self.ahead = peer


@dataclass(slots=True)
class SpanView:
    """A record of others' logs of one span. All but `target` and `doubted` is about our tip.

    Attributes:
        target: the greatest height that was reported, and by whom.
        doubted: per peer, until when its claim of a greater height leads to no request.
        is_unjoinable: no entries lead from our tip to the others'.
        lacking: donors that lack the entry after it.
        num_unanswered: number of requests for that entry that the peer ahead did not answer.
        above: for how long a majority has had a lower tip.
        undecided: for how long no tip has had a majority.
        tie: another child of its parent.
    """

    target: tuple[int, PeerId] | None = None
    doubted: dict[PeerId, float] = field(default_factory=dict)
    is_unjoinable: bool = False
    lacking: set[PeerId] = field(default_factory=set)
    num_unanswered: int = 0
    above: Stopwatch = field(default_factory=Stopwatch)
    undecided: Stopwatch = field(default_factory=Stopwatch)
    tie: _Tie | None = None

    def moved_on(self) -> None:
        """Discard what was found about the previous tip."""
        self.is_unjoinable, self.lacking, self.num_unanswered = False, set(), 0
        self.above, self.undecided, self.tie = Stopwatch(), Stopwatch(), None

    def forget(self) -> None:
        self.moved_on()
        self.target = None

    @property
    def is_parted(self) -> bool:
        return self.is_unjoinable or self.undecided.runs

    def doubts(self, peer: PeerId, now: float) -> bool:
        """Return whether a peer has recently claimed a greater height without showing the entries."""
        return self.doubted.get(peer, now) > now

    def doubt(self, peer: PeerId, now: float, seconds: float) -> None:
        """Let the claims of a peer lead to no request for a while."""
        self.doubted = {other: until for other, until in self.doubted.items() if until > now}
        self.doubted[peer] = now + seconds

    def claimed(self, height: int, peer: PeerId) -> None:
        """Note the claim of a greater height than ours. This peer may have the entries that others lack."""
        self.is_unjoinable = False
        if self.target is None or height > self.target[0]:
            self.target = height, peer

    def is_behind(self, head: SpanHead | None) -> bool:
        """Return whether a peer is known to have a higher tip. Forget it once that height is reached."""
        if head is not None and self.target is not None and head.height >= self.target[0]:
            self.target = None
        return head is not None and self.target is not None

    def forget_absent(self, present: list[PeerId]) -> None:
        if self.target is not None and self.target[1] not in present:
            self.target = None

    def unanswered(self, donor: PeerId) -> None:
        if self.target is not None and self.target[1] == donor:
            self.num_unanswered += 1

    def entry_absent(self, donor: PeerId) -> tuple[int, PeerId] | None:
        """Note a donor without the next entry. Return the height and the peer ahead once that one is given up."""
        assert self.target is not None, "an entry is fetched because a peer is ahead"
        self.lacking.add(donor)
        is_known = self.num_unanswered and len(self.lacking) + self.num_unanswered > MOST_LACKING
        if donor != self.target[1] and not is_known:
            return None
        claim = self.target
        self.target, self.lacking, self.num_unanswered, self.is_unjoinable = None, set(), 0, True
        return claim

    def begin_tie(self, tie: _Tie) -> None:
        self.tie = tie

    def end_tie(self) -> _Tie:
        """Return the tie that the other child has won."""
        tie, self.tie = self.tie, None
        assert tie is not None, "the other child is requested only in a tie"
        if tie.ahead is not None:
            self.doubted.pop(tie.ahead, None)  # its height was right, on another line
        return tie


class Differences:
    """Decides what this peer lacks, and has it fetched. A state machine without I/O."""

    def __init__(self, *, reports: Reports, fetcher: Fetcher, scrub: Scrub) -> None:
        self._rules = reports.rules
        self._chains = reports.chains
        self._reports = reports
        self._fetcher = fetcher
        self._scrub = scrub
        self._views: dict[SpanId, SpanView] = {}
        self._unadopted: set[int] = set()
        """Fragments that must be compared with a donor of the new branch."""
        self.is_adopting = False

    def _view(self, span: SpanId) -> SpanView:
        return self._views.setdefault(span, SpanView())

    # -- how much is missing

    def adopt(self) -> None:
        """Abandon our branch: fetch spans that differ from a donor of the other branch, even if our log is longer."""
        self.forget()
        self._unadopted = set(range(len(self._rules.num_spans)))
        self.is_adopting = True

    def adopted(self, fragment: int) -> None:
        """Note that a fragment has the same tips as a donor of the new branch."""
        self._unadopted.discard(fragment)

    def forget(self) -> None:
        """Give up everything that is being fetched, and forget what others reported."""
        self._fetcher.clear()
        self._reports.clear()
        for view in self._views.values():
            view.forget()
        self._chains.forget_forks()

    def stop_waiting(self) -> None:
        """Stop fetching anything beyond the tips held here: the peers that had it are gone."""
        self._fetcher.drop_held()
        if self._holds_all:
            self._unadopted.clear()

    @property
    def _holds_all(self) -> bool:
        return len(self._chains.heads) == len(self._rules.span_bytes)

    def is_complete(self) -> bool:
        """Return whether every span has a head here and none is being fetched."""
        is_complete = not self._fetcher.wanted and not self._unadopted and self._holds_all
        self.is_adopting = self.is_adopting and not is_complete
        return is_complete

    def lacks_entries_only(self) -> bool:
        """Return whether every span has a head here, and only entries are being fetched."""
        return self._holds_all and all(fetch.want is Want.ENTRY for fetch in self._fetcher.wanted.values())

    def is_nearly_level(self) -> bool:
        """Return whether this peer holds all spans, and lacks at most a few entries of each."""
        if self._unadopted or not self.lacks_entries_only():
            return False
        targets = ((span, view.target[0]) for span, view in self._views.items() if view.target is not None)
        return all(height - self._chains.heads[span].height <= NEARLY_LEVEL for span, height in targets)

    def left_out(self) -> frozenset[SpanId] | None:
        """Return the spans to which nothing can be contributed, because they are being fetched; None: all spans.

        A span is not left out if only one peer claims a higher tip.
        """
        if not self.is_complete() and (self.is_adopting or self._unadopted or not self._holds_all):
            return None
        return frozenset(span for span in self._fetcher.wanted if not self._is_single_claim(span))

    def _is_single_claim(self, span: SpanId) -> bool:
        is_claim = self._view(span).target is not None and not self._fetcher.is_transferred(span)
        if not is_claim or self._reports.quorums.tips.needed < 2:
            return False
        return self._reports.num_above(span, self._chains.heads[span]) < 2

    @property
    def is_parted(self) -> bool:
        """Return whether the right tip of a span is unknown and unlinked voters can be asked for it."""
        return bool(self._reports.quorums.contents.indirect) and any(view.is_parted for view in self._views.values())

    def parted_fragments(self) -> set[int]:
        """Return the fragments with such spans."""
        return {span.fragment for span, view in self._views.items() if view.is_parted} if self.is_parted else set()

    # -- others' tips

    def ask_tips(self, fragment: int, donor: PeerId, now: float) -> list[Action]:
        """Ask a peer whose fragment differs from ours for its tips, one peer at a time."""
        # A missing entry noticed in passing has no target height, so it is not a replay.
        is_replayed = any(
            span.fragment == fragment and fetch.want is Want.ENTRY and self._view(span).target is not None
            for span, fetch in self._fetcher.wanted.items()
        )
        until = now + self._rules.entry_seconds
        if not self._reports.tips.may_ask(fragment, donor, now, until, is_replayed=is_replayed):
            return []
        return [self._rules.send(donor, HeadsRequest(fragment=fragment), now)]

    def take_tips(self, sender: PeerId, reply: HeadsReply) -> bool:
        """Return whether a reply was requested and fits the run; then call `compare_tips`."""
        num_spans = self._rules.num_spans
        fits = reply.fragment < len(num_spans) and len(reply.heads) == num_spans[reply.fragment]
        return fits and self._reports.tips.take(reply.fragment, sender)

    def note_equal(self, fragment: int, peer: PeerId) -> None:
        self._reports.tips.note_equal(fragment, peer)

    def compare_tips(self, sender: PeerId, reply: HeadsReply, now: float) -> list[Action]:
        """Note a peer's tips, and fetch what follows from them.

        The claim of one peer is enough to request entries, even if it is not ready: it may hold entries that the ready
        ones lack, and wait until they have them.
        """
        self._reports.tips.note(sender, reply, self._reports.quorums.tips.witnesses)
        spans = [SpanId(reply.fragment, index) for index in range(len(reply.heads))]
        actions: list[Action] = []
        for span, theirs in zip(spans, reply.heads, strict=True):
            mine, view = self._chains.heads.get(span), self._view(span)
            if mine is None or mine.digest == theirs.digest:
                continue
            if theirs.height > mine.height and not view.doubts(sender, now):
                view.claimed(theirs.height, sender)
                self._fetcher.want_entry(span, sender)
            actions += (
                self._follow_majority(span, mine, now)
                or self._settle_tie(span, mine, theirs, sender, now)
                or self._follow_most(span, mine, now)
            )
        if all(map(self._reports.is_decided, spans)):
            self.adopted(reply.fragment)
        return actions

    def _follow_majority(self, span: SpanId, mine: SpanHead, now: float) -> list[Action]:
        """Fetch a span that a majority holds at a tip that entries from ours do not reach.

        A majority at a lower tip may still be catching up with entries that only this peer holds. So it gets two cycles
        for that, unless this peer is adopting another branch of rosters.
        """
        view, tip = self._view(span), self._reports.majority_tip(span)
        if tip is None or tip.digest == mine.digest:
            view.above.note(False, now)
            return []
        if self._fetcher.is_transferred(span) or (tip.height > mine.height and not view.is_unjoinable):
            return []
        if tip.height < mine.height and span.fragment not in self._unadopted:
            if self._chains.entry_after(span, tip.digest) is not None:
                return []
            if view.above.note(True, now) < self._rules.patience_seconds:
                return []
        self.want_span(span, min(self._reports.tips.groups(span)[tip]), may_go_back=True)
        text = (
            f"{span} is at height {mine.height}, round {mine.round}; a majority is at height {tip.height}, round "
            f"{tip.round}, and no entries lead there; fetching the span"
        )
        return [Report(topic="adoption", text=text)]

    def _follow_most(self, span: SpanId, mine: SpanHead, now: float) -> list[Action]:
        """Fetch a span if no tip has had a majority for two cycles, so that all peers take the same tip.

        If disks cannot rebuild earlier states, several tips can remain, and no peer moves. The tip with most peers is
        taken; in a tie the highest, then as between two children of one tip. More than half must be in contact.
        """
        quorum, undecided = self._reports.quorums.tips, self._view(span).undecided
        num_near, holders = len(quorum.witnesses - quorum.empty), quorum.holders
        if self._fetcher.get(span) is not None or span.fragment in self._unadopted or num_near < 2:
            return []
        is_decided = self._reports.is_with_most(span, mine) or self._reports.is_decided(span)
        if is_decided or 2 * (len(holders) + 1) <= num_near + 1:
            undecided.note(False, now)
            return []
        reported = self._reports.tips.groups(span).items()
        groups = {head: sorted(group & holders) for head, group in reported if head != mine}
        num_there = {mine: len(holders & self._reports.tips.at(span, mine)) + 1}
        num_there.update((head, len(group)) for head, group in groups.items() if group)
        best = min(num_there, key=lambda head: (-num_there[head], -head.height, -head.round, head.digest))
        if undecided.note(best != mine, now) < self._rules.patience_seconds:
            return []
        self.yield_to(span, groups[best][0])
        text = (
            f"{span} has {len(num_there)} tips and none has a majority, here height {mine.height}, round {mine.round}; "
            f"fetching it at height {best.height}, round {best.round}, the tip with most peers ({num_there[best]})"
        )
        return [Report(topic="adoption", text=text)]

    def want_span(
        self,
        span: SpanId,
        donor: PeerId | None,
        *,
        may_go_back: bool = False,
        is_overruled: bool = False,
        trusted: PeerId | None = None,
    ) -> None:
        """Fetch a whole span, because its log cannot be joined; see `Fetcher.want_span`."""
        self._view(span).lacking.clear()
        self._fetcher.want_span(span, donor, may_go_back=may_go_back, is_overruled=is_overruled, trusted=trusted)

    def yield_to(self, span: SpanId, other: PeerId) -> None:
        """Fetch a span from another member, trusting its answer, where no majority is possible."""
        self.want_span(span, other, may_go_back=True, trusted=other)

    def replaced(self, span: SpanId) -> None:
        """Have a span compared with all peers again, because its bytes or tip have changed."""
        self._scrub.replaced(span)
        self._reports.tips.ask_again(span.fragment)

    def transferred(self, span: SpanId) -> None:
        """Note that a whole span has been taken from others. Claims about the previous tip count no more."""
        view = self._view(span)
        view.moved_on()
        view.doubted.clear()
        self.replaced(span)

    # -- two children of one tip

    def _settle_tie(self, span: SpanId, mine: SpanHead, theirs: SpanHead, sender: PeerId, now: float) -> list[Action]:
        """If another child of our tip's parent wins, rebuild the parent, then request that child.

        Of two children, the later round wins, then the smaller digest. A child from which others have continued also
        wins, because more than half were present for it: a peer with a higher tip has no entry that follows ours, and
        may have the other child. No peer moves because of a claim: the parent comes from its own disk, and the other
        child is an entry signed by its owner. A peer at the tip of most peers does not move either.
        """
        view = self._view(span)
        is_ahead = theirs.height > mine.height and view.is_unjoinable
        is_tie = is_ahead or (theirs.height == mine.height and wins_tie(theirs, mine))
        if not is_tie or span.fragment in self._unadopted or self._fetcher.get(span) is not None:
            return []
        if self._reports.is_with_most(span, mine):
            return []
        tie = view.tie
        if tie is None or tie.tip != mine.digest:
            view.begin_tie(_Tie(mine.digest, sender if is_ahead else None))
            return [RebuildParent(span=span, tip=mine.digest)]
        if tie.parent is None:
            return []
        if is_ahead:
            tie.overtaken_by(sender)
            self._chains.fork_at(span, tie.parent, is_left=True)
        return [self._rules.send(sender, EntryRequest(span=span, parent=tie.parent.digest), now)]

    def parent_rebuilt(self, result: ParentRebuilt) -> list[Action]:
        """Take the state before our last entry. The other child is requested when others next report that they hold it.

        If the disk does not reach the parent, and there is only one other peer, the span is fetched from that peer:
        otherwise the two would never agree again. With more peers, a majority decides.
        """
        span, parent = result.span, result.parent
        tie, mine = self._view(span).tie, self._chains.heads.get(span)
        if tie is None or mine is None or not result.tip == tie.tip == mine.digest:
            return []
        if parent is not None:
            tie.rebuilt(parent, result.state)
            self._chains.fork_at(span, parent, is_left=tie.ahead is not None)
            self._reports.tips.ask_again(span.fragment)
            return []
        others = sorted(self._reports.tips.of(span).keys() & self._reports.quorums.tips.holders)
        text = f"{span} differs from what others hold, and this disk cannot rebuild its earlier state"
        if self._reports.quorums.tips.only is None or not others:
            return [Report(topic="tips", text=f"{text}; waiting for a majority")]
        self.yield_to(span, others[0])
        text = f"{text}; fetching it from {short_peer_id(others[0])}, the only other member"
        return [Report(topic="adoption", text=text)]

    def step_back(self, span: SpanId) -> list[Action]:
        """Set a span back to the tip before our last entry: the other child of its parent has arrived, and wins."""
        tie = self._view(span).end_tie()
        assert tie.parent is not None, "the other child is requested only with its parent"
        assert tie.state is not None, "a parent comes with its bytes"
        round_index = self._chains.heads[span].round
        self._chains.set_head(span, tie.parent)
        self.replaced(span)
        text = f"{span} has two children in round {round_index} or later; following the one that all peers choose"
        replaced = ReplaceSpan(span=span, head=tie.parent, state=tie.state, is_mended=True, is_adoption=True)
        return [Report(topic="adoption", text=text), replaced]

    # -- entries

    def entry_absorbed(self, span: SpanId, now: float) -> None:
        """Continue a replay with the next entry, or end it."""
        view = self._view(span)
        view.moved_on()
        fetch = self._fetcher.entry_absorbed(span, now)
        if fetch is not None and view.is_behind(self._chains.heads.get(span)):
            self._fetcher.want_entry(span, fetch.donor)

    def entry_unanswered(self, span: SpanId, donor: PeerId) -> None:
        self._view(span).unanswered(donor)

    def forget_absent(self, present: list[PeerId]) -> None:
        """Do not wait for the entries of peers that cannot be asked."""
        for view in self._views.values():
            view.forget_absent(present)

    def entry_absent(self, sender: PeerId, span: SpanId, parent: Digest, now: float) -> list[Action]:
        """Note that a donor has no entry after our tip.

        If the donor claimed to be ahead of us, either our logs cannot be joined or the claim is wrong. A majority
        decides, and for a while its claim does not lead to requests. If another donor lacks the entry, the next
        comparison leads to a new request, until it is known that the peer ahead does not answer.
        """
        if not self._fetcher.entry_absent(sender, span, parent):
            return []
        view, head = self._view(span), self._chains.heads[span]
        if not view.is_behind(head):
            return []
        self._reports.tips.ask_again(span.fragment)  # the next comparison leads to a new request
        claim = view.entry_absent(sender)
        if claim is None:
            return []
        height, ahead = claim
        followed = self._follow_majority(span, head, now)
        if followed or view.doubts(ahead, now):
            return followed
        is_reported = any(other.doubts(ahead, now) for other in self._views.values())
        # A peer that reports that it has no entry is doubted for long. A missing answer may have been lost.
        view.doubt(ahead, now, SHUN_SECONDS if sender == ahead else self._rules.pause_seconds)
        if is_reported:
            return []
        text = (
            f"{short_peer_id(ahead)} reports {span} at height {height}, here it is at {head.height}; no peer that was "
            "asked has the entries between, and no majority confirms the report; staying here"
        )
        return [Report(topic="tips", text=text)]
