"""The one repair: compare at a closed boundary, fetch what is missing, replay in parent order, compare contents.

It serves the joiner, the straggler and the healed split alike. Requests are dealt over all donors, few at a time each,
entries before spans: on a thin link a joiner must first keep up with what it holds. As long as a donor answers
something it may take its time with the rest; one that does not is left for another.

One peer's word is a reason to ask. Entries prove themselves: they are signed by their owner. A whole span proves
nothing, so it is taken only at a tip, and with the bytes, that a majority named (`majority.py`); until then it waits
here, in nobody's way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from p2p_diloco.ids import ZERO_DIGEST, Digest, PeerId, SpanId, short_peer_id
from p2p_diloco.log.head import SpanHead
from p2p_diloco.protocol.actions import Action, HashSpan, RebuildParent, ReplaceSpan, Report, Send
from p2p_diloco.protocol.repair.donors import SHUN_SECONDS, Donors
from p2p_diloco.protocol.repair.majority import NamedContents, Voices, is_start
from p2p_diloco.protocol.repair.scrub import Scrub
from p2p_diloco.protocol.repair.signed_content import FarVoters
from p2p_diloco.protocol.repair.transfer import CatchUpRules, Transfer, Want
from p2p_diloco.protocol.repair.window import Asked, Window, least_loaded
from p2p_diloco.protocol.round.chain import ChainBook, wins_tie
from p2p_diloco.protocol.wire.messages import (
    ContentReply,
    ContentRequest,
    EntryRequest,
    HeadsReply,
    HeadsRequest,
    SignedContent,
    SignedContentRequest,
    SpanReply,
    SpanRequest,
)

Question = HeadsRequest | ContentRequest | SignedContentRequest | EntryRequest | SpanRequest

MOST_ASKED_PER_DONOR = {Want.ENTRY: 8, Want.SPAN: 8}
"""Requests under way at one donor: enough that it never waits for the next one, nor for those that were lost."""
QUIET_SHARE = 0.125
"""Share of `piece_seconds` for which a donor that used to answer may answer nothing while others do."""
MOST_LACKING = 2
"""Donors that lack the entry we need, or questions that who is ahead did not answer: with more it is not waited for."""


@dataclass(slots=True, kw_only=True)
class _Tie:
    """Another peer stands on another child of our tip's parent, or on a line that seems to go on from one.

    Attributes:
        tip: where we stand.
        ahead: who stands higher, on a line that our tip is not on; None: theirs is as high as ours, and wins.
        parent, state: the span before our last entry, from the own disk; None until the disk has answered.
    """

    tip: Digest
    ahead: PeerId | None = None
    parent: SpanHead | None = None
    state: bytes | None = None


@dataclass(slots=True, kw_only=True)
class _Fetch:
    """A span, or the entry that follows its tip, that is being fetched.

    Attributes:
        donor: to ask first; None: any.
        asked: the request under way.
        first_asked: when the question was asked first, while it is not answered.
        transfer: the pieces of a whole span that have come.
        servers: donors that were asked for a whole span; their pieces are taken.
        late: the donor that answered too late, or not at all.
        on_word_of: a peer whose word about the bytes is enough.
    """

    want: Want
    donor: PeerId | None
    asked: Asked | None = None
    first_asked: float | None = None
    transfer: Transfer | None = None
    servers: set[PeerId] = field(default_factory=set)
    late: PeerId | None = None
    on_word_of: PeerId | None = None


@dataclass(slots=True, kw_only=True)
class _Finding:
    """Findings about the tip of a span; they are void once the tip moves.

    Attributes:
        is_unjoinable: no entries lead from it to where others stand.
        goes_back: a majority stands lower, so a transfer may take entries back.
        above_since: when a majority was first seen to stand lower.
        undecided_since: when no tip was first seen to have a majority.
        num_unanswered: requests for an entry that the peer ahead did not answer.
        tie: another child of its parent.
    """

    is_unjoinable: bool = False
    goes_back: bool = False
    above_since: float | None = None
    undecided_since: float | None = None
    num_unanswered: int = 0
    tie: _Tie | None = None


class HeadsAsked:
    """Asks for the tips of a fragment, one donor at a time, and each donor once while it is replayed. No I/O.

    A fragment that is replayed differs from its donors until it is done, and each of their heartbeats shows it. Asked
    with each, a donor with a thin line would send tips again and again instead of entries.
    """

    def __init__(self) -> None:
        self._asked: dict[int, Asked] = {}
        self._heard: dict[int, set[PeerId]] = {}

    def may_ask(self, fragment: int, donor: PeerId, now: float, *, is_replayed: bool) -> bool:
        """Return whether nobody is being asked and, while the fragment is replayed, this donor has not been heard."""
        if not is_replayed:
            self._heard.pop(fragment, None)
        asked = self._asked.get(fragment)
        return donor not in self._heard.get(fragment, ()) and (asked is None or asked.until <= now)

    def ask(self, fragment: int, donor: PeerId, until: float) -> None:
        """Note a question."""
        self._asked[fragment] = Asked(donor=donor, until=until)

    def take(self, fragment: int, sender: PeerId) -> bool:
        """Note a reply; False: it answers no question."""
        asked = self._asked.get(fragment)
        if asked is None or asked.donor != sender:
            return False
        del self._asked[fragment]
        self._heard.setdefault(fragment, set()).add(sender)
        return True

    def forget(self, fragment: int) -> None:
        """Let all be asked again: something here is not what they were compared with."""
        self._heard.pop(fragment, None)

    def clear(self) -> None:
        """Forget all."""
        self._asked.clear()
        self._heard.clear()


class CatchUp:
    """Fetches state and entries from donors, and verifies them. A state machine without I/O."""

    def __init__(self, *, far: FarVoters, rules: CatchUpRules, chains: ChainBook) -> None:
        self.far = far
        self.scrub = Scrub(
            num_spans=rules.num_spans, answer_seconds=rules.answer_seconds, pause_seconds=rules.pause_seconds
        )
        self.rules = rules
        self._chains = chains
        self._fetches: dict[SpanId, _Fetch] = {}
        self._findings: dict[SpanId, _Finding] = {}
        self._heads_asked = HeadsAsked()
        self._targets: dict[SpanId, tuple[int, PeerId]] = {}
        self._donors = Donors(quiet_seconds=QUIET_SHARE * rules.piece_seconds)
        self._windows = {
            Want.ENTRY: Window(seconds=rules.entry_seconds, target_seconds=rules.entry_seconds / 2.0),
            Want.SPAN: Window(seconds=rules.piece_seconds, target_seconds=rules.piece_target_seconds),
        }
        self._lacking: dict[SpanId, set[PeerId]] = {}
        self._unadopted: set[int] = set()
        self.is_adopting = False
        self.damaged: dict[SpanId, bool] = {}
        """Spans that stand still until they are replaced; whether the disk is being asked about each."""
        self.voices = Voices()
        """Peers that may name a tip; set by `listen_to`, like the next one."""
        self.namers = Voices()
        """Peers that may name the bytes of a span that is fetched: usually the electorate, linked or not."""
        self._contents = NamedContents(answer_seconds=rules.answer_seconds, pause_seconds=rules.entry_seconds)
        self._told: dict[int, dict[PeerId, tuple[SpanHead, ...]]] = {}
        self._level: dict[int, set[PeerId]] = {}
        self._doubted: dict[tuple[PeerId, SpanId], float] = {}

    def listen_to(self, voices: Voices, namers: Voices | None = None) -> None:
        """Set the peers that may name tips, and those that may name bytes where these are not the same."""
        self.voices, self.namers = voices, namers if namers is not None else voices

    # -- what is known to be missing

    def want_everything(self) -> None:
        """Fetch every span that has no head here: a newcomer's first step."""
        missing = self.rules.span_bytes.keys() - self._chains.heads.keys() - self._fetches.keys()
        for span in sorted(missing):
            self._fetches[span] = _Fetch(want=Want.SPAN, donor=None)

    def want_entry(self, span: SpanId, donor: PeerId | None) -> None:
        """Fetch the entry that follows this peer's head of `span`."""
        self._fetches.setdefault(span, _Fetch(want=Want.ENTRY, donor=donor))

    def is_transferred(self, span: SpanId) -> bool:
        """Return whether a whole span is being fetched."""
        fetch = self._fetches.get(span)
        return fetch is not None and fetch.want is Want.SPAN

    def has_asked(self, span: SpanId, donor: PeerId) -> bool:
        """Return whether an answer about `span` is awaited from a donor."""
        asked = self._asked_of(span)
        return asked is not None and asked.donor == donor

    def forget(self) -> None:
        """Fetch nothing of what is wanted now."""
        for dropped in (self._fetches, self._findings, self._targets, self._lacking, self._heads_asked):
            dropped.clear()
        for told in (self._told, self._level, self._contents):
            told.clear()
        self._chains.forget_forks()

    def adopt(self) -> None:
        """Give up our branch: what differs from a donor of the other one is fetched, even where our log is longer."""
        self.forget()
        self.scrub.begin_again()
        self._unadopted = set(range(len(self.rules.num_spans)))
        self.is_adopting = True

    def adopted(self, fragment: int) -> None:
        """Note that a fragment stands where a donor's of the new branch stands."""
        self._unadopted.discard(fragment)

    def is_complete(self) -> bool:
        """Return whether every span has a head here and none is being fetched."""
        missing = self._fetches or self._unadopted or len(self._chains.heads) < len(self.rules.span_bytes)
        self.is_adopting = self.is_adopting and bool(missing)
        return not missing

    def left_out(self) -> frozenset[SpanId] | None:
        """Return the spans that are being fetched, to which nothing can be contributed; None: to no span can be.

        That one peer alone says it stands higher keeps nobody from contributing.
        """
        lacks_some = self._unadopted or len(self._chains.heads) < len(self.rules.span_bytes)
        if not self.is_complete() and (self.is_adopting or lacks_some):
            return None
        return frozenset(span for span in self._fetches if not self._is_one_word(span))

    def _is_one_word(self, span: SpanId) -> bool:
        if self.is_transferred(span) or span not in self._targets or self.voices.needed < 2:
            return False
        mine = self._chains.heads[span]
        told = self._told.get(span.fragment, {})
        return sum(heads[span.index].height > mine.height for heads in told.values()) < 2

    @property
    def _transfers(self) -> dict[SpanId, Transfer]:
        """Return whole spans of which something has come."""
        return {span: fetch.transfer for span, fetch in self._fetches.items() if fetch.transfer is not None}

    def _asked_of(self, span: SpanId) -> Asked | None:
        fetch = self._fetches.get(span)
        return fetch.asked if fetch is not None else None

    def _finding(self, span: SpanId) -> _Finding:
        return self._findings.setdefault(span, _Finding())

    @property
    def is_parted(self) -> bool:
        """Return whether the right tip of a span is unknown and unlinked voters can be asked for it."""
        return bool(self.namers.far) and bool(self._parted)

    @property
    def _parted(self) -> set[SpanId]:
        """Return spans from which no entries lead to where others stand, and those whose tip no majority has named."""
        return {
            span for span, found in self._findings.items() if found.is_unjoinable or found.undecided_since is not None
        }

    @property
    def lacks_names(self) -> bool:
        """Return whether a span waits for a majority to name its tip or its bytes."""
        return self.is_parted or any(not transfer.is_sure for transfer in self._transfers.values())

    @property
    def goes_by_few(self) -> bool:
        """Return whether spans are fetched on the answers of less than a majority of the electorate."""
        return self.namers.is_few and bool(self._transfers)

    @property
    def is_waiting_for_a_majority(self) -> bool:
        """Return whether a span has come that nobody has vouched for yet."""
        return any(transfer.is_whole and transfer.named is None for transfer in self._transfers.values())

    # -- asking

    def ask_heads(self, fragment: int, donor: PeerId, now: float) -> list[Action]:
        """Ask a peer whose fragment differs from ours where its spans stand, one peer at a time."""
        # Of an entry that is missed by the way nobody has said how far it is from there.
        replayed = (s for s, fetch in self._fetches.items() if fetch.want is Want.ENTRY and s in self._targets)
        is_replayed = any(span.fragment == fragment for span in replayed)
        if not self._heads_asked.may_ask(fragment, donor, now, is_replayed=is_replayed):
            return []
        self._heads_asked.ask(fragment, donor, now + self.rules.entry_seconds)
        return [self._send(donor, HeadsRequest(fragment=fragment), now)]

    def ask_content(self, fragment: int, donor: PeerId, now: float) -> list[Action]:
        """Ask a peer that stands where we stand for the digests of its bytes, until enough agree."""
        if not self.scrub.may_ask(fragment, donor, now):
            return []
        return [self._send(donor, ContentRequest(fragment=fragment), now)]

    def pump(
        self,
        donors: Sequence[PeerId],
        now: float,
        sources: Sequence[PeerId] | None = None,
        holders: Sequence[PeerId] = (),
    ) -> list[Action]:
        """Send what can be asked now: unanswered requests again, to another donor, and those that wait.

        Args:
            donors: to ask for entries, and for spans that one of them is preferred for.
            sources: to ask for other spans; None: the donors.
            holders: who hold a state, ready or not: the next entry, or what a majority stands at, may be theirs alone.
        """
        everybody = list(dict.fromkeys([*donors, *(sources or ()), *holders]))
        for span in [span for span, (_, ahead) in self._targets.items() if ahead not in everybody]:
            del self._targets[span]  # who cannot be asked must not be waited for
        self._donors.look(now)
        actions = [*self._confirm(now), *self._give_up_on(everybody, now)]
        wide = self._donors.sound(donors if sources is None else sources, now)
        self._take_back_for(wide)
        left = {want: window.size for want, window in self._windows.items()}
        load = {want: dict.fromkeys(everybody, 0) for want in Want}
        for fetch in self._fetches.values():
            if fetch.asked is not None:
                load[fetch.want][fetch.asked.donor] = load[fetch.want].get(fetch.asked.donor, 0) + 1
                left[fetch.want] -= 1
        # Entries, from whoever has them: one that is shunned may be the only one ahead.
        preferred = self._donors.sound([*donors, *holders], now)
        for want, able, preferable in ((Want.ENTRY, donors, everybody), (Want.SPAN, wide, preferred)):
            if all(load[want][donor] >= MOST_ASKED_PER_DONOR[want] for donor in able):
                continue  # while a transfer runs, nearly always
            for span, fetch in self._waiting(want):
                free = [donor for donor in able if load[want][donor] < MOST_ASKED_PER_DONOR[want]]
                if not free or left[want] <= 0:
                    break
                donor = fetch.donor
                if donor is None or donor not in preferable or load[want][donor] >= MOST_ASKED_PER_DONOR[want]:
                    others = [donor for donor in free if donor != fetch.late]
                    donor = least_loaded(span, others or free, load[want])
                load[want][donor] += 1
                left[want] -= 1
                actions.append(self._ask(span, fetch, donor, now))
        return actions

    def _take_back_for(self, sources: Sequence[PeerId]) -> None:
        """Take spans back from donors that were asked when there were no better ones, as many as those can serve."""
        under_way = [(fetch, fetch.asked) for fetch in self._fetches.values() if fetch.asked is not None]
        asked_here = sum(asked.donor in sources for _, asked in under_way)
        spare = MOST_ASKED_PER_DONOR[Want.SPAN] * len(sources) - asked_here
        for fetch, asked in under_way:
            is_preferred = fetch.donor == asked.donor
            if spare > 0 and fetch.want is Want.SPAN and not is_preferred and asked.donor not in sources:
                fetch.asked = None
                spare -= 1

    def _waiting(self, want: Want) -> list[tuple[SpanId, _Fetch]]:
        """Return what nobody was asked for yet; first the spans of which something has come."""
        waiting = [(span, fetch) for span, fetch in self._fetches.items() if fetch.want is want and fetch.asked is None]
        if want is Want.ENTRY:
            return waiting
        waiting = [(span, fetch) for span, fetch in waiting if fetch.transfer is None or not fetch.transfer.is_whole]
        return sorted(waiting, key=lambda one: one[1].transfer is None)

    def _ask(self, span: SpanId, fetch: _Fetch, donor: PeerId, now: float) -> Send:
        window = self._windows[fetch.want]
        fetch.asked = Asked(
            donor=donor,
            until=now + window.seconds,
            last=now + window.longest_seconds,
            at=now,
            piece_bytes=self._donors.piece_bytes(donor),
        )
        if fetch.first_asked is None:
            fetch.first_asked = now
        if fetch.want is Want.SPAN:
            fetch.servers.add(donor)
        return self._request(span, fetch, donor, now)

    def _give_up_on(self, donors: Sequence[PeerId], now: float) -> list[Action]:
        """Take requests back from donors that are too slow, or have stopped; say so of one that stopped serving spans.

        One whose heartbeats do not come through goes on: on a thin line they wait behind its own pieces. A link that is
        lost takes its requests with it, see `lose`.
        """
        actions: list[Action] = []
        for span, fetch in self._fetches.items():
            want, asked = fetch.want, fetch.asked
            if asked is None:
                continue
            is_late = asked.until <= now
            if not is_late and not (want is Want.SPAN and self._donors.is_quiet(asked.donor, asked.at, donors, now)):
                continue
            fetch.asked = None
            fetch.donor = None if fetch.donor == asked.donor else fetch.donor
            fetch.late = asked.donor
            if want is Want.ENTRY and span in self._targets and self._targets[span][1] == asked.donor:
                self._finding(span).num_unanswered += 1
            if asked.donor in donors:
                if want is Want.SPAN:
                    what = f"served nothing of {span} for {now - asked.at:.0f} s"
                    actions += self._donors.shun(asked.donor, what, now)
                if is_late:  # one donor that stopped says nothing about the line
                    self._windows[want].unanswered()
        return actions

    def heard(self, donor: PeerId, now: float) -> None:
        """Note that a donor has answered something: it may take its time with the rest."""
        self._donors.heard(donor, now)
        for fetch in self._fetches.values():
            asked = fetch.asked
            if asked is not None and asked.donor == donor:
                asked.until = max(min(now + self._windows[fetch.want].seconds, asked.last), asked.until)

    def _request(self, span: SpanId, fetch: _Fetch, donor: PeerId, now: float) -> Send:
        if fetch.want is Want.ENTRY:
            return self._send(donor, EntryRequest(span=span, parent=self._chains.heads[span].digest), now)
        transfer = fetch.transfer
        version = transfer.head.digest if transfer is not None else ZERO_DIGEST
        offset = transfer.received_bytes if transfer is not None else 0
        most_bytes = self._donors.piece_bytes(donor)
        request = SpanRequest(span=span, version=version, offset=offset, most_bytes=most_bytes)
        return self._send(donor, request, now)

    def _send(self, to: PeerId, message: Question, now: float) -> Send:
        return Send(to=to, message=message, deadline=now + self.rules.answer_seconds)

    # -- answers

    def take_heads(self, sender: PeerId, reply: HeadsReply) -> bool:
        """Return whether a reply answers what was asked and fits the run."""
        fits = reply.fragment < len(self.rules.num_spans) and len(reply.heads) == self.rules.num_spans[reply.fragment]
        return fits and self._heads_asked.take(reply.fragment, sender)

    def note_differences(self, sender: PeerId, reply: HeadsReply, now: float) -> list[Action]:
        """Note where a voice's spans stand, and do what follows from it.

        Entries are asked for on one word, also on that of a peer that is not ready: it may hold what the ready ones
        lack, and wait until they hold it. A whole span is fetched where a majority stands elsewhere and entries do not
        lead there.
        """
        self._told.setdefault(reply.fragment, {})[sender] = reply.heads
        self._level.get(reply.fragment, set()).discard(sender)
        actions: list[Action] = []
        for index, theirs in enumerate(reply.heads):
            span = SpanId(reply.fragment, index)
            mine = self._chains.heads.get(span)
            if mine is None or mine.digest == theirs.digest:
                continue
            if theirs.height > mine.height and self._doubted.get((sender, span), now) <= now:
                self._finding(span).is_unjoinable = False  # it may have the entries that others lack
                if theirs.height >= self._targets.get(span, (0, sender))[0]:
                    self._targets[span] = (theirs.height, sender)
                self.want_entry(span, sender)
            actions += (
                self._follow_majority(span, mine, now)
                or self._settle_tie(span, mine, theirs, sender, now)
                or self._follow_most(span, mine, now)
            )
        if all(self._is_decided(SpanId(reply.fragment, index)) for index in range(len(reply.heads))):
            self.adopted(reply.fragment)
        return actions

    def stands_level(self, fragment: int, voice: PeerId) -> None:
        """Note that a voice stands where we stand with all spans of a fragment."""
        self._told.get(fragment, {}).pop(voice, None)
        self._level.setdefault(fragment, set()).add(voice)

    def _voters(self, span: SpanId) -> dict[SpanHead, set[PeerId]]:
        """Return who stands where, of those that do not stand where we stand with the whole fragment."""
        voters: dict[SpanHead, set[PeerId]] = {}
        for voice, heads in self._told.get(span.fragment, {}).items():
            voters.setdefault(heads[span.index], set()).add(voice)
        return voters

    def _with_us(self, span: SpanId, mine: SpanHead) -> set[PeerId]:
        """Return which voices stand where we stand."""
        return self._voters(span).get(mine, set()) | self._level.get(span.fragment, set())

    def _is_decided(self, span: SpanId) -> bool:
        mine = self._chains.heads.get(span)
        groups = self._voters(span)
        if mine is not None:
            groups[mine] = self._with_us(span, mine)
        return any(self._names(span, head, group) for head, group in groups.items())

    def _follow_majority(self, span: SpanId, mine: SpanHead, now: float) -> list[Action]:
        """Fetch a span that a majority holds at a tip to which no entries lead from ours.

        Where the majority stands lower, it may be on its way to us: entries that only we hold lead it here. So it has
        two cycles for that, unless it goes by another branch of rosters.
        """
        found = self._finding(span)
        named = next((head for head, group in self._voters(span).items() if self._names(span, head, group)), None)
        if named is None or named.digest == mine.digest:
            found.above_since = None
            return []
        if self.is_transferred(span):
            return []
        if named.height > mine.height and not found.is_unjoinable:
            return []
        if named.height < mine.height and span.fragment not in self._unadopted:
            if self._chains.entry_after(span, named.digest) is not None:
                return []
            if found.above_since is None:
                found.above_since = now
            if now - found.above_since < self.rules.patience_seconds:
                return []
        found.goes_back = True
        self.want_transfer(span, min(self._voters(span)[named]))
        text = (
            f"{span} stands at height {mine.height}, round {mine.round}; a majority stands at height {named.height}, "
            f"round {named.round}, and no entries lead there; fetching it"
        )
        return [Report(topic="adoption", text=text)]

    def _names(self, span: SpanId, head: SpanHead, group: set[PeerId]) -> bool:
        """Return whether the peers at a tip are a majority, counting unlinked voters that have signed it."""
        far = {
            voter
            for voter, (chain, _) in self._contents.of(span).items()
            if voter in self.namers.told and chain == head.digest
        }
        return self.voices.are_enough(group) or (not self.namers.is_few and self.namers.are_enough(group | far))

    # -- two children of one tip

    def _settle_tie(self, span: SpanId, mine: SpanHead, theirs: SpanHead, sender: PeerId, now: float) -> list[Action]:
        """Look what the span was before our last entry, where another child of it wins: the later, then the smaller.

        So does one from which others have gone on, for more than half were there on it: who stands higher has no entry
        that follows our tip, and may have the other child. Nobody moves on a word: the parent comes from the own disk,
        and the other child is an entry signed by its owner. Nor does who stands where most stand.
        """
        found = self._finding(span)
        is_ahead = theirs.height > mine.height and found.is_unjoinable
        is_tie = is_ahead or (theirs.height == mine.height and wins_tie(theirs, mine))
        if not is_tie or span.fragment in self._unadopted or self._is_with_most(span, mine) or span in self._fetches:
            return []
        tie = found.tie
        if tie is None or tie.tip != mine.digest:
            found.tie = _Tie(tip=mine.digest, ahead=sender if is_ahead else None)
            return [RebuildParent(span=span, tip=mine.digest)]
        if tie.parent is None:
            return []
        if is_ahead:
            tie.ahead = sender
            self._chains.fork_at(span, tie.parent, is_left=True)
        return [self._send(sender, EntryRequest(span=span, parent=tie.parent.digest), now)]

    def parent_rebuilt(
        self, span: SpanId, tip: Digest, parent: SpanHead | None, state: bytes | None, now: float
    ) -> list[Action]:
        """Take the result of a `RebuildParent`; ask for the other child when others next say that they hold it.

        Where the disk does not lead there, and one other peer is all there is, it is believed: else two would never
        agree again. With more than one other, a majority will decide.
        """
        tie, mine = self._finding(span).tie, self._chains.heads.get(span)
        if tie is None or mine is None or not tip == tie.tip == mine.digest:
            return []
        if parent is not None:
            tie.parent, tie.state = parent, state
            self._chains.fork_at(span, parent, is_left=tie.ahead is not None)
            self._heads_asked.forget(span.fragment)
            return []
        others = sorted(self._told.get(span.fragment, {}).keys() & self.voices.heard)
        text = f"{span} differs from what others hold, and this disk does not hold what it was before"
        if len(self.voices.near) != 1 or not others:
            return [Report(topic="tips", text=f"{text}; waiting for a majority")]
        text = f"{text}; fetching it from {short_peer_id(others[0])}, the only other member"
        return [Report(topic="adoption", text=text), *self.yield_to(span, others[0])]

    def step_back(self, span: SpanId) -> list[Action]:
        """Let a span stand where it stood before our last entry: the other child of its parent is here, and wins."""
        found = self._finding(span)
        tie, found.tie = found.tie, None
        assert tie is not None, "who is asked for the other child knows of a tie"
        assert tie.parent is not None, "who is asked for the other child has its parent"
        assert tie.state is not None, "a parent comes with its bytes"
        round_index = self._chains.heads[span].round
        self._chains.set_head(span, tie.parent)
        if tie.ahead is not None:
            self._doubted.pop((tie.ahead, span), None)  # it was on another line, and not wrong about its height
        text = f"{span} has two children in round {round_index} or later; following the one that all agree on"
        replaced = ReplaceSpan(span=span, head=tie.parent, state=tie.state, is_mended=True, is_adoption=True)
        self._has_new_head(span)
        return [Report(topic="adoption", text=text), replaced]

    def _is_with_most(self, span: SpanId, mine: SpanHead) -> bool:
        """Return whether more than half of those that this peer hears stand where it stands.

        Not where half of the electorate is known to stand elsewhere: those that are heard may be the few that can be
        dialled, and the bootstrap does not vote.
        """
        num_with_us = len(self.voices.heard & self._with_us(span, mine))
        has_most = 2 * (num_with_us + 1) > len(self.voices.near) + 1
        return has_most and len(self._voters_on_another_line(span, mine)) < self.namers.half

    def _voters_on_another_line(self, span: SpanId, mine: SpanHead) -> set[PeerId]:
        """Return which of those who vote have said, or signed, that they stand at a tip that did not lead to ours."""
        tips = {voice: head.digest for head, group in self._voters(span).items() for voice in group & self.namers.heard}
        tips |= {voter: chain for voter, (chain, _) in self._contents.of(span).items() if voter in self.namers.told}
        return {
            voter for voter, tip in tips.items() if tip != mine.digest and self._chains.entry_after(span, tip) is None
        }

    def _follow_most(self, span: SpanId, mine: SpanHead, now: float) -> list[Action]:
        """Fetch a span where no tip has a majority, and none comes about for two cycles: all take the same one.

        Disks that cannot go back leave several tips that nobody moves from. The tip that most stand at is taken, of
        those that as many do the highest, then as of two children of one tip. More than half must be heard for it.
        """
        near, heard = self.voices.near - self.voices.empty, self.voices.heard
        found = self._finding(span)
        if span in self._fetches or span.fragment in self._unadopted or len(near) < 2:
            return []
        if self._is_with_most(span, mine) or self._is_decided(span) or 2 * (len(heard) + 1) <= len(near) + 1:
            found.undecided_since = None
            return []
        holders = {head: sorted(group & heard) for head, group in self._voters(span).items() if head != mine}
        num_there = {mine: len(heard & self._with_us(span, mine)) + 1}
        num_there.update((head, len(group)) for head, group in holders.items() if group)
        best = min(num_there, key=lambda head: (-num_there[head], -head.height, -head.round, head.digest))
        if best == mine:
            found.undecided_since = None
            return []
        if found.undecided_since is None:
            found.undecided_since = now
        if now - found.undecided_since < self.rules.patience_seconds:
            return []
        text = (
            f"{span} stands at {len(num_there)} tips and a majority at none, here at height {mine.height}, round "
            f"{mine.round}; fetching it at height {best.height}, round {best.round}, where {num_there[best]} stand"
        )
        return [Report(topic="adoption", text=text), *self.yield_to(span, holders[best][0])]

    def yield_to(self, span: SpanId, other: PeerId) -> list[Action]:
        """Fetch a span from another member, on its word, where no majority can come about."""
        self._finding(span).goes_back = True
        self.want_transfer(span, other)
        self._fetches[span].on_word_of = other
        return []

    def entry_absorbed(self, span: SpanId, now: float) -> None:
        """Go on with the next entry of a replay, or end it."""
        self._lacking.pop(span, None)
        self._moved_on(span)
        fetch = self._fetches.get(span)
        if fetch is None or fetch.want is not Want.ENTRY:
            return
        self._answered(fetch, now)
        self._drop(span)
        if self._is_behind(span):
            self.want_entry(span, fetch.donor)

    def _is_behind(self, span: SpanId) -> bool:
        """Return whether some peer is known to stand higher; forget it once we stand there."""
        head = self._chains.heads.get(span)
        if head is not None and span in self._targets and head.height >= self._targets[span][0]:
            del self._targets[span]
        return head is not None and span in self._targets

    def entry_absent(self, sender: PeerId, span: SpanId, parent: Digest, now: float) -> list[Action]:
        """Note that a donor has no entry after our head.

        If it said that it is ahead of us, our logs cannot be joined, or it is not: a majority decides, and it is asked
        for no entries on its word for a while. The next comparison raises what another donor lacks again, until it is
        known that who is ahead does not answer.
        """
        asked = self._asked_of(span)
        head = self._chains.heads.get(span)
        if asked is None or asked.donor != sender or head is None or head.digest != parent:
            return []
        self._drop(span)
        if not self._is_behind(span):
            return []
        self._heads_asked.forget(span.fragment)  # the next comparison raises it again
        target = self._targets[span][1]
        lacking = self._lacking.setdefault(span, set())
        lacking.add(sender)
        found = self._finding(span)
        num_unanswered = found.num_unanswered
        if sender != target and (not num_unanswered or len(lacking) + num_unanswered <= MOST_LACKING):
            return []
        found.num_unanswered = 0
        height = self._targets[span][0]
        del self._targets[span], self._lacking[span]
        found.is_unjoinable = True
        followed = self._follow_majority(span, head, now)
        if followed or self._doubted.get((target, span), now) > now:
            return followed
        self._doubted = {key: until for key, until in self._doubted.items() if until > now}
        is_reported = any(peer == target for peer, _ in self._doubted)
        # Who says that it has no entries is doubted for long; an answer that did not come may have been lost.
        self._doubted[target, span] = now + (SHUN_SECONDS if sender == target else self.rules.pause_seconds)
        if is_reported:
            return []
        text = (
            f"{short_peer_id(target)} says that {span} stands at height {height}, here it is {head.height}; nobody "
            "who was asked has the entries between, and no majority says so; staying here"
        )
        return [Report(topic="tips", text=text)]

    def want_transfer(self, span: SpanId, donor: PeerId | None) -> None:
        """Fetch a whole span: its log cannot be joined with the donor's."""
        self._lacking.pop(span, None)
        self._fetches.pop(span, None)  # at the end of those that wait
        self._fetches[span] = _Fetch(want=Want.SPAN, donor=donor)

    def take_span(self, sender: PeerId, reply: SpanReply, now: float) -> list[Action]:
        """Add a piece; ask for the next one, or hand the whole span over.

        A piece that comes late, when another donor has been asked already, is as good as any if it fits.
        """
        span, fetch = reply.span, self._fetches.get(reply.span)
        if fetch is None or fetch.want is not Want.SPAN or sender not in fetch.servers:
            return []
        asked, transfer = fetch.asked, fetch.transfer
        is_asked = asked is not None and asked.donor == sender
        is_new = transfer is None or transfer.head != reply.head
        if is_new and (reply.offset or not is_asked):
            return []  # of a version that was given up
        expected = self.rules.span_bytes[span]
        if self._would_go_back(span, reply.head):
            return []
        received = 0 if transfer is None or is_new else transfer.received_bytes
        behind = reply.offset + len(reply.piece)
        if reply.total_bytes != expected or not reply.piece or reply.offset > received or behind > expected:
            return self._refuse_piece(span, fetch, sender, now)
        if transfer is None or is_new:
            transfer = fetch.transfer = Transfer(reply.head, expected, now)
        if asked is not None and is_asked:
            fetch.asked = None
            self._donors.answered(sender, asked.piece_bytes, len(reply.piece), now - asked.at)
        if reply.offset == received:
            self._answered(fetch, now)
            transfer.add(reply.piece, sender)
            if transfer.is_whole:
                fetch.asked = None
                return [HashSpan(span=span, head=transfer.head, state=transfer.state)]
        return [self._ask(span, fetch, sender, now)] if is_asked and not transfer.is_whole else []

    def _refuse_piece(self, span: SpanId, fetch: _Fetch, sender: PeerId, now: float) -> list[Action]:
        """Leave a donor; what came from others stays, for a peer that was asked once may send anything."""
        fetch.servers.discard(sender)
        is_asked = fetch.asked is not None and fetch.asked.donor == sender
        if is_asked or (fetch.transfer is not None and sender in fetch.transfer.donors):
            fetch.transfer = fetch.asked = fetch.donor = None
        return self._donors.shun(sender, f"served a piece that does not fit {span}", now)

    def _would_go_back(self, span: SpanId, head: SpanHead) -> bool:
        """Return whether a span would lose entries, and give it up then; the next comparison says what is needed."""
        mine = self._chains.heads.get(span)
        if mine is None or head.height >= mine.height or self._finding(span).goes_back:
            return False
        self._drop(span)
        return True

    # -- a majority's word

    def span_hashed(self, span: SpanId, head: SpanHead, content: Digest, now: float) -> list[Action]:
        """Take the result of a `HashSpan`."""
        transfer = self._transfers.get(span)
        if transfer is None or transfer.head != head or not transfer.is_whole:
            return []
        transfer.content = content
        return self._settle(span, transfer, now)

    def take_content(self, sender: PeerId, reply: ContentReply, now: float) -> list[Action]:
        """Note what a voice holds of the spans that are being fetched."""
        return self.settle_fragment(reply.fragment, now) if self._contents.take(sender, reply) else []

    def take_signed(self, answer: SignedContent, now: float) -> None:
        """Note what a voter that is not linked holds; it is expected and signed. Settle the fragment then."""
        asked_at = self.far.take(answer, now)
        self._contents.note(answer.voter, answer.fragment, answer.digests, asked_at)

    def signed(self, now: float, *, holds: bool) -> list[PeerId]:
        """Return voters that have signed of late that they hold the state, or that they do not."""
        return self.far.signed(now - self.rules.patience_seconds, holds=holds)

    def ask_far(self, fragments: Iterable[int], now: float) -> list[Action]:
        """Ask voters that are not linked what they hold, through others."""
        questions = self.far.ask(fragments, sorted(self.namers.far), self.namers.carriers, now)
        return [self._send(carrier, question, now) for carrier, question in questions]

    def settle_fragment(self, fragment: int, now: float) -> list[Action]:
        """Look what has been named of the spans of a fragment that are being fetched."""
        fetched = [(span, transfer) for span, transfer in self._transfers.items() if span.fragment == fragment]
        return [action for span, transfer in fetched for action in self._settle(span, transfer, now)]

    def _confirm(self, now: float) -> list[Action]:
        """Ask all voices what they hold of the spans that come, or that cannot be joined, until a majority names it."""
        if not self._transfers and not self.is_parted:
            if self.is_complete():  # what was said of other spans of a fragment is for the next transfer
                self._contents.clear()
            return []
        actions: list[Action] = []
        for span, transfer in list(self._transfers.items()):
            actions += self._settle(span, transfer, now)
        unsure = [span for span, transfer in self._transfers.items() if not transfer.is_sure]
        fragments = sorted({span.fragment for span in (*unsure, *(self._parted if self.is_parted else ()))})
        for fragment in fragments:
            for voice in self.namers.askable:
                if self._contents.may_ask(fragment, voice, now):
                    actions.append(self._send(voice, ContentRequest(fragment=fragment), now))
        return actions + self.ask_far(fragments, now)

    def _settle(self, span: SpanId, transfer: Transfer, now: float) -> list[Action]:
        """Hand over a span that is what a majority named, refuse one that is not, and give up a version that is old."""
        head, said = transfer.head, self._contents.of(span)
        if not transfer.is_sure:
            transfer.named = None
            self._look_for_names(span, transfer, said)
        if transfer.named is None:
            others = self._elsewhere(span, transfer, now)
            if others and self._believed(span) == others[0]:
                self.yield_to(span, others[0])
            elif others:
                self.want_transfer(span, others[0])
            return []
        if transfer.content is None or self._would_go_back(span, head):
            return []
        if transfer.content != transfer.named:
            return self._refuse_span(span, transfer, now)
        is_adoption = self._finding(span).goes_back
        self._drop(span)
        self._moved_on(span)
        self._has_new_head(span)
        self._chains.set_head(span, head)
        return [ReplaceSpan(span=span, head=head, state=transfer.state, is_adoption=is_adoption)]

    def _look_for_names(self, span: SpanId, transfer: Transfer, said: dict[PeerId, tuple[Digest, Digest]]) -> None:
        """Find out which bytes have been named. Bytes that more than half of the electorate named are final."""
        for what in sorted(set(said.values())):
            voters = [voice for voice, pair in said.items() if pair == what]
            are_enough = self.namers.may_name(transfer.head, voters) or self._believed(span) in voters
            are_enough = are_enough or (span in self.damaged and self.voices.are_most(voters))
            if are_enough and what[0] == transfer.head.digest and not transfer.is_sure:
                transfer.named = what[1]
                transfer.is_sure = self.namers.are_enough(voters) and not self.namers.is_few

    def _believed(self, span: SpanId) -> PeerId | None:
        """Return whose word is enough for a span that is being fetched, though it is no majority.

        A peer that fetches has given up its own bytes. If one other member is all there is, no majority will come.
        """
        only = next(iter(self.namers.near)) if len(self.namers.near) == 1 else None
        fetch = self._fetches.get(span)
        on_word_of = fetch.on_word_of if fetch is not None else None
        return only if self.namers.is_strict or on_word_of is None else on_word_of

    def _elsewhere(self, span: SpanId, transfer: Transfer, now: float) -> list[PeerId]:
        """Return who stands elsewhere by now: a majority, or whose word is taken; they vouch for what comes no more.

        The donor may have lied, or have been asked a moment before it went on: nobody is blamed.
        """
        said = self._contents.of(span, since=transfer.began)
        may_have_start = self.namers.founder_holds and self.namers.founder not in said  # a hub goes on from there
        waits_for_founder = is_start(transfer.head) and may_have_start
        if waits_for_founder or now - transfer.began < 2 * self.rules.entry_seconds:
            return []
        groups: dict[Digest, list[PeerId]] = {}
        for voice, (chain, _) in sorted(said.items()):
            groups.setdefault(chain, []).append(voice)
        elsewhere = [group for chain, group in groups.items() if chain != transfer.head.digest]
        moved = [voice for group in elsewhere for voice in group if voice == self._believed(span)]
        return next((group for group in elsewhere if self.namers.are_enough(group)), moved)

    def _refuse_span(self, span: SpanId, transfer: Transfer, now: float) -> list[Action]:
        """Name who served other bytes than a majority holds, and ask others.

        Where it had named others itself, its memory may have been mended since: all are asked anew what they hold.
        """
        said = self._contents.of(span)
        if any(said.get(donor, (None, None))[1] == transfer.named for donor in transfer.donors):
            self._contents.forget(span.fragment)
        preferred = self._fetches[span].donor
        self.want_transfer(span, None if preferred in transfer.donors else preferred)
        what = f"served {span} with other bytes than a majority holds"
        return [action for donor in sorted(transfer.donors) for action in self._donors.shun(donor, what, now)]

    def _moved_on(self, span: SpanId) -> None:
        """Forget what was found out about the tip before."""
        self._findings.pop(span, None)

    def mend(self, span: SpanId, head: SpanHead, state: bytes) -> Action:
        """Put a span right from the own disk."""
        self._drop(span)
        self._has_new_head(span)
        return ReplaceSpan(span=span, head=head, state=state, is_mended=True)

    def _has_new_head(self, span: SpanId) -> None:
        """Have it compared with all again, whoever was heard before."""
        self.damaged.pop(span, None)
        self.scrub.moved(span)
        self._heads_asked.forget(span.fragment)

    def overrule(self, span: SpanId, others: Sequence[PeerId]) -> None:
        """Fetch a span again from one of a majority that holds something else."""
        self.want_transfer(span, others[0])
        self.scrub.moved(span)

    def _answered(self, fetch: _Fetch, now: float) -> None:
        """Learn how long an answer took, from the first time that the question was asked."""
        if fetch.first_asked is not None:
            self._windows[fetch.want].answered(now - fetch.first_asked)
            fetch.first_asked = None

    def stop_waiting(self) -> None:
        """Forget what was heard of beyond the heads that are here: whoever had it is gone."""
        for span in [span for span in self._fetches if span in self._chains.heads]:
            self._drop(span)
        if len(self._chains.heads) == len(self.rules.span_bytes):
            self._unadopted.clear()

    def lose(self, donor: PeerId) -> None:
        """Forget what a donor was asked: its link is gone."""
        self._donors.lose(donor)
        for fetch in self._fetches.values():
            if fetch.asked is not None and fetch.asked.donor == donor:
                fetch.asked = fetch.first_asked = None

    def _drop(self, span: SpanId) -> None:
        self._fetches.pop(span, None)
