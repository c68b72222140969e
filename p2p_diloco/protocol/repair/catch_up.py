"""The one repair: compare at a closed boundary, fetch missing entries, replay in parent order, compare contents.

It serves joiners, stragglers and healed splits alike. Requests are spread over all donors, a few at a time to each.
Entries come before spans: on a thin link, a joiner must first keep up with the spans that it holds. A donor that
answers some requests may take longer with the others. One that answers none is replaced by another.

The claim of one peer is a reason to ask. Entries prove themselves, because their owner signed them. A whole span proves
nothing, so it is accepted only at a tip, and with the bytes, that a majority named (`majority.py`). Until then it waits
here and blocks nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from p2p_diloco.ids import ZERO_DIGEST, Digest, PeerId, SpanId, short_peer_id
from p2p_diloco.log import SpanHead
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

MOST_ASKED_PER_DONOR = {Want.ENTRY: 16, Want.SPAN: 8}
"""Maximum number of requests under way at one donor: enough to keep it busy even if some requests are lost."""
MOST_ASKED_OF_NEW = 2
QUIET_SHARE = 0.125
"""Share of `piece_seconds` for which a donor that used to answer may be silent while others answer."""
MOST_FORMER = 16
"""Maximum number of peers that are no voices any more and whose tips are kept, beside one for each voice."""
NEARLY_LEVEL = 2
"""Number of entries of a span that a peer lacks at most, and to which new ones are sent as to members: on a long line,
asking for each takes as long as the others need for the next one. If it lacked more, they would fill a thin line."""
MOST_LACKING = 2
"""Number of donors without an entry, plus unanswered requests to the peer ahead, above which that peer is given up."""


@dataclass(slots=True, kw_only=True)
class _Tie:
    """A tie: another peer's tip is another child of our tip's parent, or seems to descend from one.

    Attributes:
        tip: our tip.
        ahead: a peer with a higher tip that does not descend from ours; None: its tip is as high as ours, and wins.
        parent, state: the span before our last entry, from this peer's disk; None until the disk has answered.
    """

    tip: Digest
    ahead: PeerId | None = None
    parent: SpanHead | None = None
    state: bytes | None = None


@dataclass(slots=True, kw_only=True)
class _Fetch:
    """A span, or the entry after its tip, that is being fetched.

    Attributes:
        donor: the donor to ask first; None: any.
        asked: the request under way.
        first_asked: when an unanswered request was first sent.
        transfer: the pieces of a whole span that have arrived.
        servers: donors that were asked for a whole span; pieces are accepted from them.
        late: the donor that answered too late, or not at all.
        on_word_of: a peer whose answer about the bytes is enough.
        is_overruled: whether a majority holds other bytes than this peer. An older version is accepted then.
    """

    want: Want
    donor: PeerId | None
    asked: Asked | None = None
    first_asked: float | None = None
    transfer: Transfer | None = None
    servers: set[PeerId] = field(default_factory=set)
    late: PeerId | None = None
    on_word_of: PeerId | None = None
    is_overruled: bool = False


@dataclass(slots=True, kw_only=True)
class _Finding:
    """Findings about the tip of a span. They are discarded once the tip moves.

    Attributes:
        is_unjoinable: no entries lead from it to the others' tips.
        goes_back: a majority has a lower tip, so a transfer may undo entries.
        above_since: since when a majority has had a lower tip.
        undecided_since: since when no tip has had a majority.
        num_unanswered: number of requests for an entry that the peer ahead did not answer.
        tie: another child of its parent.
    """

    is_unjoinable: bool = False
    goes_back: bool = False
    above_since: float | None = None
    undecided_since: float | None = None
    num_unanswered: int = 0
    tie: _Tie | None = None


class HeadsAsked:
    """Asks for the tips of a fragment: one donor at a time, and each donor only once during a replay. No I/O.

    While a fragment is replayed, it differs from its donors, and each of their heartbeats shows that. If each heartbeat
    led to a request, a donor with a thin line would send tips again and again instead of entries.
    """

    def __init__(self) -> None:
        self._asked: dict[int, Asked] = {}
        self._heard: dict[int, set[PeerId]] = {}

    def may_ask(self, fragment: int, donor: PeerId, now: float, *, is_replayed: bool) -> bool:
        """Return whether no donor is being asked and, during a replay, this donor has not answered yet."""
        if not is_replayed:
            self._heard.pop(fragment, None)
        asked = self._asked.get(fragment)
        return donor not in self._heard.get(fragment, ()) and (asked is None or asked.until <= now)

    def ask(self, fragment: int, donor: PeerId, until: float) -> None:
        """Note a request."""
        self._asked[fragment] = Asked(donor=donor, until=until)

    def take(self, fragment: int, sender: PeerId) -> bool:
        """Note a reply. Return False if it was not requested."""
        asked = self._asked.get(fragment)
        if asked is None or asked.donor != sender:
            return False
        del self._asked[fragment]
        self._heard.setdefault(fragment, set()).add(sender)
        return True

    def forget(self, fragment: int) -> None:
        """Allow all donors to be asked again: the fragment here has changed since they answered."""
        self._heard.pop(fragment, None)

    def clear(self) -> None:
        """Forget all requests and replies."""
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
            Want.ENTRY: Window(seconds=rules.entry_seconds, target_seconds=rules.entry_seconds, leaves_out_way=True),
            Want.SPAN: Window(seconds=rules.piece_seconds, target_seconds=rules.piece_target_seconds),
        }
        self._lacking: dict[SpanId, set[PeerId]] = {}
        self._unadopted: set[int] = set()
        self.is_adopting = False
        self.damaged: dict[SpanId, bool] = {}
        """Spans that stay unchanged until they are replaced, and whether the disk is being asked about each."""
        self.voices = Voices()
        """Peers that may name a tip; set by `listen_to`, like `namers`."""
        self.namers = Voices()
        """Peers that may name the bytes of a fetched span: usually the electorate, linked or not."""
        self._contents = NamedContents(answer_seconds=rules.answer_seconds, pause_seconds=rules.entry_seconds)
        self._tips_of: dict[int, dict[PeerId, tuple[SpanHead, ...]]] = {}
        self._level: dict[int, set[PeerId]] = {}
        self._doubted: dict[tuple[PeerId, SpanId], float] = {}

    def listen_to(self, voices: Voices, namers: Voices | None = None) -> None:
        """Set the peers that may name tips and, if they are not the same, those that may name bytes."""
        self.voices, self.namers = voices, namers if namers is not None else voices

    # -- what is known to be missing

    def want_everything(self) -> None:
        """Fetch every span that has no head here: a newcomer's first step."""
        missing = self.rules.span_bytes.keys() - self._chains.heads.keys() - self._fetches.keys()
        for span in sorted(missing):
            self._fetches[span] = _Fetch(want=Want.SPAN, donor=None)

    def want_entry(self, span: SpanId, donor: PeerId | None) -> None:
        """Fetch the entry that follows this peer's tip of `span`."""
        self._fetches.setdefault(span, _Fetch(want=Want.ENTRY, donor=donor))

    def is_transferred(self, span: SpanId) -> bool:
        """Return whether a whole span is being fetched."""
        fetch = self._fetches.get(span)
        return fetch is not None and fetch.want is Want.SPAN

    def has_asked(self, span: SpanId, donor: PeerId) -> bool:
        """Return whether a request about `span` to this donor is under way."""
        asked = self._asked_of(span)
        return asked is not None and asked.donor == donor

    def forget(self) -> None:
        """Give up everything that is being fetched."""
        for dropped in (self._fetches, self._findings, self._targets, self._lacking, self._heads_asked):
            dropped.clear()
        for told in (self._tips_of, self._level, self._contents):
            told.clear()
        self._chains.forget_forks()

    def adopt(self) -> None:
        """Abandon our branch: fetch spans that differ from a donor of the other branch, even if our log is longer."""
        self.forget()
        self.scrub.begin_again()
        self._unadopted = set(range(len(self.rules.num_spans)))
        self.is_adopting = True

    def adopted(self, fragment: int) -> None:
        """Note that a fragment has the same tips as a donor of the new branch."""
        self._unadopted.discard(fragment)

    def is_complete(self) -> bool:
        """Return whether every span has a head here and none is being fetched."""
        missing = self._fetches or self._unadopted or len(self._chains.heads) < len(self.rules.span_bytes)
        self.is_adopting = self.is_adopting and bool(missing)
        return not missing

    def lacks_entries_only(self) -> bool:
        """Return whether every span has a head here, and only entries are being fetched."""
        has_all = len(self._chains.heads) == len(self.rules.span_bytes)
        return has_all and all(fetch.want is Want.ENTRY for fetch in self._fetches.values())

    def is_nearly_level(self) -> bool:
        """Return whether this peer holds all spans, and lacks at most a few entries of each."""
        if self._unadopted or not self.lacks_entries_only():
            return False
        heads = self._chains.heads
        return all(height - heads[span].height <= NEARLY_LEVEL for span, (height, _) in self._targets.items())

    def left_out(self) -> frozenset[SpanId] | None:
        """Return the spans to which nothing can be contributed, because they are being fetched; None: all spans.

        A span is not left out if only one peer claims a higher tip.
        """
        lacks_some = self._unadopted or len(self._chains.heads) < len(self.rules.span_bytes)
        if not self.is_complete() and (self.is_adopting or lacks_some):
            return None
        return frozenset(span for span in self._fetches if not self._is_one_word(span))

    def _is_one_word(self, span: SpanId) -> bool:
        if self.is_transferred(span) or span not in self._targets or self.voices.needed < 2:
            return False
        mine = self._chains.heads[span]
        told = self._tips_of.get(span.fragment, {})
        return sum(told[voice][span.index].height > mine.height for voice in told.keys() & self.voices.near) < 2

    @property
    def _transfers(self) -> dict[SpanId, Transfer]:
        """Return the transfers of whole spans that have begun to arrive."""
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
        """Return spans from which no entries lead to the others' tips, and spans without a tip named by a majority."""
        return {
            span for span, found in self._findings.items() if found.is_unjoinable or found.undecided_since is not None
        }

    @property
    def lacks_names(self) -> bool:
        """Return whether a span waits for a majority to name its tip or its bytes."""
        return self.is_parted or any(not transfer.is_sure for transfer in self._transfers.values())

    @property
    def goes_by_few(self) -> bool:
        """Return whether spans are fetched on the answers of fewer than a majority of the electorate."""
        return self.namers.is_few and bool(self._transfers)

    @property
    def is_waiting_for_a_majority(self) -> bool:
        """Return whether a whole span has arrived whose bytes have not been named yet."""
        return any(transfer.is_whole and transfer.named is None for transfer in self._transfers.values())

    # -- asking

    def ask_heads(self, fragment: int, donor: PeerId, now: float) -> list[Action]:
        """Ask a peer whose fragment differs from ours for its tips, one peer at a time."""
        # A missing entry noticed in passing has no target height, so it is not a replay.
        replayed = (s for s, fetch in self._fetches.items() if fetch.want is Want.ENTRY and s in self._targets)
        is_replayed = any(span.fragment == fragment for span in replayed)
        if not self._heads_asked.may_ask(fragment, donor, now, is_replayed=is_replayed):
            return []
        self._heads_asked.ask(fragment, donor, now + self.rules.entry_seconds)
        return [self._send(donor, HeadsRequest(fragment=fragment), now)]

    def ask_content(self, fragment: int, donor: PeerId, now: float) -> list[Action]:
        """Ask a peer at our tips for the digests of its bytes, until enough peers agree."""
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
        """Send all requests that can be sent now: waiting ones, and unanswered ones again, to another donor.

        Args:
            donors: peers to ask for entries, and for spans if one of them is the preferred donor.
            sources: peers to ask for other spans; None: the donors.
            holders: peers that hold a state, ready or not. The next entry, or the majority's span, may be theirs alone.
        """
        everybody = list(dict.fromkeys([*donors, *(sources or ()), *holders]))
        for span in [span for span, (_, ahead) in self._targets.items() if ahead not in everybody]:
            del self._targets[span]  # do not wait for a peer that cannot be asked
        self._donors.look(now)
        actions = [*self._confirm(now), *self._give_up_on(everybody, now)]
        wide = self._donors.quick(self._donors.sound(donors if sources is None else sources, now))
        self._take_back_for(wide)
        left = {want: window.size for want, window in self._windows.items()}
        load = {want: dict.fromkeys(everybody, 0) for want in Want}
        for fetch in self._fetches.values():
            if fetch.asked is not None:
                load[fetch.want][fetch.asked.donor] = load[fetch.want].get(fetch.asked.donor, 0) + 1
                left[fetch.want] -= 1
        most = self._most_asked(wide)
        # Entries are requested from any donor: an avoided one may be the only one ahead.
        prompt = self._donors.prompt(donors, now)
        preferred = self._donors.sound([*donors, *holders], now)
        for want, able, preferable in (
            (Want.ENTRY, prompt, self._donors.prompt(everybody, now)),
            (Want.SPAN, wide, preferred),
        ):
            if all(load[want][donor] >= most(want, donor) for donor in able):
                continue  # the usual case during a transfer
            for span, fetch in self._waiting(want):
                free = [donor for donor in able if load[want][donor] < most(want, donor)]
                if not free or left[want] <= 0:
                    break
                donor = fetch.donor
                if donor is None or donor not in preferable or load[want][donor] >= most(want, donor):
                    others = [donor for donor in free if donor != fetch.late]
                    donor = least_loaded(span, others or free, load[want])
                load[want][donor] += 1
                left[want] -= 1
                actions.append(self._ask(span, fetch, donor, now))
        return actions

    def _most_asked(self, sources: Sequence[PeerId]) -> Callable[[Want, PeerId], int]:
        """Return the function that limits the requests under way at one donor.

        One that has not shown yet how quick it is gets few spans, if others have.
        """
        are_some_known = any(map(self._donors.is_known, sources))

        def most(want: Want, donor: PeerId) -> int:
            is_new = want is Want.SPAN and are_some_known and not self._donors.is_known(donor)
            return MOST_ASKED_OF_NEW if is_new else MOST_ASKED_PER_DONOR[want]

        return most

    def _take_back_for(self, sources: Sequence[PeerId]) -> None:
        """Cancel span requests to donors other than `sources`, as many as the sources can serve in their place."""
        under_way = [(fetch, fetch.asked) for fetch in self._fetches.values() if fetch.asked is not None]
        asked_here = sum(asked.donor in sources for _, asked in under_way)
        spare = MOST_ASKED_PER_DONOR[Want.SPAN] * len(sources) - asked_here
        for fetch, asked in under_way:
            is_preferred = fetch.donor == asked.donor
            if spare > 0 and fetch.want is Want.SPAN and not is_preferred and asked.donor not in sources:
                fetch.asked = None
                spare -= 1

    def _waiting(self, want: Want) -> list[tuple[SpanId, _Fetch]]:
        """Return the fetches without a request under way. Spans with pieces come first."""
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
        """Cancel requests to donors that are too slow or have stopped; report donors that stopped serving spans.

        A donor without recent heartbeats is kept: on a thin line they wait for its own pieces. Requests to a donor
        whose link is lost are cancelled in `lose`.
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
            if want is Want.ENTRY:
                self._donors.missed(asked.donor, now)
            if want is Want.ENTRY and span in self._targets and self._targets[span][1] == asked.donor:
                self._finding(span).num_unanswered += 1
            if asked.donor in donors:
                if want is Want.SPAN:
                    what = f"served nothing of {span} for {now - asked.at:.0f} s"
                    actions += self._donors.shun(asked.donor, what, now)
                if is_late:  # a donor that stopped tells nothing about the line
                    self._windows[want].unanswered()
        return actions

    def heard(self, donor: PeerId, now: float) -> None:
        """Note that a donor has sent an answer, and extend the time limits of its other requests."""
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
        """Return whether a reply was requested and fits the run."""
        fits = reply.fragment < len(self.rules.num_spans) and len(reply.heads) == self.rules.num_spans[reply.fragment]
        return fits and self._heads_asked.take(reply.fragment, sender)

    def note_differences(self, sender: PeerId, reply: HeadsReply, now: float) -> list[Action]:
        """Note a voice's tips, and fetch what follows from them.

        The claim of one peer is enough to request entries, even if it is not ready: it may hold entries that the ready
        ones lack, and wait until they have them. A whole span is fetched if a majority has another tip that cannot be
        reached by entries.
        """
        told = self._tips_of.setdefault(reply.fragment, {})
        told[sender] = reply.heads
        if len(told) > 2 * len(self.voices.near) + MOST_FORMER:
            self._tips_of[reply.fragment] = {
                v: heads for v, heads in told.items() if v in self.voices.near or v == sender
            }
        self._level.get(reply.fragment, set()).discard(sender)
        actions: list[Action] = []
        for index, theirs in enumerate(reply.heads):
            span = SpanId(reply.fragment, index)
            mine = self._chains.heads.get(span)
            if mine is None or mine.digest == theirs.digest:
                continue
            if theirs.height > mine.height and self._doubted.get((sender, span), now) <= now:
                self._finding(span).is_unjoinable = False  # this peer may have the entries that others lack
                if theirs.height > self._targets.get(span, (0, sender))[0]:
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
        """Note that a voice has our tips in all spans of a fragment."""
        self._tips_of.get(fragment, {}).pop(voice, None)
        self._level.setdefault(fragment, set()).add(voice)

    def _voters(self, span: SpanId) -> dict[SpanHead, set[PeerId]]:
        """Return the voices by tip, without those that have our tips in the whole fragment."""
        voters: dict[SpanHead, set[PeerId]] = {}
        for voice, heads in self._tips_of.get(span.fragment, {}).items():
            voters.setdefault(heads[span.index], set()).add(voice)
        return voters

    def _with_us(self, span: SpanId, mine: SpanHead) -> set[PeerId]:
        """Return the voices that have our tip."""
        return self._voters(span).get(mine, set()) | self._level.get(span.fragment, set())

    def _is_decided(self, span: SpanId) -> bool:
        mine = self._chains.heads.get(span)
        groups = self._voters(span)
        if mine is not None:
            groups[mine] = self._with_us(span, mine)
        return any(self._names(span, head, group) for head, group in groups.items())

    def _follow_majority(self, span: SpanId, mine: SpanHead, now: float) -> list[Action]:
        """Fetch a span that a majority holds at a tip that entries from ours do not reach.

        A majority at a lower tip may still be catching up with entries that only this peer holds. So it gets two cycles
        for that, unless this peer is adopting another branch of rosters.
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
            f"{span} is at height {mine.height}, round {mine.round}; a majority is at height {named.height}, round "
            f"{named.round}, and no entries lead there; fetching the span"
        )
        return [Report(topic="adoption", text=text)]

    def _names(self, span: SpanId, head: SpanHead, group: set[PeerId]) -> bool:
        """Return whether the peers at a tip are a majority, including unlinked voters that have signed it."""
        far = {
            voter
            for voter, (chain, _) in self._contents.of(span).items()
            if voter in self.namers.told and chain == head.digest
        }
        return self.voices.are_enough(group) or (not self.namers.is_few and self.namers.are_enough(group | far))

    # -- two children of one tip

    def _settle_tie(self, span: SpanId, mine: SpanHead, theirs: SpanHead, sender: PeerId, now: float) -> list[Action]:
        """If another child of our tip's parent wins, rebuild the parent, then request that child.

        Of two children, the later round wins, then the smaller digest. A child from which others have continued also
        wins, because more than half were present for it: a peer with a higher tip has no entry that follows ours, and
        may have the other child. No peer moves because of a claim: the parent comes from its own disk, and the other
        child is an entry signed by its owner. A peer at the tip of most peers does not move either.
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
        """Take the result of a `RebuildParent`. The other child is requested when others next report that they hold it.

        If the disk does not reach the parent, and there is only one other peer, the span is fetched from that peer:
        otherwise the two would never agree again. With more peers, a majority decides.
        """
        tie, mine = self._finding(span).tie, self._chains.heads.get(span)
        if tie is None or mine is None or not tip == tie.tip == mine.digest:
            return []
        if parent is not None:
            tie.parent, tie.state = parent, state
            self._chains.fork_at(span, parent, is_left=tie.ahead is not None)
            self._heads_asked.forget(span.fragment)
            return []
        others = sorted(self._tips_of.get(span.fragment, {}).keys() & self.voices.heard)
        text = f"{span} differs from what others hold, and this disk cannot rebuild its earlier state"
        if len(self.voices.near) != 1 or not others:
            return [Report(topic="tips", text=f"{text}; waiting for a majority")]
        text = f"{text}; fetching it from {short_peer_id(others[0])}, the only other member"
        return [Report(topic="adoption", text=text), *self.yield_to(span, others[0])]

    def step_back(self, span: SpanId) -> list[Action]:
        """Set a span back to the tip before our last entry: the other child of its parent has arrived, and wins."""
        found = self._finding(span)
        tie, found.tie = found.tie, None
        assert tie is not None, "the other child is requested only in a tie"
        assert tie.parent is not None, "the other child is requested only with its parent"
        assert tie.state is not None, "a parent comes with its bytes"
        round_index = self._chains.heads[span].round
        self._chains.set_head(span, tie.parent)
        if tie.ahead is not None:
            self._doubted.pop((tie.ahead, span), None)  # its height was right, on another line
        text = f"{span} has two children in round {round_index} or later; following the one that all peers choose"
        replaced = ReplaceSpan(span=span, head=tie.parent, state=tie.state, is_mended=True, is_adoption=True)
        self._has_new_head(span)
        return [Report(topic="adoption", text=text), replaced]

    def _is_with_most(self, span: SpanId, mine: SpanHead) -> bool:
        """Return whether more than half of the voices, with this peer, have its tip.

        Return False if half of the electorate is known to be on another line: the peers in contact may be only the few
        that can be dialled, and the bootstrap peer does not vote.
        """
        num_with_us = len(self.voices.heard & self._with_us(span, mine))
        has_most = 2 * (num_with_us + 1) > len(self.voices.near) + 1
        return has_most and len(self._voters_on_another_line(span, mine)) < self.namers.half

    def _voters_on_another_line(self, span: SpanId, mine: SpanHead) -> set[PeerId]:
        """Return the voters that have reported, or signed, a tip that did not lead to ours."""
        tips = {voice: head.digest for head, group in self._voters(span).items() for voice in group & self.namers.heard}
        tips |= {voter: chain for voter, (chain, _) in self._contents.of(span).items() if voter in self.namers.told}
        return {
            voter for voter, tip in tips.items() if tip != mine.digest and self._chains.entry_after(span, tip) is None
        }

    def _follow_most(self, span: SpanId, mine: SpanHead, now: float) -> list[Action]:
        """Fetch a span if no tip has had a majority for two cycles, so that all peers take the same tip.

        If disks cannot rebuild earlier states, several tips can remain, and no peer moves. The tip with most peers is
        taken; in a tie the highest, then as between two children of one tip. More than half must be in contact.
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
            f"{span} has {len(num_there)} tips and none has a majority, here height {mine.height}, round {mine.round}; "
            f"fetching it at height {best.height}, round {best.round}, the tip with most peers ({num_there[best]})"
        )
        return [Report(topic="adoption", text=text), *self.yield_to(span, holders[best][0])]

    def yield_to(self, span: SpanId, other: PeerId) -> list[Action]:
        """Fetch a span from another member, trusting its answer, where no majority is possible."""
        self._finding(span).goes_back = True
        self.want_transfer(span, other)
        self._fetches[span].on_word_of = other
        return []

    def entry_absorbed(self, span: SpanId, now: float) -> None:
        """Continue a replay with the next entry, or end it."""
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
        """Return whether a peer is known to have a higher tip. Forget it once that height is reached."""
        head = self._chains.heads.get(span)
        if head is not None and span in self._targets and head.height >= self._targets[span][0]:
            del self._targets[span]
        return head is not None and span in self._targets

    def entry_absent(self, sender: PeerId, span: SpanId, parent: Digest, now: float) -> list[Action]:
        """Note that a donor has no entry after our tip.

        If the donor claimed to be ahead of us, either our logs cannot be joined or the claim is wrong. A majority
        decides, and for a while its claim does not lead to requests. If another donor lacks the entry, the next
        comparison leads to a new request, until it is known that the peer ahead does not answer.
        """
        asked = self._asked_of(span)
        head = self._chains.heads.get(span)
        if self.is_transferred(span) or asked is None or asked.donor != sender or head is None or head.digest != parent:
            return []  # a donor of a whole span that answers so is shunned once it is late
        self._drop(span)
        if not self._is_behind(span):
            return []
        self._heads_asked.forget(span.fragment)  # the next comparison leads to a new request
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
        # A peer that reports that it has no entry is doubted for long. A missing answer may have been lost.
        self._doubted[target, span] = now + (SHUN_SECONDS if sender == target else self.rules.pause_seconds)
        if is_reported:
            return []
        text = (
            f"{short_peer_id(target)} reports {span} at height {height}, here it is at {head.height}; no peer that was "
            "asked has the entries between, and no majority confirms the report; staying here"
        )
        return [Report(topic="tips", text=text)]

    def want_transfer(self, span: SpanId, donor: PeerId | None) -> None:
        """Fetch a whole span, because its log cannot be joined with the donor's."""
        self._lacking.pop(span, None)
        before = self._fetches.pop(span, None)  # so that it waits at the end
        is_overruled = before is not None and before.is_overruled
        self._fetches[span] = _Fetch(want=Want.SPAN, donor=donor, is_overruled=is_overruled)

    def take_span(self, sender: PeerId, reply: SpanReply, now: float) -> list[Action]:
        """Add a piece. Then request the next one or, if the span is whole, have it hashed.

        A late piece is accepted if it fits, even if another donor has been asked meanwhile.
        """
        span, fetch = reply.span, self._fetches.get(reply.span)
        if fetch is None or fetch.want is not Want.SPAN or sender not in fetch.servers:
            return []
        asked, transfer = fetch.asked, fetch.transfer
        is_asked = asked is not None and asked.donor == sender
        is_new = transfer is None or transfer.head != reply.head
        if is_new and (reply.offset or not is_asked):
            return []  # it belongs to an abandoned version
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
        """Stop using a donor. Keep a transfer that it has no part in: once asked, a peer may send anything."""
        fetch.servers.discard(sender)
        is_asked = fetch.asked is not None and fetch.asked.donor == sender
        if is_asked or (fetch.transfer is not None and sender in fetch.transfer.donors):
            fetch.transfer = fetch.asked = fetch.donor = None
        return self._donors.shun(sender, f"served a piece that does not fit {span}", now)

    def _would_go_back(self, span: SpanId, head: SpanHead, *, is_sure: bool = True) -> bool:
        """Return whether a transfer would undo entries. If so, cancel it; the next comparison shows what is needed.

        An overruled span may go back, because its bytes are wrong here, and a slow transfer is older than the entries
        that arrive meanwhile. They follow again.

        Args:
            is_sure: whether more than half of the electorate named the bytes, or may still do so.
        """
        mine, fetch = self._chains.heads.get(span), self._fetches.get(span)
        if mine is None or head.height >= mine.height or self._finding(span).goes_back:
            return False
        if fetch is not None and fetch.is_overruled and is_sure:
            return False
        self._drop(span)
        return True

    # -- majorities

    def span_hashed(self, span: SpanId, head: SpanHead, content: Digest, now: float) -> list[Action]:
        """Take the result of a `HashSpan`."""
        transfer = self._transfers.get(span)
        if transfer is None or transfer.head != head or not transfer.is_whole:
            return []
        transfer.content = content
        return self._settle(span, transfer, now)

    def take_content(self, sender: PeerId, reply: ContentReply, now: float) -> list[Action]:
        """Note a voice's digests of spans that are being fetched."""
        return self.settle_fragment(reply.fragment, now) if self._contents.take(sender, reply) else []

    def take_signed(self, answer: SignedContent, now: float) -> None:
        """Note the digests of an unlinked voter, which are expected and signed. Call `settle_fragment` afterwards."""
        asked_at = self.far.take(answer, now)
        self._contents.note(answer.voter, answer.fragment, answer.digests, asked_at)

    def signed(self, now: float, *, holds: bool) -> list[PeerId]:
        """Return voters that have recently signed that they hold the state, or that they do not."""
        return self.far.signed(now - self.rules.patience_seconds, holds=holds)

    def ask_far(self, fragments: Iterable[int], now: float) -> list[Action]:
        """Ask unlinked voters for their digests, through other peers."""
        questions = self.far.ask(fragments, sorted(self.namers.far), self.namers.carriers, now)
        return [self._send(carrier, question, now) for carrier, question in questions]

    def settle_fragment(self, fragment: int, now: float) -> list[Action]:
        """Check whether spans of a fragment that are being fetched have been named."""
        fetched = [(span, transfer) for span, transfer in self._transfers.items() if span.fragment == fragment]
        return [action for span, transfer in fetched for action in self._settle(span, transfer, now)]

    def _confirm(self, now: float) -> list[Action]:
        """Ask all voices for digests of spans that arrive, or cannot be joined, until a majority names each."""
        if not self._transfers and not self.is_parted:
            if self.is_complete():  # else keep answers about other spans for the next transfer
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
        """Hand over a span that has the named content, refuse one that has not, and give up an outdated version."""
        head = transfer.head
        if not transfer.is_sure:
            transfer.named = None
            self._look_for_names(span, transfer)
        if transfer.named is None:
            others = self._elsewhere(span, transfer, now)
            if others and self._believed(span) == others[0]:
                self.yield_to(span, others[0])
            elif others:
                self.want_transfer(span, others[0])
            return []
        if transfer.content is None or self._would_go_back(span, head, is_sure=transfer.is_sure):
            return []
        if transfer.content != transfer.named:
            return self._refuse_span(span, transfer, now)
        actions: list[Action] = []
        is_adoption, mine = self._finding(span).goes_back, self._chains.heads.get(span)
        if mine is not None and head.height < mine.height and not is_adoption:
            is_adoption = True
            text = (
                f"{span} goes back from height {mine.height} to {head.height}, where a majority has named the right "
                "bytes; the entries since then follow again"
            )
            actions.append(Report(topic="adoption", text=text))
        self._drop(span)
        self._moved_on(span)
        self._doubted = {key: until for key, until in self._doubted.items() if key[1] != span}  # not of this tip
        self._has_new_head(span)
        self._chains.set_head(span, head)
        return [*actions, ReplaceSpan(span=span, head=head, state=transfer.state, is_adoption=is_adoption)]

    def _look_for_names(self, span: SpanId, transfer: Transfer) -> None:
        """Find the bytes that have been named. Those named by more than half of the electorate are final.

        What a voice said about a tip stays true when it has moved on, unless it has said something else since.
        """
        for what, voters in sorted(self._contents.lately(span).items()):
            are_enough = self.namers.may_name(transfer.head, voters) or self._believed(span) in voters
            are_enough = are_enough or (span in self.damaged and self.voices.are_most(voters))
            if are_enough and what[0] == transfer.head.digest and not transfer.is_sure:
                transfer.named = what[1]
                transfer.is_sure = self.namers.are_enough(voters) and not self.namers.is_few

    def _believed(self, span: SpanId) -> PeerId | None:
        """Return the one peer whose answer is enough for a span that is being fetched; None if a majority is needed.

        A peer that fetches a span has given up its own bytes. If there is only one other member, there is no majority.
        """
        only = next(iter(self.namers.near)) if len(self.namers.near) == 1 else None
        fetch = self._fetches.get(span)
        on_word_of = fetch.on_word_of if fetch is not None else None
        return only if self.namers.is_strict or on_word_of is None else on_word_of

    def _elsewhere(self, span: SpanId, transfer: Transfer, now: float) -> list[PeerId]:
        """Return the majority, or the believed peer, that is at another tip now. It will not name the fetched version.

        The donor may have lied, or may have been asked just before it moved on, so it is not avoided.
        """
        said = self._contents.of(span, since=transfer.began)
        lately = self._contents.lately(span, since=transfer.began)
        may_have_start = self.namers.founder_holds and self.namers.founder not in said  # else it has moved on
        waits_for_founder = is_start(transfer.head) and may_have_start
        if waits_for_founder or now - transfer.began < 2 * self.rules.entry_seconds:
            return []
        moved = [v for v, (chain, _) in said.items() if v == self._believed(span) and chain != transfer.head.digest]
        elsewhere = (sorted(group) for (chain, _), group in lately.items() if chain != transfer.head.digest)
        return next((group for group in elsewhere if self.namers.are_enough(group)), moved)

    def _refuse_span(self, span: SpanId, transfer: Transfer, now: float) -> list[Action]:
        """Report donors that served other bytes than a majority holds, and ask others.

        If a donor had itself named the right bytes, its memory may have been repaired since, so all are asked again.
        """
        said = self._contents.of(span)
        if any(said.get(donor, (None, None))[1] == transfer.named for donor in transfer.donors):
            self._contents.forget(span.fragment)
        preferred = self._fetches[span].donor
        self.want_transfer(span, None if preferred in transfer.donors else preferred)
        what = f"served {span} with other bytes than a majority holds"
        return [action for donor in sorted(transfer.donors) for action in self._donors.shun(donor, what, now)]

    def _moved_on(self, span: SpanId) -> None:
        """Discard the findings about the previous tip."""
        self._findings.pop(span, None)

    def mend(self, span: SpanId, head: SpanHead, state: bytes) -> Action:
        """Replace the bytes of a span with those rebuilt from this peer's disk."""
        self._drop(span)
        self._has_new_head(span)
        return ReplaceSpan(span=span, head=head, state=state, is_mended=True)

    def _has_new_head(self, span: SpanId) -> None:
        """Have a span compared with all peers again, because its bytes or tip have changed."""
        self.damaged.pop(span, None)
        self.scrub.moved(span)
        self._heads_asked.forget(span.fragment)

    def overrule(self, span: SpanId, others: Sequence[PeerId]) -> None:
        """Fetch a span again from one of a majority that holds other bytes."""
        self.want_transfer(span, others[0])
        self._fetches[span].is_overruled = True
        self.scrub.moved(span)

    def _answered(self, fetch: _Fetch, now: float) -> None:
        """Record how long an answer took, from the first time that it was requested."""
        if fetch.first_asked is not None:
            self._windows[fetch.want].answered(now - fetch.first_asked)
            fetch.first_asked = None

    def stop_waiting(self) -> None:
        """Stop fetching anything beyond the tips held here: the peers that had it are gone."""
        for span in [span for span in self._fetches if span in self._chains.heads]:
            self._drop(span)
        if len(self._chains.heads) == len(self.rules.span_bytes):
            self._unadopted.clear()

    def lose(self, donor: PeerId) -> None:
        """Cancel requests to a donor whose link is lost."""
        self._donors.lose(donor)
        for fetch in self._fetches.values():
            if fetch.asked is not None and fetch.asked.donor == donor:
                fetch.asked = fetch.first_asked = None

    def _drop(self, span: SpanId) -> None:
        self._fetches.pop(span, None)
